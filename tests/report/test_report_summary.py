"""The numbers of a summary, checked by hand, and that any part of a journal gives one."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_journals as journals
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.history.records import gather
from paceline.plan.learn.observe import _steady
from paceline.report.compare import basis_of, memory_group, reference_start, time_group
from paceline.report.html import render_html
from paceline.report.series import thin, trend
from paceline.report.summary import summarise
from paceline.spec.journal.reading import read_journal, read_records

GIB = journals.GIB


def small_run(seconds: list[float], **changes: Any) -> list[dict[str, Any]]:
    """A start with a step per given duration, one second apart from what it takes."""
    out = journals.Writer()
    out.begin(steps=len(seconds), **changes)
    for index, total in enumerate(seconds, start=1):
        parts = {"data": 0.1, "forward_backward": total - 0.5, "reduce": 0.2, "optimizer": 0.15, "other": 0.05}
        out.time += total
        measured = {"loss": 5.0 - index, "weight": 100, "peak_bytes": index, "grad_norm": 1.0, "lr": 0.1}
        timed = {"seconds": {"total": total, **parts}, "tokens_per_second": 100 / total}
        out.records.append({"kind": "step", "time": out.time, "attempt": 1, "step": index, **measured, **timed})
    return out.records


def test_medians_leave_out_first_steps_and_steps_with_a_checkpoint_or_evaluation() -> None:
    records = small_run([9.0, 1.0, 2.0, 3.0, 50.0, 40.0])
    records.append({"kind": "checkpoint", "attempt": 1, "step": 5, "seconds": 1.0, "bytes": 10})
    records.append({"kind": "evaluation", "attempt": 1, "step": 6, "seconds": 1.0, "loss": 1.0})
    summary = summarise(records)
    assert summary.speed.median_seconds == 2.0
    assert "medians over 3 steps, without the first step" in summary.basis
    assert summary.speed.items_per_second == 50.0


def test_the_report_and_what_is_learnt_take_the_same_steps(tmp_path: Path) -> None:
    records = small_run([9.0, 1.0, 2.0, 3.0, 50.0])
    records += [{**record, "attempt": 2} for record in small_run([8.0, 40.0, 1.5])]  # undone from step 1 on
    records += [{"kind": "checkpoint", "time": 1.0, "attempt": 1, "step": 5, "seconds": 1.0, "bytes": 10}]
    records += [{"kind": "evaluation", "time": 1.0, "attempt": 2, "step": 2, "seconds": 1.0, "loss": 1.0}]
    (tmp_path / "journal").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "journal" / "0001.jsonl").write_text(lines, encoding="utf-8")
    taken = [record.seconds["total"] for record in _steady(list(read_records(tmp_path)))]
    assert taken == [1.0, 2.0, 3.0, 1.5]
    found = gather(read_journal(tmp_path))
    assert basis_of(found, reference_start(found)).steps.column("total").tolist() == taken


def test_where_every_step_is_left_out_the_basis_says_what_is_taken_instead() -> None:
    records = small_run([9.0, 2.0])
    records.append({"kind": "evaluation", "attempt": 1, "step": 2, "loss": 1.0})
    assert summarise(records).speed.median_seconds == 2.0
    assert "every other step has a checkpoint or an evaluation" in summarise(records).basis
    assert "first step of a start included" in summarise(small_run([9.0])).basis
    assert summarise([]).basis == "no step was completed"


def test_terms_are_held_against_the_clock_that_measures_them() -> None:
    groups = {group.name: group for group in summarise(small_run([9.0, 2.0, 2.0])).time_groups}
    joined = groups["forward, backward and communication"]
    assert joined.forecast == pytest.approx(0.44 + 0.88 + 0.31 + 0.12 + 0.08)
    assert joined.measured == pytest.approx(1.5 + 0.2)
    assert joined.error == pytest.approx(1.7 / 1.83 - 1)
    assert groups["optimizer"].error == pytest.approx(0.15 / 0.09 - 1)
    assert groups["data"].forecast is None and groups["data"].measured == pytest.approx(0.1)


def test_without_sharding_gradient_reduction_has_a_clock_of_its_own() -> None:
    plan = {**journals.run_started(1, 0.0)["plan"], "layout": {"dp_replicate": 2, "dp_shard": 1}}
    groups = {group.name: group for group in summarise(small_run([9.0, 2.0, 2.0], plan=plan)).time_groups}
    assert groups["forward and backward"].measured == pytest.approx(1.5)
    assert groups["gradient reduction"].forecast == pytest.approx(0.2)
    assert groups["gradient reduction"].measured == pytest.approx(0.2)


def test_where_a_rank_measured_its_waiting_computing_and_communication_are_apart() -> None:
    records = small_run([9.0, 2.0, 2.0])
    for record in records:
        if record["kind"] == "step":
            record["waiting_seconds"] = 0.5
    groups = {group.name: group for group in summarise(records).time_groups}
    computing, waiting = groups["computing forward and backward"], groups["communication and waiting"]
    assert computing.forecast == pytest.approx(0.44 + 0.88 + 0.31) and computing.measured == pytest.approx(1.7 - 0.5)
    assert waiting.forecast == pytest.approx(0.12 + 0.08) and waiting.measured == pytest.approx(0.5)


def test_what_was_learnt_is_shared_out_over_the_groups() -> None:
    records = small_run([9.0, 2.0, 2.0])
    plain = [group.forecast for group in summarise(records).time_groups]
    start = next(record for record in records if record["kind"] == "run_started")
    for key in ("time", "memory"):
        total = sum(term["value"] for term in start["forecast"][key])
        name, formula = "learnt from 2 runs here", "sum x (1.100 - 1)"
        start["forecast"][key].append(journals.term(name, "learnt", "none", 0.1 * total, formula))
    summary = summarise(records)
    for before, group in zip(plain, summary.time_groups, strict=True):
        assert group.forecast == (None if before is None else pytest.approx(1.1 * before))
        assert not group.terms or "x 1.100, learnt from 2 runs here" in group.note
    announced = sum(term["value"] for term in start["forecast"]["memory"])
    assert sum(group.forecast or 0.0 for group in summary.memory_groups) == pytest.approx(announced)


def test_a_term_belongs_to_its_clock_and_its_meter_whatever_its_name() -> None:
    records = small_run([9.0, 2.0, 2.0])
    forecast = records[0]["forecast"]
    for term in (*forecast["time"], *forecast["memory"]):
        term["name"] = f"the optimizer's gradient copies, gathered from {term['name']}"
    renamed, plain = summarise(records), summarise(small_run([9.0, 2.0, 2.0]))
    assert [group.forecast for group in renamed.time_groups] == [group.forecast for group in plain.time_groups]
    assert [group.forecast for group in renamed.memory_groups] == [group.forecast for group in plain.memory_groups]


def test_terms_of_a_journal_that_tells_no_kind_are_known_by_their_names() -> None:
    plain, older = small_run([9.0, 2.0, 2.0]), small_run([9.0, 2.0, 2.0])
    for records in (plain, older):
        terms = records[0]["forecast"]["time"]
        terms.append(journals.term("learnt from 2 runs here", "learnt", "none", 0.2, "sum x (1.1 - 1)"))
    for term in (*older[0]["forecast"]["time"], *older[0]["forecast"]["memory"]):
        del term["kind"], term["clock"]
    assert summarise(older) == summarise(plain)


def test_a_term_that_nobody_knows_counts_to_the_rest() -> None:
    records = small_run([9.0, 2.0, 2.0])
    records[0]["forecast"]["time"].append({"name": "sharpening the optimizer", "value": 0.3})
    records[0]["forecast"]["time"].append(journals.term("waiting", "mail", "mail", 0.1, ""))
    groups = {group.name: group.forecast for group in summarise(records).time_groups}
    assert groups["other"] == pytest.approx(0.4)
    assert time_group("none") == "other" and memory_group("mail").startswith("activations")


def test_memory_by_component_joins_what_was_measured_jointly() -> None:
    records = journals.complete()
    memory = next(record for record in records if record["kind"] == "memory")
    memory["components"] = {"weights": 0.02 * GIB, "activations_and_runtime": 0.5 * GIB}
    groups = {group.name: group for group in summarise(records).memory_groups}
    assert groups["activations and runtime"].forecast == pytest.approx((0.286 + 0.03 + 0.21) * GIB)
    assert groups["activations and runtime"].measured == 0.5 * GIB
    assert "runtime" not in groups and groups["gradients"].measured is None


def test_what_print_shows_of_a_summary_fits_a_screen() -> None:
    shown = str(summarise(journals.complete())).splitlines()
    assert len(shown) < 12 and max(map(len, shown)) < 120
    assert any(line.startswith("step time: 1.92 s forecast, ") for line in shown)
    assert any("Finished: " in line for line in shown) and shown[-1].endswith("report.html")


def test_promises_and_their_verdicts() -> None:
    summary = summarise(journals.complete())
    step, memory, energy = (summary.promise(name) for name in ("step_time", "memory", "energy"))
    assert step.verdict == "inside" and step.forecast == 1.92
    assert step.error == pytest.approx(summary.speed.median_seconds / 1.92 - 1)
    assert memory.error == pytest.approx(0.597 / 0.61 - 1)
    seconds = summary.attempts[0].seconds
    assert energy.measured == pytest.approx(2 * 12.0 * seconds / 3.6e6)
    assert summary.promise("money").measured == pytest.approx(2 * 0.05 * seconds / 3600)
    assert summary.promise("carbon").verdict == "unknown" and summary.promise("carbon").measured is None
    assert "estimate" in energy.measured_how
    assert summarise(small_run([9.0, 5.0, 5.0])).promise("step_time").verdict == "above"
    assert summarise(small_run([9.0, 1.0, 1.0])).promise("step_time").verdict == "below"


def test_an_unfinished_run_is_held_against_its_part_of_the_forecast() -> None:
    records = [r for r in journals.complete() if r["kind"] != "run_ended" and r.get("step", 0) <= 150]
    summary = summarise(records)
    assert summary.status == "unfinished" and summary.steps_done == 150 and summary.steps_planned == 300
    assert summary.promise("run_time").forecast == pytest.approx(150 * 1.92)
    assert "50%" in summary.promise("money").measured_how
    assert summary.promise("step_time").forecast == 1.92


@pytest.mark.parametrize(("stop", "done"), [(40, 40), (10, 15)])
def test_a_task_that_was_made_longer_or_shorter_is_held_against_as_many_steps(stop: int, done: int) -> None:
    """A run of 120 steps that went on to 200 was "200 of 120 steps", and its energy held against that of 120."""
    out = journals.Writer()
    out.begin(forecast=journals.forecast(steps=20))
    out.steps(1, 15)
    out.begin(15, gap=1.0, forecast=journals.forecast(steps=stop))
    out.steps(16, stop)
    out.records.append({"kind": "run_ended", "time": out.time, "attempt": 2, "status": "complete", "step": done})
    summary = summarise(out.records)
    assert summary.steps_planned == stop and f"{done} of {stop} steps" in summary.status_text
    assert "early" not in summary.status_text
    promised = journals.forecast(steps=20)["run_seconds"]["value"]
    assert summary.promise("run_time").forecast == pytest.approx(promised * done / 20)
    assert f"scaled to the {done / 20:.0%} of its steps" in summary.promise("energy").measured_how


def test_a_proof_made_before_the_start_is_not_in_its_wall_time() -> None:
    inside = {phase.name: phase.seconds for phase in summarise(journals.complete()).phases}
    records = journals.complete()
    proof = next(record for record in records if record["kind"] == "verify")
    proof["time"] = records[0]["time"] + 0.1
    before = summarise(records)
    phases = {phase.name: phase.seconds for phase in before.phases}
    assert inside["verification"] == pytest.approx(2.1) and phases["verification"] == pytest.approx(0.1)
    assert sum(phases.values()) == pytest.approx(before.wall_seconds, abs=1e-3)


def test_lost_work_and_phases_over_all_starts() -> None:
    summary = summarise(journals.resumed())
    phases = {phase.name: phase.seconds for phase in summary.phases}
    assert [attempt.lost_steps for attempt in summary.attempts] == [37, 0, 0]
    assert [attempt.resumed_at_step for attempt in summary.attempts] == [0, 100, 220]
    assert [attempt.status for attempt in summary.attempts] == ["no end on record", "requeue", "complete"]
    assert phases["between starts"] == pytest.approx(54.0, abs=1e-4)
    assert phases["evaluation"] == pytest.approx(6 * 1.1)
    assert phases["checkpoints"] == pytest.approx(4 * 0.8)
    assert phases["lost work"] == pytest.approx(37 * 1.95, rel=0.02)
    assert phases["data"] == pytest.approx(300 * 0.01)
    assert phases["start-up and other"] == pytest.approx(18.0, abs=1e-3)
    assert sum(phases.values()) == pytest.approx(summary.wall_seconds, abs=1e-3)
    assert summary.steps_done == 300 and summary.items_seen == 300 * 131072
    assert len(summary.series["loss"].points) == 300


def test_steps_beyond_a_resume_are_lost_even_if_they_were_not_run_again_yet() -> None:
    records = [r for r in journals.resumed() if r["attempt"] == 1 or (r["attempt"] == 2 and r.get("step", 0) <= 105)]
    summary = summarise(records)
    assert summary.steps_done == 105
    assert summary.attempts[0].lost_steps == 37
    assert summary.series["loss"].points[-1][0] == 105


def test_losses() -> None:
    records = small_run([1.0, 1.0, 1.0])
    records += [{"kind": "evaluation", "attempt": 1, "step": step, "loss": loss} for step, loss in ((1, 3.0), (3, 3.5))]
    losses = summarise(records).losses
    assert (losses.first, losses.last, losses.best, losses.best_step) == (4.0, 2.0, 2.0, 3)
    assert (losses.held_out_first, losses.held_out_last, losses.held_out_best) == (3.0, 3.5, 3.0)
    assert losses.held_out_best_step == 1 and losses.unigram == 3.12


def test_mfu_is_known_only_where_a_peak_is() -> None:
    speed = summarise(small_run([9.0, 2.0, 2.0])).speed
    assert speed.mfu == pytest.approx(0.40 * 1.92 / 2.0) and "published dense bf16 peak" in speed.mfu_convention
    records = small_run([9.0, 2.0, 2.0])
    records[0]["forecast"]["mfu"] = "nan"
    assert summarise(records).speed.mfu is None
    assert summarise(records).speed.mfu_convention == "the device's peak is unknown"


def test_slow_steps_name_the_part_that_was_slow() -> None:
    records = small_run([9.0, 2.0, 2.0, 2.0, 4.0])
    records[-1]["seconds"] |= {"data": 2.1, "forward_backward": 1.5}
    slowest = summarise(records).speed.slowest
    assert [slow.step for slow in slowest] == [1, 5]
    assert slowest[0].remark == "first step of start 1"
    assert slowest[1].slower_part == "data" and slowest[1].slower_by_seconds == pytest.approx(2.0)


def test_failure_and_faults() -> None:
    summary = summarise(journals.failed())
    assert summary.status == "failed" and summary.error is not None
    assert summary.error["try"] == "a lower task.optimizer.lr or bf16"
    assert summary.faults[0].fields["rank"] == 0
    assert summary.series["loss"].missing == 1 and any("finite" in remark for remark in summary.remarks)


def test_a_changed_plan_is_held_against_its_own_steps() -> None:
    out = journals.Writer()
    out.begin()
    out.steps(1, 10)
    slower = journals.forecast(step_seconds=3.9)
    out.begin(10, gap=1.0, plan={"layout": {"dp_shard": 1}}, plan_text="single device", world_size=1, forecast=slower)
    for number in range(11, 21):
        out.records.append(journals.step(2, number, out.time, out.rng, 3.9))
    summary = summarise(out.records)
    assert summary.promise("step_time").forecast == 3.9
    assert summary.promise("step_time").verdict == "inside"
    assert "10 steps under another plan left out" in summary.basis


@pytest.mark.parametrize("make", [journals.complete, journals.resumed, journals.failed, journals.one_step])
def test_summaries_survive_json(make: Any) -> None:
    plain = summarise(make()).as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


def test_thinning_keeps_every_extreme() -> None:
    x = np.arange(100_000, dtype=float)
    y = np.sin(x / 900)
    y[[777, 50_001, 99_000]] = [40.0, -40.0, math.nan]
    series = thin(x, y, 500)
    assert len(series.points) <= 500 and series.total == 100_000 and series.missing == 1
    assert (777.0, 40.0) in series.points and (50_001.0, -40.0) in series.points
    assert series.points[0][0] == 0 and series.points[-1][0] == 99_999
    assert [point[0] for point in series.points] == sorted(point[0] for point in series.points)
    assert len(trend(x, y).points) == 100 and trend(x[:50], y[:50]).points == ()


RESUMED = journals.resumed()[130:160]
SHORT = [journals.resumed()[0], *RESUMED, *journals.complete()[:4], *journals.failed()[-3:]]
JUNK = st.sampled_from([None, "", "nan", [], {}, -1, 0, 1e300, "text", [1], {"a": None}, True])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(SHORT)))
def test_any_prefix_gives_a_report(length: int) -> None:
    page = render_html(summarise(SHORT[:length]))
    assert page.startswith("<!doctype html>") and page.endswith("</html>\n")


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_records_with_missing_or_ill_typed_fields_give_a_report(data: st.DataObject) -> None:
    records = copy.deepcopy(SHORT)
    for _ in range(data.draw(st.integers(1, 6))):
        place: Any = records[data.draw(st.integers(0, len(records) - 1))]
        while True:
            key = data.draw(st.sampled_from(sorted(place)))
            if isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
                place = place[key]
                continue
            break
        if data.draw(st.booleans()):
            del place[key]
        else:
            place[key] = data.draw(JUNK)
        if not place:
            break
    summary = summarise([record for record in records if record])
    json.dumps(summary.as_dict(), allow_nan=False)
    assert "</html>" in render_html(summary)
