"""The forecast grid on recorded rows: its scores by hand, its page, and going on where a call stopped."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from plan_examples import cluster, opened, plan, profile

from paceline.plan.cost.pricing import forecast_plan
from paceline.plan.learn.observation import Observation, machine_key
from paceline.plan.learn.recall import forecast_runs
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    """(grid.scores, forecast_grid) of the benchmarks' folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("grid.scores"), importlib.import_module("forecast_grid")


def row(scores, task, devices, plan, measured, forecast, copies=False, **changes):
    base = scores.Row(
        task=task, devices=devices, plan=plan, is_copies=copies, measured_seconds=measured, forecast_seconds=forecast,
        learnt_seconds=measured, measured_bytes=100.0, forecast_bytes=110.0, flops=8.0, limit_bytes=0.0,
        covered_80=True, learnt_covered_80=False,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


@pytest.fixture
def rows(modules):
    """Three groups: copies are best, copies are not (and not forecast to be), copies do not fit."""
    make = lambda *values, **changes: row(modules[0], *values, **changes)  # noqa: E731
    return [
        make("plain", 2, "copies", 1.0, 1.1, copies=True),
        make("plain", 2, "shards", 2.0, 2.4),
        make("plain", 2, "pipeline", 4.0, 3.6),
        make("slow network", 2, "copies", 4.0, 3.0, copies=True),
        make("slow network", 2, "shards", 5.0, 4.0),
        make("slow network", 2, "pipeline", 2.0, 3.5),
        make("little memory", 2, "shards", 1.0, 1.0, limit_bytes=90.0),
        make("little memory", 2, "pipeline", 2.0, 2.0, limit_bytes=120.0),
        make("little memory", 2, "tensor", 4.0, 4.0),
    ]


def test_measured_runs_become_rows_and_each_learns_from_the_half_it_is_not_in(modules):
    """No recorded row passes through here: after the planner's signature had changed, a whole grid was measured that
    could not be scored."""
    here, model = cluster(2, host="node-1"), opened(profile(2))
    layouts = [Layout(dp_replicate=2), Layout(dp_shard=2), Layout(tp=2), Layout(dp_replicate=2)]
    runs = forecast_runs([measured(model, here, layout, factor=1.3) for layout in layouts], lambda run: here)
    rows = modules[0].rows_of(runs, [{"limit_bytes": 0.0, "pace": 1.02}] * len(runs))
    for found in rows:
        assert found.measured_seconds == pytest.approx(1.3 * found.forecast_seconds)
        assert found.forecast_seconds < found.learnt_seconds < found.measured_seconds, (
            "learnt towards what was measured"
        )
    assert [found.is_copies for found in rows] == [True, False, False, True]
    (alone,) = modules[0].rows_of(runs[:1], [{"limit_bytes": 0.0}])
    assert alone.learnt_seconds == alone.forecast_seconds, "nobody to learn from"


def measured(model, here, layout, factor):
    """A run that took `factor` times what the formulas say."""
    chosen = plan(layout, micro_batch=4)
    forecast = forecast_plan(model, here, chosen, batch_samples=64, steps=1)
    return Observation(
        date="2026-01-01T00:00:00+00:00", run="runs/a", machine=machine_key(here), name="a", profile=model,
        optimizer="adamw", plan=chosen, devices=2, devices_per_node=2, steps=50,
        step_seconds=forecast.step_seconds.value * factor, spread=0.02, peak_bytes=forecast.peak_bytes.value,
    )  # fmt: skip


def test_scores_of_recorded_rows_by_hand(modules, rows):
    found = modules[0].score(rows)
    errors = [0.1, 0.2, 0.1, 0.25, 0.2, 0.75, 0, 0, 0]
    assert found["time_mape"] == pytest.approx(sum(errors) / 9) and found["memory_mape"] == pytest.approx(0.1)
    assert found["regret_worst"] == pytest.approx(4 / 2 - 1), "the slow network's copies are forecast to be fastest"
    assert found["regret_mean"] == pytest.approx(1 / 3) and found["learnt_regret_worst"] == 0
    # Always copies: best on a plain machine, twice too slow on a slow network, and nothing to run in little memory.
    assert (found["copies_regret_mean"], found["copies_regret_worst"]) == pytest.approx((0.5, 1.0))
    assert found["copies_none"] == 1
    assert found["spearman_median"] == 1.0 and found["covered_80"] == 1 and found["learnt_covered_80"] == 0
    assert modules[0].spearmans(rows, "forecast_seconds") == pytest.approx([1.0, 0.5, 1.0])
    # The null: all at the median rate, which is that of 2 s; a group's median is 2 s, 4 s and 2 s.
    assert found["null_mape"] == pytest.approx((1 + 0 + 0.5 + 0.5 + 0.6 + 0 + 1 + 0 + 0.5) / 9)
    assert found["group_median_mape"] == pytest.approx((1 + 0 + 0.5 + 0 + 0.2 + 1 + 1 + 0 + 0.5) / 9)
    assert found["over_limit"] == 1


def test_one_process_and_pairs_of_plans_are_no_choice(modules, rows):
    alone = [row(modules[0], "plain", 1, "single", 1.0, 2.0)]
    found = modules[0].score([*alone, *rows[:2]])
    assert math.isnan(found["regret_mean"]) and math.isnan(found["copies_regret_mean"]) and found["copies_none"] == 0


def test_the_page_has_every_score_and_every_row(modules, rows):
    scores, _ = modules
    facts = {"date": "2026-01-01", "cpu": "a CPU", "cores": 2, "torch": "2"}
    failed = [{"task": "vision", "devices": 4, "because": "it did"}]
    result = {
        "machine": facts,
        "rounds": 3,
        "steps": 2,
        "asked": 12,
        "scores": scores.score(rows),
        "not_measured": failed,
    }
    page = scores.document(result, rows, "command")
    assert (
        "Missed: time error at most 8 %, memory error at most 5 %, 80 % intervals that hold 75 to 85 %, regret" in page
    )
    good = {"time_mape": 0.07, "memory_mape": 0.04, "covered_80": 0.8, "regret_mean": 0.01}
    assert scores.aim_line(good).endswith("Missed: none.") and "Missed: regret" in scores.aim_line(
        {**good, "regret_mean": 0.05}
    )
    assert "9 of 12 plans" in page and "1 rows took more memory" in page and "- vision, 4 processes: it did" in page
    assert page.count("| slow network | 2 |") == 3
    (whole,) = [line for line in page.splitlines() if line.startswith("| all |")]
    assert whole.count("|") == len(scores.HEAD) + 1
    assert "33.3% (100.0%)" in whole and "50.0% (100.0%), none in 1" in whole and "1.00" in whole


def test_a_call_goes_on_with_the_plans_that_no_line_is_of(modules, tmp_path, monkeypatch):
    _, grid = modules
    plans = tuple(
        Plan(layout=Layout(dp_shard=2), zero=zero, micro_batch=micro) for zero in (1, 2, 3) for micro in range(1, 7)
    )
    case = grid.Case("plain", SimpleNamespace(cluster=SimpleNamespace(devices=2)), plans, 0.0)
    asked: list[int] = []

    def measured(planned, some, options):
        asked.append(len(some))
        if len(asked) == 2:
            raise grid.PacelineError("a process ended", "exit code 1", "again")
        return [{}] * len(some)

    monkeypatch.setattr(grid, "measure", measured)
    monkeypatch.setattr(grid, "observe", lambda *given: SimpleNamespace(as_dict=dict))
    path = tmp_path / "rows.jsonl"
    assert grid.go_on(case, grid.read_lines(path), path, None, math.inf) == "a process ended: exit code 1"
    with path.open("a") as out:
        out.write('{"task": "plain", "dev')  # a call that was killed while it wrote
    lines = grid.read_lines(path)
    assert len(lines) == grid.TOGETHER and case.todo(lines) == list(plans[grid.TOGETHER :])
    assert grid.go_on(case, lines, path, None, 0.0) == "" and len(asked) == 2, "the time was up"
    assert grid.go_on(case, lines, path, None, math.inf) == ""
    assert asked == [8, 8, 8, 2] and not case.todo(grid.read_lines(path))


def test_rows_of_another_pace_than_the_probes_are_measured_again_and_told_in_the_end(modules, tmp_path, monkeypatch):
    """A fixed step of 40 ms in the probe takes 60 beside the plans: the machine is 1.5 times slower than it was."""
    scores, grid = modules
    steps = [SimpleNamespace(precision=name, width=width, seconds=seconds) for name, width, seconds in (
        ("fp32", 500, 0.2), ("fp32", 174, 0.04), ("bf16", 174, 0.01))]  # fmt: skip
    cluster = SimpleNamespace(devices=2, device=SimpleNamespace(calibration=steps))
    assert grid.pace_of(cluster, [0.06, 0.08, 0.05]) == pytest.approx(1.5)
    assert math.isnan(grid.pace_of(cluster, [])) and [grid.is_steady(pace) for pace in (0.95, 1.5, 0.6)] == [True, 0, 0]
    # A hop of 1 ms, and 4 MiB in the ring's two halves at 2 MiB/ms: 3 ms in the probe.
    link = SimpleNamespace(
        latency_seconds=SimpleNamespace(value=1e-3), collective_bytes_per_second={"all_reduce": 2**31 / 1.024}
    )
    cluster.links = (link,)
    assert grid.pace_of_waits(cluster, [0.005, 0.006, 0.009]) == pytest.approx(2.0)
    assert math.isnan(grid.pace_of_waits(cluster, [])) and math.isnan(
        grid.pace_of_waits(SimpleNamespace(devices=1), [0.0])
    )
    assert [grid.is_steady(1.0, waits) for waits in (2.0, 1.4, 0.7, 0.6)] == [False, True, True, False]
    plans = (Plan(layout=Layout(dp_shard=2), micro_batch=1),)
    case = grid.Case("plain", SimpleNamespace(cluster=cluster), plans, 0.0)
    monkeypatch.setattr(grid, "measure", lambda *given: [{"fixed_seconds": [0.04], "wait_seconds": [0.006]}])
    assert grid.go_on(case, [], tmp_path / "none.jsonl", None, math.inf, last=False) == grid.UNSTEADY, "waits alone"
    monkeypatch.setattr(grid, "measure", lambda *given: [{"fixed_seconds": [0.06]}])
    monkeypatch.setattr(grid, "observe", lambda *given: SimpleNamespace(as_dict=dict))
    path, lines = tmp_path / "rows.jsonl", []
    assert grid.go_on(case, lines, path, None, math.inf, last=False) == grid.UNSTEADY and not lines
    assert grid.go_on(case, lines, path, None, math.inf) == "" and lines[0]["pace"] == pytest.approx(1.5)
    rows = [row(scores, "plain", 2, "a", 1.0, 1.2), row(scores, "plain", 2, "b", 1.5, 1.0, pace=1.5)]
    found = scores.score(rows)
    assert found["unsteady"] == 1 and found["steady_time_mape"] == pytest.approx(0.2)
    assert "Beside 1 rows" in "\n".join(scores._pace_lines(found))
    assert "Beside every row" in "\n".join(scores._pace_lines(scores.score(rows[:1])))


def test_all_layouts_are_measured_unless_fewer_are_asked_for(modules):
    _, grid = modules
    plans = [Plan(layout=Layout(dp_shard=2), zero=zero, micro_batch=micro) for zero in (1, 2, 3) for micro in (4, 2)]
    planned = SimpleNamespace(search=SimpleNamespace(candidates=[SimpleNamespace(plan=plan) for plan in plans]))
    assert grid.plans_of(planned, 0) == plans[::2], "the best of every layout and class"
    assert grid.plans_of(planned, 2) == [plans[0], plans[4]]


def test_what_no_group_can_say_is_null_in_strict_json(modules, rows):
    """Tasks of one row have no regret and no rank correlation: NaN is no JSON, and a strict reader refuses the file."""
    document = {"scores": modules[0].score(rows[:1]), "rows": [dataclasses.asdict(rows[0])]}
    assert math.isnan(document["scores"]["regret_mean"])
    text = importlib.import_module("common").strict_json(document)
    read = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert read["scores"]["regret_mean"] is None and read["rows"][0]["measured_seconds"] == 1.0


def test_results_are_kept_in_one_place(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    common = importlib.import_module("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    common.keep("made", {"seconds": math.nan}, "# a page")
    common.keep("page alone", page="# another")
    assert json.loads((tmp_path / "figures" / "made.json").read_text()) == {"seconds": None}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures", "made.md", "page alone.md"]
    texts = {path.name: path.read_text() for path in BENCHMARKS.rglob("*.py")}
    assert {name for name, text in texts.items() if "RESULTS" in text or '"figures"' in text} == {"common.py"}


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").rglob("*.json")), ids=lambda path: path.name)
def test_a_kept_result_is_strict_json(path):
    assert json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_intervals_are_calibrated_on_grids_that_are_left_out(monkeypatch):
    """Rows that compute alone miss by 0.1, such that communicate for half of the step by 0.1 and 0.2 in quadrature."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    calibrate = importlib.import_module("grid.calibrate")

    def line(devices, plan, forecast, missed, task="a task"):
        return {"task": task, "devices": devices, "plan": plan, "is_copies": plan == "copies",
                "forecast_seconds": forecast, "measured_seconds": forecast * math.exp(missed)}  # fmt: skip

    grid = [line(1, "single", 2.0, sign * 0.1) for sign in (-1, 1)]
    grid += [line(2, "copies", 1.0, 0.1), line(2, "pp=2", 1.5, -0.1), line(4, "copies", 1.0, 9.0)]
    grid += [line(2, "dp_shard=2", 2.0, sign * math.hypot(0.05, 0.1)) for sign in (-1, 1)]
    grid += [line(2, "dp_shard=2", 2.0, 9.0, task="of no copies")]
    parts = calibrate.residuals(grid)
    assert [round(share, 2) for _, share in parts] == [0.0, 0.0, 0.03, 0.05, 0.5, 0.5]
    assert [round(missed, 3) for missed, _ in parts[:4]] == [-0.1, 0.1, 0.1, -0.1]
    found = calibrate.fit(parts)
    assert found.computing == pytest.approx(0.1, abs=0.01) and found.communicating == pytest.approx(0.2, abs=0.03)
    assert calibrate.held(parts, found) >= 0.8 and found.tail == pytest.approx(1.0, abs=0.1)
    narrow = calibrate.Errors(0.01, 0.01, 2.0)
    assert calibrate.held(parts, narrow) == 0.0
