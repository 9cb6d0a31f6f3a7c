"""A run that is folded record by record says what the report says of the same records, at every moment of it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import report_journals as journals

from paceline.account.budget_left import nobody
from paceline.history.phases import surviving
from paceline.history.records import gather
from paceline.observe.dash import page_parts
from paceline.observe.live.glance import Glances
from paceline.observe.live.run import RUNNING, SILENT, LiveRun
from paceline.observe.live.spent import left_so_far, seconds_left, spent_so_far
from paceline.report.summary import summarise

RUNS = [journals.complete, journals.resumed, journals.failed, journals.one_step]


def append(run_dir: Path, records: list[dict[str, Any]]) -> None:
    (run_dir / "journal").mkdir(parents=True, exist_ok=True)
    for record in records:
        with (run_dir / "journal" / f"{record['attempt']:04d}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


@pytest.mark.parametrize("make", RUNS)
def test_at_any_moment_it_says_what_the_report_says(tmp_path: Path, make: Any) -> None:
    records, live, done = make(), LiveRun(tmp_path), 0
    draw = random.Random(7)
    while done < len(records):
        size = draw.randrange(1, 90)
        append(tmp_path, records[done : done + size])
        done += size
        assert live.refresh() and not live.is_behind
        whole = summarise(records[:done])
        assert live.steps_done == whole.steps_done and live.steps_planned == whole.steps_planned
        assert {phase.name: pytest.approx(phase.seconds) for phase in live.phases()} == {
            phase.name: phase.seconds for phase in whole.phases
        }
        steps = surviving(gather(records[:done]))
        assert live.steps.taken().column("step").tolist() == steps.column("step").tolist()
        assert live.undone == sum(start.lost_steps for start in whole.attempts)
    assert live.status() == summarise(records).status and not live.refresh()


def test_a_start_that_makes_steps_again_in_its_own_processes_takes_their_place(tmp_path: Path) -> None:
    writer = journals.Writer()
    writer.begin()
    writer.steps(1, 20)
    writer.steps(11, 25)
    append(tmp_path, writer.records)
    live = LiveRun(tmp_path)
    live.refresh()
    assert live.undone == 10 and live.steps_done == 25 and len(live.steps) == 25
    assert {phase.name: pytest.approx(phase.seconds) for phase in live.phases()} == {
        phase.name: phase.seconds for phase in summarise(writer.records).phases
    }


def test_a_long_journal_is_read_over_several_looks(tmp_path: Path) -> None:
    append(tmp_path, journals.resumed())
    live, looks = LiveRun(tmp_path), 0
    while live.refresh(seconds=0.0) or live.is_behind:
        looks += 1
    assert looks == len(journals.resumed()) and live.steps_done == 300


def test_without_an_end_a_run_is_running_and_then_silent(tmp_path: Path) -> None:
    records = journals.complete()[:-1]
    append(tmp_path, records)
    live = LiveRun(tmp_path)
    live.refresh()
    assert live.status(now=records[-1]["time"] + 59) == RUNNING
    assert live.status(now=records[-1]["time"] + 61) == SILENT
    assert Glances().at(tmp_path).status(now=records[-1]["time"] + 59) == RUNNING
    assert Glances().at(tmp_path).status(now=records[-1]["time"] + 61) == SILENT


def test_what_it_costs_is_held_against_the_promise_and_the_budget(tmp_path: Path) -> None:
    records = journals.complete()
    records[0]["spec"]["run"]["budget"] = {"usd": 1.0}
    append(tmp_path, records[: len(records) // 2])
    live = LiveRun(tmp_path)
    live.refresh()
    found = {each.name: each for each in spent_so_far(live)}
    first, last = records[0]["time"], records[len(records) // 2 - 1]["time"]
    hours = 2 * (last - first) / 3600
    money, kwh = found["usd"], found["kwh"]
    assert found["device_hours"].spent == pytest.approx(hours)
    promised = records[0]["forecast"]["usd"]["value"]
    assert money.spent == pytest.approx(promised * hours / (2 * records[0]["forecast"]["run_seconds"]["value"] / 3600))
    assert money.promised == promised and money.promised_so_far == pytest.approx(promised * live.steps_done / 300)
    assert kwh.spent > 0
    (budget,) = left_so_far(live, nobody)
    assert budget.name == "usd" and budget.left == pytest.approx(1.0 - money.spent)
    assert budget.steps == pytest.approx(budget.left * live.steps_done / money.spent)
    assert budget.loss is None, "the curve is too short to foretell anything"
    left = seconds_left(live)
    assert left == pytest.approx((300 - live.steps_done) * 1.95, rel=0.05)
    append(tmp_path, records[len(records) // 2 :])
    live.refresh()
    assert seconds_left(live) is None


def test_what_is_left_of_a_budget_buys_steps_and_a_loss(tmp_path: Path) -> None:
    records = journals.complete()
    records[0]["spec"]["run"]["budget"] = {"usd": 1.0}
    for record in records:
        if record["kind"] == "step":
            record["loss"] = 2 + 3 * record["step"] ** -0.5
    step = 250
    append(tmp_path, records[: 1 + next(place for place, each in enumerate(records) if each.get("step") == step)])
    live = LiveRun(tmp_path)
    live.refresh()
    (money,) = left_so_far(live, nobody)
    # What is spent buys 250 steps; the page tells a loss where the rest is not too far ahead.
    money_of = {money.spent * 1.5: 125, money.spent * 5: None}
    for limit, steps in money_of.items():
        live.starts[1].spec["run"]["budget"]["usd"] = limit
        (money,) = left_so_far(live, nobody)
        assert (money.loss is not None) == (steps is not None)
        if money.loss is not None:
            assert money.steps == pytest.approx(125) and money.loss.low <= 2 + 3 * 375**-0.5 <= money.loss.high
            assert f"to {money.loss.text}" in page_parts.spent(page_parts.RunView(live, 0.0))


def test_records_of_watchers_are_kept_and_do_not_lengthen_the_run(tmp_path: Path) -> None:
    append(tmp_path, journals.complete()[:50])
    live = LiveRun(tmp_path)
    live.refresh()
    before = live.phases()
    late = {"time": journals.START + 1e6, "schema": 1}
    with (tmp_path / "journal" / "alerts-0001.jsonl").open("a") as file:
        for state in ("firing", "resolved"):
            file.write(json.dumps({**late, "kind": "alert", "rule": "silent", "title": state, "state": state}) + "\n")
    live.refresh()
    assert live.phases() == before
    assert [alert.state for alert in live.alerts.values()] == ["resolved"] and len(live.alerted) == 2


def test_a_finding_of_the_curve_leaves_the_figures_of_blocks_in_place(tmp_path: Path) -> None:
    append(tmp_path, journals.complete()[:20])
    live, late = LiveRun(tmp_path), {"kind": "health", "attempt": 1, "time": journals.START + 1e3, "absent": {}}
    told = {"detector": "loss spike", "block": "", "value": 9.0, "threshold": 3.0, "evidence": "", "advice": ""}
    append(tmp_path, [
        {**late, "step": 4, "values": {"block 1": {"grad_norm": 0.5}}, "told": []},
        {**late, "step": 5, "values": {}, "told": [told]},
    ])  # fmt: skip
    live.refresh()
    assert live.health is not None and (live.health.step, live.health.values) == (4, {"block 1": {"grad_norm": 0.5}})
    assert [(each["detector"], each["step"]) for each in live.told] == [("loss spike", 5)]


def test_a_glance_tells_what_the_whole_journal_tells(tmp_path: Path) -> None:
    glances = Glances()
    assert glances.at(tmp_path).step is None
    for make in RUNS:
        append(tmp_path / make.__name__, make())
        found, whole = glances.at(tmp_path / make.__name__), summarise(make())
        assert (found.step, found.steps, found.ended) == (whole.steps_done, whole.steps_planned, whole.status)
        assert found.loss == whole.losses.last or make is journals.failed
    append(tmp_path / "one_step", [{**journals.step(1, 2, 0.0, random.Random(0)), "loss": 0.25}])
    assert glances.at(tmp_path / "one_step").loss == 0.25


def test_a_journal_that_cannot_be_read_is_told_and_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(tmp_path, journals.complete())
    live = LiveRun(tmp_path)

    def broken(*_: Any) -> Any:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("paceline.observe.follow.starts_of", broken)
        assert not live.refresh() and "Stale" in live.trouble
    assert live.refresh() and not live.trouble and live.steps_done == 300


def test_a_run_that_is_removed_while_it_is_looked_at_is_said_to_be_gone(tmp_path: Path) -> None:
    """The page showed its last look for ever, as of a run that is there."""
    live = LiveRun(journals.write(tmp_path / "run", journals.complete()[:20]))
    live.refresh()
    assert live.trouble == ""
    version, steps = live.version, live.steps_done
    shutil.rmtree(tmp_path / "run")
    assert not live.refresh() and "gone" in live.trouble and live.version > version and live.steps_done == steps
    version = live.version
    live.refresh()
    assert live.version == version, "it is drawn once"
    journals.write(tmp_path / "run", journals.complete()[:20])
    live.refresh()
    assert live.trouble == ""
