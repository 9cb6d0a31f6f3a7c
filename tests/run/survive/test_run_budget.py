"""A budget over all starts of a run: what is counted, when it is told, and when it ends."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import ending, paceline, ranks_of, records_of, start, wait_for_step, write_spec

from paceline.errors import ConfigError
from paceline.lock import take
from paceline.patience import programs_per_core
from paceline.run.survive import budget as budget_module
from paceline.run.survive.budget import RunBudget, budget_of, spent_by_all, spent_in
from paceline.run.survive.notice import Notices
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.timing import held_devices as held_module
from paceline.spec.journal.timing.clock import clock_here
from paceline.spec.journal.timing.held_devices import held_by_others, held_in
from paceline.spec.run import RunSpec
from paceline.spec.survive.budget import BUDGETS, BudgetSpec, SharedBudgetSpec
from paceline.units import format_usd

START = 1_772_323_200.0
CLUSTER = {"price_usd_per_device_hour": {"value": 3.6}, "watts_per_device": {"value": 1000.0},
           "carbon_g_per_kwh": {"value": 500.0}}  # fmt: skip


def journal(folder: Path) -> Path:
    """Two starts: 2 devices for 100 s, of which 20 s with one after a fault; then 4 devices for 50 s."""
    common: dict[str, Any] = {"kind": "run_started", "cluster": CLUSTER, "forecast": {}}
    seconds = {"total": 10.0, "step": 2.0}
    starts = [
        [
            {**common, "time": START, "world_size": 2},
            {"kind": "recovery", "time": START + 82, "from_world": 2, "to_world": 1, "seconds": seconds},
            {"kind": "step", "time": START + 100, "step": 9},
        ],
        [{**common, "time": START + 500, "world_size": 4}, {"kind": "step", "time": START + 550, "step": 12}],
    ]
    (folder / "journal").mkdir()
    for number, lines in enumerate(starts, start=1):
        text = "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "step", "ti'
        (folder / "journal" / f"{number:04d}.jsonl").write_text(text)
    return folder


def test_what_earlier_starts_cost_is_counted_with_their_devices(tmp_path: Path) -> None:
    spent = spent_in(held_in(journal(tmp_path)))
    seconds = 80 * 2 + 20 * 1 + 50 * 4
    assert spent["device_seconds"] == pytest.approx(seconds)
    assert spent["usd"] == pytest.approx(seconds / 1000)
    assert spent["kwh"] == pytest.approx(seconds / 3600) and spent["carbon_g"] == pytest.approx(seconds / 3600 * 500)


@pytest.mark.parametrize("days", [1, -1])
def test_a_clock_that_is_set_after_the_last_record_spends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    """Between a fault and the next world it counted as held: a day on two devices, which ended the run."""
    now, real = time.time(), time.time
    start = {"kind": "run_started", "cluster": CLUSTER, "forecast": {}, "time": now - 8, "world_size": 2}
    lines = [{**start, **{f"clock_{name}" if name == "apart" else name: value for name, value in clock_here().items()}},
             {"kind": "step", "time": now - 5, "step": 9}]  # fmt: skip
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "0001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(time, "time", lambda: real() + days * 86400)
    budgets = budget_of(RunSpec(budget=BudgetSpec(device_hours=1.0)), tmp_path, PlannedRecord(), 2)
    assert budgets is not None
    seconds = budgets.budgets[0].spent()["device_hours"] * 3600
    assert 2 * 8 <= seconds < 2 * 8 + 60


def test_a_folder_that_cannot_be_listed_once_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that counts what others spend of a shared budget ended there, and nobody counted it any more."""
    spec = RunSpec(budget=BudgetSpec(usd=9.0, shared_by="team"), tags={"team": "a"})
    budgets, looks, looked = budget_of(spec, journal(tmp_path), PlannedRecord(), 2), [0], threading.Event()

    def stumbling(*given: object) -> dict[str, float]:
        looks[0] += 1
        if looks[0] == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        looked.set()
        return spent_in(())

    assert budgets is not None
    budgets.budgets[0]._ask_others = stumbling
    notices = Notices(spec)
    notices._budget = budgets
    notices._watch(notices._ask_others, 0.001)
    assert looked.wait(60)
    notices.close()


def test_it_is_told_once_at_its_share_and_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.38 USD are spent, and 4 devices spend 0.004 a second: 80 % of 0.5 are reached at 5 s, 0.5 at 30 s,
    which the step that begins at 29 s would use up."""
    clock = [0.0]
    monkeypatch.setattr(budget_module.time, "monotonic", lambda: clock[0])
    budget = RunBudget(BudgetSpec(usd=0.5), held_in(journal(tmp_path)), {}, CLUSTER, 4)
    found, buys = [], []
    for second in range(32):
        clock[0] = float(second)
        found.append((budget.look(), budget.take()))
        buys.append(budget.steps_left())
    assert [second for second, (_, told) in enumerate(found) if told] == [5]
    assert [second for second, (because, _) in enumerate(found) if because] == [29, 30, 31]
    assert found[29][0] == "the budget of $0.50 is used up"
    (warning,) = found[5][1]
    assert "$0.40 of $0.50 is spent, 80%; what is left buys 25 steps" in warning.because
    assert budget.spent() == {"usd": pytest.approx(0.38 + 0.004 * 31)}
    assert buys[0] is None, "no step was made yet"
    assert buys[5] == pytest.approx(25) and buys[29] == pytest.approx(1) and buys[31] == 0.0


def test_a_world_of_fewer_devices_pays_for_its_own_from_the_last_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forecast is of 4 devices at 0.001 a second each. 10 s after the last record a world of 3 goes on."""
    forecast = {"usd": {"value": 4.0}, "run_seconds": {"value": 1000.0}}
    clock = [100.0]
    monkeypatch.setattr(budget_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(budget_module.time, "time", lambda: START + 560)
    run = RunSpec(budget=BudgetSpec(usd=0.45))
    planned = PlannedRecord(cluster={"devices": 4}, forecast=forecast)
    before = budget_of(run, journal(tmp_path), planned, 4)
    assert before is not None and before.look() == "" and before.budgets[0].spent() == {"usd": pytest.approx(0.42)}
    after = budget_of(run, tmp_path, planned, 3)
    assert after is not None
    notices = Notices(run)
    notices.enter(0.0, True, before)
    notices.enter(0.0, True, after)
    clock[0] += 5
    assert notices.look() == "" and after.budgets[0].spent() == {"usd": pytest.approx(0.38 + 15 * 0.003)}
    assert len(notices.take()) == 1, "what was told in the world before is told once"
    for _ in range(2):  # steps of 2.5 s, each of 0.0075
        clock[0] += 2.5
        assert notices.look() == ""
    clock[0] += 2.5
    assert notices.look() == "the budget of $0.45 is used up", "0.4475 are spent"
    notices.enter(0.0, False, None)
    assert notices.because == "" and Notices(run).look() == ""


def test_a_budget_of_a_tag_counts_what_runs_with_the_same_value_have_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module.time, "monotonic", lambda: 0.0)  # this run's own time costs nothing

    def beside(name: str, **tags: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for path in (journal(folder) / "journal").iterdir():
            lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
            lines[0]["spec"] = {"run": {"tags": tags}}
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    beside("theirs", team="speech")
    beside("others", team="vision")
    beside("without")
    own = tmp_path / "own"
    own.mkdir()
    run = RunSpec(tags={"team": "speech"}, budget=BudgetSpec(usd=0.5, shared_by="team"))
    alone = spent_in(held_in(beside("mine", team="speech")))
    assert spent_by_all(run.budget, run, own)["usd"] == pytest.approx(alone["usd"] * 2), "theirs and mine"
    budget = budget_of(run, own, PlannedRecord(cluster=CLUSTER), 4)
    assert budget is not None and budget.budgets[0].spent()["usd"] == pytest.approx(alone["usd"] * 2, rel=1e-3)
    assert "used up" in budget.look(), "0.76 of 0.5 USD are spent, none of it by this run"
    beside("later", team="speech")
    budget.refresh()
    assert budget.budgets[0].spent()["usd"] == pytest.approx(alone["usd"] * 3, rel=1e-3)
    with pytest.raises(ConfigError, match="no tag of the run"):
        RunSpec(budget=BudgetSpec(usd=1.0, shared_by="team"))


def test_what_others_have_spent_since_the_look_before_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They spend 10 $ a second. A step began while their new sum was there and its moment was not: 300 of 200 $."""
    clock, told, found = [0.0], [0.0], list[float]()
    monkeypatch.setattr(budget_module.time, "monotonic", lambda: clock[0])
    budget = RunBudget(BudgetSpec(usd=250.0), (), {}, {}, 1)

    class StepBegins(deque[Any]):
        def append(self, each: Any) -> None:
            found.append(budget.spent()["usd"])
            super().append(each)

    budget._asked = StepBegins()
    budget.share(lambda: {**spent_in(()), "usd": told[0]})
    for told[0], clock[0] in ((100.0, 10.0), (200.0, 20.0)):
        budget.refresh()
    assert found == [0.0, 0.0, 200.0], "one answer tells no pace"
    assert budget.spent() == {"usd": 200.0}
    clock[0] = 25.0
    assert budget.look() == "the budget of $250 is used up", "at their pace"


def test_a_run_at_work_that_writes_nothing_spends_until_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last record is 85 s old: its devices are held where its process lives, and its newest start has not ended."""
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    for folder in (theirs, own):
        folder.mkdir()
    newest = journal(theirs) / "journal" / "0002.jsonl"

    def seconds() -> float:
        return sum(each.seconds for each in held_by_others(own, {"team": "speech"}, "team") if each.began >= began)

    with take(theirs):
        began = time.time()
        start = {"kind": "run_started", "cluster": CLUSTER, "forecast": {}, "world_size": 4, "attempt": 2}
        lines = [{**start, "time": began, "spec": {"run": {"tags": {"team": "speech"}}}},
                 {"kind": "step", "time": began + 5, "step": 12, "attempt": 2}]  # fmt: skip
        newest.write_text("".join(json.dumps(line) + "\n" for line in lines))
        monkeypatch.setattr(held_module.time, "time", lambda: began + 90)
        assert seconds() == pytest.approx(90)
        newest.write_text(
            newest.read_text() + json.dumps({"kind": "run_ended", "time": began + 7, "attempt": 2}) + "\n"
        )
        assert seconds() == pytest.approx(7), "it has ended, and does what comes after"
        newest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert seconds() == pytest.approx(5), "nobody is there"
    with take(theirs):
        monkeypatch.setattr(held_module, "live_since", lambda folder: began + 60)
        assert seconds() == pytest.approx(5), "another process is about to make a start of its own"


@pytest.mark.parametrize("theirs", [0.0, 0.004, 0.1])
def test_two_runs_at_once_stop_where_their_shared_budget_ends(monkeypatch: pytest.MonkeyPatch, theirs: float) -> None:
    """4 devices spend 0.004 USD a second here, and others spend theirs meanwhile, which is asked now and then."""
    clock = [0.0]
    monkeypatch.setattr(budget_module.time, "monotonic", lambda: clock[0])
    budget = RunBudget(BudgetSpec(usd=1.0), [], {}, CLUSTER, 4)
    budget.share(lambda: {**spent_in(()), "usd": theirs * clock[0]})
    asks, looks = budget.next_look_seconds(), 0
    while not budget.look():
        clock[0] += 0.5  # a step
        if clock[0] >= asks:
            budget.refresh()
            looks, asks = looks + 1, clock[0] + budget.next_look_seconds()
    per_second = theirs + 0.004
    assert clock[0] + 0.5 == pytest.approx(1.0 / per_second, abs=0.51), "the step that uses it up is the last"
    assert looks < 30, "journals of others are not read all the time"


@pytest.mark.parametrize(("mine", "ours", "is_over"), [("stop", "requeue", True), ("requeue", "requeue", False)])
def test_a_budget_of_the_run_and_one_of_its_team_may_meet_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str, ours: str, is_over: bool
) -> None:
    """0.004 USD a second here; others have spent 0.9 of the team's dollar. Each ends alone where it is the first."""
    clock = [0.0]
    monkeypatch.setattr(budget_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(budget_module.time, "time", lambda: clock[0])
    monkeypatch.setattr(budget_module, "held_by_others", lambda run_dir, tags, tag: [tag, tags[tag]])
    spent = {"usd": 0.9}
    monkeypatch.setattr(budget_module, "spent_in", lambda held: {**NOTHING_SPENT, **(spent if held else {})})

    def ended(own: float, shared: float) -> tuple[float, str, bool, int]:
        clock[0] = 0.0
        run = RunSpec(tags={"team": "speech"}, budget=BudgetSpec(usd=own, at_end=mine),
                      shared_budget=SharedBudgetSpec(usd=shared, shared_by="team", at_end=ours))  # fmt: skip
        budgets = budget_of(run, tmp_path, PlannedRecord(cluster=CLUSTER), 4)
        assert budgets is not None and len(budgets.budgets) == 2
        told = 0
        while not (because := budgets.look()):
            told += len(budgets.take())
            clock[0] += 1.0
        return clock[0], because, budgets.is_over, told + len(budgets.take())

    at, because, over, told = ended(0.1, 1.0)
    assert at == 24.0 and over is is_over and told == 2, "both use their tenth of a dollar up with the 25th step"
    assert because == (
        "the budget of $0.10 is used up, and the budget of $1.00 that all runs of the same team share is used up"
    )
    at, because, over, _ = ended(50.0, 1.0)
    assert (at, over) == (24.0, False) and because.startswith(
        "the budget of $1.00 that all runs of the same team share"
    )
    at, because, over, _ = ended(0.06, 1.0)
    assert (at, over, because) == (14.0, mine == "stop", "the budget of $0.06 is used up")


def test_a_shared_budget_names_its_tag() -> None:
    assert RunSpec(budget=BudgetSpec(usd=1.0)).budgets == (BudgetSpec(usd=1.0),) and RunSpec().budgets == ()
    with pytest.raises(ConfigError, match="names no tag"):
        RunSpec(shared_budget=SharedBudgetSpec(usd=1.0))
    with pytest.raises(ConfigError, match=r"run.shared_budget.shared_by = 'team' is no tag"):
        RunSpec(shared_budget=SharedBudgetSpec(usd=1.0, shared_by="team"))


@pytest.mark.parametrize("first", [1.0, 3.0, 20.0])
@pytest.mark.parametrize("limit", [25.0, 30.0, 47.5])
def test_a_slow_first_step_does_not_end_a_run_early(
    monkeypatch: pytest.MonkeyPatch, first: float, limit: float
) -> None:
    """The first step of a start is the slowest by far; those after it take a second, and one of eight two."""
    clock = [0.0]
    monkeypatch.setattr(budget_module.time, "monotonic", lambda: clock[0])
    budget, steps, took = RunBudget(BudgetSpec(device_hours=limit / 3600), [], {}, CLUSTER, 1), 0, 0.0
    while not budget.look():
        took = first if steps == 0 else 2.0 if steps % 8 == 0 else 1.0
        clock[0], steps = clock[0] + took, steps + 1
    paid = clock[0] + (2.0 if steps % 8 == 0 else 1.0)
    assert abs(paid - limit) <= 2.0, "within the longest of the steps after the first"


NOTHING_SPENT = {"usd": 0.0, "kwh": 0.0, "carbon_g": 0.0, "device_seconds": 0.0}
BUDGETS_OF_A_SECOND = {  # option -> what makes a second of one device cost a thousandth of the unit, and the options
    "usd": ["cluster.price_usd_per_device_hour=3.6"],
    "kwh": ["cluster.watts_per_device=3600"],
    "kg_co2e": ["cluster.watts_per_device=3600", "run.when.carbon=1000"],
    "device_hours": [],
}


@pytest.mark.deep
@pytest.mark.parametrize("name", BUDGETS_OF_A_SECOND)
def test_a_budget_in_every_unit_ends_within_a_step_over_all_starts_a_kill_between(tmp_path: Path, name: str) -> None:
    """A run of one device is killed midway and started again: both starts count, and the end is at the limit.

    A second costs a thousandth of a unit, or 1/3600 device-hours.
    """
    run_dir, unit = tmp_path / "run", 1 / 3600 if name == "device_hours" else 1e-3
    spec = write_spec(tmp_path, run_dir, steps=100_000)
    seconds = 8.0 * max(1.0, programs_per_core())  # a start alone takes seconds where programs wait for a core
    options = [*BUDGETS_OF_A_SECOND[name], f"run.budget.{name}={seconds * unit}", "run.budget.forecast=tell",
               "run.checkpoint_every=5 steps"]  # fmt: skip
    words = [word for option in options for word in ("--set", option)]
    killed = start("train", spec, *words)
    wait_for_step(run_dir, 20, killed)
    os.killpg(killed.pid, signal.SIGKILL) if os.getpgid(killed.pid) == killed.pid else killed.kill()
    ending(killed, 60)
    before = spent_in(held_in(run_dir))["device_seconds"]
    assert 0 < before < seconds
    done = paceline("train", spec, *words)
    assert done.returncode == 0, done.stderr
    (end,) = records_of(run_dir, "run_ended")
    assert (end["status"], end["exit_code"]) == ("stopped", 0)
    steps = records_of(run_dir, "step")
    held = held_in(run_dir)
    assert len(held) == 2, "both starts"
    paid = spent_in([*held[:-1], replace(held[-1], ended=steps[-1]["time"])])
    amount, of_unit, _ = BUDGETS[name]
    longest = max(step["seconds"]["total"] for step in steps) + max(
        after["time"] - before["time"] for before, after in itertools.pairwise(steps) if after["attempt"] == 2
        and before["attempt"] == 2
    )  # fmt: skip
    assert abs(paid[amount] / of_unit / unit - seconds) < longest, (paid, seconds)
    again = paceline("train", spec, *words)
    assert again.returncode == 2 and "is used up" in again.stderr


def test_an_amount_without_a_rate_never_ends_a_run() -> None:
    budget = RunBudget(BudgetSpec(usd=1e-9, device_hours=1000.0), [], {}, {}, 1)
    assert budget.look() == "" and budget.spent()["usd"] == 0.0


def test_a_run_ends_within_a_step_of_its_budget_with_a_checkpoint_and_is_not_begun_again(tmp_path: Path) -> None:
    """The price makes a second of both ranks cost a dollar, so the budget is a number of seconds."""
    run_dir = tmp_path / "run"
    spec = write_spec(tmp_path, run_dir, 2, "dp_replicate = 2", steps=100_000)
    usd = 4.0 * max(1.0, programs_per_core())  # a start alone takes seconds where programs wait for a core
    budget = ["cluster.price_usd_per_device_hour=1800", f"run.budget.usd={usd}", "run.budget.forecast=tell"]
    options = [word for option in budget for word in ("--set", option)]
    done = paceline("train", spec, *options)
    assert done.returncode == 0, done.stderr
    assert "  budget buys " in done.stdout, "what is left is always shown"
    (end,) = records_of(run_dir, "run_ended")
    assert (end["status"], end["exit_code"]) == ("stopped", 0)
    last = records_of(run_dir, "step")[-1]
    saves = records_of(run_dir, "checkpoint")
    assert saves[-1]["step"] == last["step"], "what was paid for is kept"
    told = [record for record in records_of(run_dir, "decision") if record["what"] in ("budget", "stop")]
    assert [(record["what"], record["to"]) for record in told] == [("budget", "spend on"), ("stop", "stopped")]
    held = held_in(run_dir)
    paid = spent_in([replace(held[0], ended=last["time"])])["usd"]
    moments = [step["time"] for step in records_of(run_dir, "step")]
    longest = max(after - before for before, after in itertools.pairwise(moments))  # of a step, with what lies between
    assert usd - longest < paid < usd + longest
    again = paceline("train", spec, *options)
    assert again.returncode == 2 and f"the budget of {format_usd(usd)} is used up" in again.stderr
    refused = paceline(
        "train", spec, *options, "--set", f"run.budget.usd={usd + 96}", "--set", "run.budget.forecast=refuse"
    )
    assert refused.returncode == 3 and "is beyond the budget" in refused.stderr and "task.stop" in refused.stderr


@pytest.mark.deep
def test_the_budget_goes_on_where_the_first_rank_is_lost(tmp_path: Path) -> None:
    """A dollar a second for both ranks; rank 0, which counts, is killed in step 5, and another counts from there."""
    run_dir = tmp_path / "run"
    spec = write_spec(tmp_path, run_dir, 2, "dp_replicate = 2", steps=100_000)
    budget = ["cluster.price_usd_per_device_hour=1800", "run.budget.usd=12", "run.budget.forecast=tell"]
    process = start("train", spec, *(word for option in budget for word in ("--set", option)))
    wait_for_step(run_dir, 5, process)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    _, stderr = ending(process, 240)
    assert process.returncode == 0, stderr
    assert len(records_of(run_dir, "recovery")) == 1
    told = [record["to"] for record in records_of(run_dir, "decision") if record["what"] == "stop"]
    steps = records_of(run_dir, "step")
    held = held_in(run_dir)
    paid = spent_in([*held[:-1], replace(held[-1], ended=steps[-1]["time"])])["usd"]
    slack = max(step["seconds"]["total"] for step in steps) + 2.0  # what a death costs between two records
    assert told == ["stopped"] and abs(paid - 12.0) < slack, paid
