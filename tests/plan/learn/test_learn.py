"""What runs leave for the next forecast: the store, the term in a plan, runs of known machines, backtests of them."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from plan_examples import cluster, opened, plan, profile

from paceline.backtest.runs import FinishedRun, score_runs
from paceline.cluster.plain import cluster_from_dict
from paceline.plan.cost.columns import columns_of
from paceline.plan.cost.pricing import forecast_plan, memory_widths_of, needed_bytes, price, step_seconds
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.learn.observation import Observation, machine_key, observation_from_dict
from paceline.plan.learn.observe import _core_share_of_ranks
from paceline.plan.learn.recall import learn
from paceline.plan.learn.store import (
    MOST,
    MOST_ALIKE,
    forget_observations,
    observations_folder,
    read_observations,
    write_observation,
)
from paceline.plan.risk.contest import contest
from paceline.plan.search.search import search
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.kinds import RanksRecord
from paceline.spec.journal.line import spelt
from paceline.spec.journal.rank_spread import RankSpread
from paceline.spec.layout import Layout
from paceline.spec.plan import PlanSpec
from paceline.spec.profile import Fill
from paceline.task.profile.plain import pack_profile, task_key, unpack_profile

HERE = cluster(2, host="node-1")
SMALL, LARGE = opened(profile(2)), opened(profile(8))
LAYOUTS = (Layout(dp_replicate=2), Layout(dp_shard=2), Layout(tp=2), Layout(pp=2))


def run_of(model=SMALL, layout=LAYOUTS[0], factor=1.0, memory=1.0, date="2026-01-01T00:00:00+00:00", **changes):
    """A run that took `factor` times what the formulas say."""
    chosen = plan(layout, micro_batch=4)
    if layout.pp > 1:
        chosen = dataclasses.replace(chosen, stages=(1, 1) if model is SMALL else (4, 4))
    forecast = forecast_plan(model, HERE, chosen, batch_samples=64, steps=1)
    fields = {
        "date": date,
        "run": "runs/a",
        "machine": machine_key(HERE),
        "name": "a",
        "profile": model,
        "optimizer": "adamw",
        "plan": chosen,
        "devices": 2,
        "devices_per_node": 2,
        "steps": 50,
        "step_seconds": forecast.step_seconds.value * factor,
        "spread": 0.02,
        "peak_bytes": forecast.peak_bytes.value * memory,
    }
    return Observation(**{**fields, **changes})


def learnt_from(*runs, model=SMALL):
    return learn(runs, task_key(model, "adamw"), lambda one: HERE)


def context(learnt, model=SMALL):
    return PricedTask(model, HERE, 64, 1, learnt=learnt)


def test_profiles_observations_and_clusters_survive_being_plain():
    mixed = dataclasses.replace(
        LARGE, blocks=(*LARGE.blocks, dataclasses.replace(LARGE.blocks[1], name="odd", heads=3))
    )
    assert unpack_profile(json.loads(json.dumps(pack_profile(mixed)))) == mixed
    assert len(pack_profile(mixed)["blocks"]) == 3
    run = run_of(memory=math.pi)
    assert observation_from_dict(json.loads(json.dumps(run.as_dict()))) == run
    written = json.loads(json.dumps(spelt(dataclasses.asdict(HERE))))  # as the journal spells NaN
    read = cluster_from_dict(written)
    assert math.isnan(read.carbon_g_per_kwh.value)
    assert dataclasses.replace(read, carbon_g_per_kwh=HERE.carbon_g_per_kwh) == HERE


def test_a_task_is_the_same_whatever_its_data_batch_and_name_are():
    assert task_key(SMALL, "adamw") == task_key(dataclasses.replace(SMALL, name="other"), "adamw")
    assert len({task_key(SMALL, "adamw"), task_key(LARGE, "adamw"), task_key(SMALL, "sgd")}) == 3


def test_runs_of_a_budget_of_tokens_are_another_task_and_each_is_forecast_as_full_as_it_was():
    """Runs of one key were all forecast as full as the first of them, and full rows counted as runs of a budget."""
    half, most = (
        dataclasses.replace(SMALL, fills=(Fill(micro_batch=4, tokens=part, pairs=part**2, passes=1.0),))
        for part in (0.5, 0.9)
    )
    assert task_key(SMALL, "adamw") != task_key(half, "adamw") == task_key(most, "adamw")
    learnt = learnt_from(run_of(half), run_of(most), run_of(), model=half)
    assert [run.time_residual for run in learnt.runs] == pytest.approx([0, 0, 0], abs=1e-6)
    chosen = run_of(half).plan
    assert "2 of this plan, 1 of this layout" in price(context(learnt, half), chosen).time[-1].formula


def test_the_next_forecast_of_the_same_plan_is_nearly_what_was_measured():
    chosen = run_of().plan
    before = price(context(None), chosen)
    after = price(context(learnt_from(run_of(factor=1.3, memory=0.9))), chosen)
    measured = before.step_seconds.value * 1.3
    assert abs(after.step_seconds.value / measured - 1) < 0.05 < abs(before.step_seconds.value / measured - 1)
    assert abs(after.peak_bytes.value / (before.peak_bytes.value * 0.9) - 1) < 0.03
    ratio = {one: one.high / one.value for one in (before.step_seconds, after.step_seconds)}
    assert 1 < ratio[after.step_seconds] < ratio[before.step_seconds]
    term = after.time[-1]
    assert term.name == "learnt from 1 run here" and term.source == "measured" and "1 of this plan" in term.formula
    assert sum(one.value for one in after.time) == pytest.approx(after.step_seconds.value, rel=1e-12)
    assert sum(one.value for one in after.memory) == pytest.approx(after.peak_bytes.value, rel=1e-12)


def test_other_layouts_are_corrected_in_part_and_other_tasks_less():
    learnt = learnt_from(run_of(factor=1.3))
    other = price(context(learnt), run_of(layout=LAYOUTS[2]).plan).time[-1]
    chosen = run_of(LARGE, layout=LAYOUTS[2]).plan
    stranger = price(context(learn([run_of(factor=1.3)], task_key(LARGE, "adamw"), lambda one: HERE), LARGE), chosen)
    shares = [
        forecast / (total - forecast)
        for forecast, total in (
            (other.value, price(context(learnt), run_of(layout=LAYOUTS[2]).plan).step_seconds.value),
            (stranger.time[-1].value, stranger.step_seconds.value),
        )
    ]
    assert 0.3 > shares[0] > shares[1] > 0.05
    assert "1 of this task" in other.formula and "1 of others on this machine" in stranger.time[-1].formula


def test_runs_of_another_budget_or_offload_are_runs_of_another_plan():
    modes = {"recompute": "budget", "recompute_budget": 0.5, "recompute_blocks": ("none", "full")}
    ran = dataclasses.replace(run_of().plan, **modes)
    learnt = learnt_from(run_of(plan=ran))
    for changes, words in (
        ({}, "1 of this plan"),
        ({"recompute_budget": 0.25}, "1 of this task"),
        ({"recompute": "full", "recompute_blocks": (), "recompute_budget": 0.0}, "1 of this task"),
        ({"offload": "optimizer"}, "1 of this task"),
    ):
        assert words in price(context(learnt), dataclasses.replace(ran, **changes)).time[-1].formula


def test_plans_of_a_search_are_corrected_as_each_by_itself():
    learnt = learnt_from(run_of(factor=1.4, memory=1.2), run_of(layout=LAYOUTS[1], factor=0.8))
    plans = [dataclasses.replace(run_of(layout=layout).plan, micro_batch=m) for layout in LAYOUTS[:3] for m in (1, 4)]
    columns, known = columns_of(plans), context(learnt)
    seconds, peaks = step_seconds(known, columns)[0], needed_bytes(known, columns)
    highs = peaks * np.exp(memory_widths_of(known, columns)[0])
    for place, one in enumerate(plans):
        alone = price(known, one)
        assert alone.step_seconds.value == pytest.approx(seconds[place], rel=1e-12)
        assert alone.peak_bytes.value == pytest.approx(peaks[place], rel=1e-12)
        assert alone.peak_bytes.high == pytest.approx(highs[place], rel=1e-12)


def test_runs_that_differ_in_what_columns_share_are_learnt_from_together():
    run = run_of(factor=1.2)
    ways = ({"offload": "optimizer"}, {"precision": "bf16"}, {"recompute": "budget", "recompute_budget": 0.5},
            {"recompute_save": ("products",)})  # fmt: skip
    others = [dataclasses.replace(run, plan=dataclasses.replace(run.plan, **changes)) for changes in ways]
    learnt = learnt_from(run, *others)
    assert len(learnt.runs) == 5
    assert learnt.kinship(columns_of([run.plan])).plan.tolist() == [[True, False, False, False, True]]


def test_what_ran_slower_than_forecast_twice_is_chosen_no_more():
    constraints = PlanSpec(pp=1, tp=1, micro_batch=4, precision="fp32", recompute="none")
    found = search(SMALL, HERE, constraints, batch_samples=64, steps=1)
    best, second = found.candidates[0], found.candidates[1]
    slow = best.forecast.step_seconds.value / second.forecast.step_seconds.value

    def ran(candidate, factor, date):
        seconds = candidate.forecast.step_seconds.value * factor
        return dataclasses.replace(run_of(date=date), plan=candidate.plan, step_seconds=seconds)

    runs = [run for date in dates(2) for run in (ran(best, 1.5, date), ran(second, 1.0, date))]
    learnt = learn(runs, task_key(SMALL, "adamw"), lambda one: HERE)
    after = search(SMALL, HERE, constraints, batch_samples=64, steps=1, learnt=learnt)
    assert slow * 1.5 > 1.1  # else the first would still be the fastest
    assert after.best.plan != best.plan


@pytest.mark.parametrize("factor", [0.7, 1.1, 1.3, 1.6])
def test_a_slow_hour_of_the_machine_sends_nobody_to_a_plan_that_never_ran(factor):
    """Every plan takes `factor` times what formulas say, and the chosen one ran: another one would be a slower choice.

    Plans that did run side by side are told apart, however little formulas do.
    """
    constraints = PlanSpec(pp=1, tp=1, precision="fp32", recompute="none")

    def found(*runs):
        return search(SMALL, HERE, constraints, batch_samples=64, steps=1, learnt=learnt_from(*runs))

    def ran(candidate, factor, date):
        seconds = candidate.forecast.step_seconds.value * factor
        return dataclasses.replace(run_of(date=date), plan=candidate.plan, step_seconds=seconds)

    before = found()
    first = ran(before.candidates[0], factor, dates(1)[0])
    after = found(first)
    assert after.best.plan == before.best.plan
    assert factor < 1 or "that they leave open between the two" in after.kept_because, "and it is said"
    behind = next(one for one in before.candidates if one.plan.layout != before.best.plan.layout)
    gap = behind.forecast.step_seconds.value / before.best.forecast.step_seconds.value
    both = found(first, *(ran(behind, factor / gap / 1.2, date) for date in dates(3)[1:]))
    assert both.best.plan.layout == behind.plan.layout and not both.kept_because


def test_runs_that_cannot_be_forecast_today_are_left_out():
    key = task_key(SMALL, "adamw")
    assert learn([], key, lambda one: HERE) is None
    assert learn([run_of()], key, lambda one: None) is None
    unknown = dataclasses.replace(HERE.device, matmul_flops={}, attention_flops={})
    assert learn([run_of()], key, lambda one: dataclasses.replace(HERE, device=unknown)) is None


def test_a_disturbed_run_counts_less():
    quiet, busy = (learnt_from(run_of(factor=1.2, core_share=share)) for share in (0.99, 0.5))
    chosen = run_of().plan
    terms = [price(context(learnt), chosen).time[-1].value for learnt in (quiet, busy)]
    assert terms[0] > 2 * terms[1] > 0


# ---- the store -------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return machine_key(HERE)


def dates(count):
    return [f"2026-01-{1 + day:02d}T00:00:00+00:00" for day in range(count)]


def test_the_store_keeps_the_newest_and_few_of_one_plan(machine):
    for date in dates(MOST_ALIKE + 3):
        write_observation(run_of(date=date))
    kept = read_observations(machine)
    assert [one.date for one in kept] == dates(MOST_ALIKE + 3)[:2:-1]
    for number in range(MOST):
        chosen = dataclasses.replace(run_of().plan, micro_batch=number + 100)
        write_observation(run_of(date=f"2026-02-01T00:{number:02d}:00+00:00", plan=chosen))
    kept = read_observations(machine)
    assert len(kept) == MOST and all(one.date.startswith("2026-02") for one in kept)
    assert forget_observations(machine) == MOST and read_observations(machine) == []


def test_what_cannot_be_read_is_left_out_and_other_machines_have_their_own(machine):
    path = write_observation(run_of())
    (path.parent / "2026-03-01.json").write_text("{")
    other = {**json.loads(path.read_text()), "schema": 99}
    (path.parent / "2026-03-02.json").write_text(json.dumps(other))
    assert read_observations(machine) == [run_of()]
    assert not list(path.parent.glob("*.partial"))
    elsewhere = dataclasses.replace(HERE, host="node-2")
    assert read_observations(machine_key(elsewhere)) == []
    assert observations_folder(machine) == path.parent
    assert machine_key(dataclasses.replace(HERE, host="")) == ""


# ---- a day of runs ---------------------------------------------------------------------------------------------------


def day_of_runs(machine_factor, seed):
    """Runs of two tasks under four layouts in random order, with errors of machine, task and layout and some noise."""
    rng = np.random.default_rng(seed)
    task, layout = rng.normal(0, 0.08, 2), rng.normal(0, 0.06, 4)
    cases = [(m, k) for m in range(2) for k in range(4)] * 2
    runs = []
    for number, place in enumerate(rng.permutation(len(cases))):
        m, k = cases[place]
        factor = machine_factor * math.exp(task[m] + layout[k] + rng.normal(0, 0.02))
        date = f"2026-01-01T00:{number:02d}:00+00:00"
        runs.append(run_of((SMALL, LARGE)[m], LAYOUTS[k], factor, date=date, name=f"task {m}"))
    return runs


@pytest.mark.parametrize("seed", range(4))
def test_a_days_runs_are_forecast_better_and_better(seed):
    score = score_runs("runs", [FinishedRun(run, HERE) for run in day_of_runs(1.25, seed)], [("runs/x", "too short")])
    plain, learnt = score.score.step_time, score.score.learnt
    assert score.score.scored == 16 and score.score.not_scored == {"too short": 1}
    assert learnt.mape < 0.6 * plain.mape
    assert learnt.coverage_95 >= 0.8
    assert all(abs(item.time_error) > 0.02 for item in score.steps[:1])


def test_machines_that_keep_what_was_forecast_are_left_alone():
    score = score_runs("runs", [FinishedRun(run_of(date=date), HERE) for date in dates(6)], [])
    assert score.score.step_time.mape == pytest.approx(0, abs=1e-12)
    assert score.score.learnt.mape == pytest.approx(0, abs=1e-12)


def test_learning_can_be_switched_off():
    from paceline.plan.learn.recall import recall

    assert recall(SMALL, "adamw", HERE, ClusterSpec(learn=False)) is None
    assert recall(SMALL, "adamw", dataclasses.replace(HERE, host=""), ClusterSpec()) is None


# ---- how far a run is trusted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ran", "trusted"),
    [
        ({"steps": 3, "spread": 0.0}, False),
        ({"steps": 6, "spread": 0.02}, True),
        ({"steps": 50, "spread": 0.30}, False),
        ({"steps": 50, "spread": 0.02, "core_share": 0.8}, False),
        ({"steps": 50, "spread": 0.02, "core_share": 0.97}, True),
    ],
)
def test_a_run_is_trusted_by_its_steps_their_spread_and_the_load(ran, trusted):
    (found,) = learnt_from(run_of(**ran)).runs
    assert found.is_trusted == trusted


@pytest.mark.parametrize("factor", [0.4, 1.5, 3.0])
@pytest.mark.parametrize("ran", [{"steps": 3, "spread": 0.3}, {"steps": 40, "core_share": 0.5}], ids=["short", "busy"])
def test_a_noisy_run_changes_no_choice_and_no_order(factor, ran):
    constraints = PlanSpec(pp=1, tp=1, micro_batch=4, precision="fp32", recompute="none")

    def plans(learnt):
        found = search(SMALL, HERE, constraints, batch_samples=64, steps=1, learnt=learnt)
        return [one.plan for one in found.candidates], found.best.forecast

    order, before = plans(None)
    disturbed = dataclasses.replace(run_of(factor=factor, **ran), plan=order[0])
    disturbed = dataclasses.replace(disturbed, step_seconds=before.step_seconds.value * factor)
    after, forecast = plans(learnt_from(disturbed))
    assert after == order
    moved = forecast.step_seconds.value / before.step_seconds.value
    assert 0 < math.log(moved) / math.log(factor) < 0.5, "the level follows it a little"
    ratios = [one.step_seconds.high / one.step_seconds.value for one in (before, forecast)]
    assert ratios[1] == pytest.approx(ratios[0]), "and nothing is surer for it"
    assert "too short or disturbed to tell plans apart" in forecast.time[-1].formula
    quiet = dataclasses.replace(disturbed, steps=50, spread=0.02, core_share=None)
    both = learnt_from(quiet, disturbed)
    assert plans(both)[1].step_seconds.value == pytest.approx(plans(learnt_from(quiet))[1].step_seconds.value)


def test_what_ranks_waited_for_cores_is_the_load_of_a_run_of_several():
    def record(attempt, waited):
        parts = {"forward_backward": 0.6, "reduce": 0.2, "queued_here": waited}
        spreads = {name: RankSpread(value, value, value, 0).told() for name, value in parts.items()}
        return dataclasses.replace(RanksRecord(10, 10, 2, "cpu", spreads), attempt=attempt)

    start = SimpleNamespace(attempt=2)
    told = [record(1, 0.7), record(2, 0.08), record(2, 0.16), record(2, 0.12)]
    assert _core_share_of_ranks(told, start, HERE) == pytest.approx(1 - 0.12 / 0.8)
    assert _core_share_of_ranks(told[:1], start, HERE) is None
    turns = dataclasses.replace(HERE, device=dataclasses.replace(HERE.device, core_share=0.5))
    assert _core_share_of_ranks(told, start, turns) is None, "ranks that share cores wait for each other"


@pytest.mark.parametrize("factor", [0.3, 0.55, 1.6])
def test_what_is_left_to_gain_by_trying_is_no_less_than_nothing(factor):
    """What was learnt takes a part off all other terms; as a cause of its own it made plans that took no time."""
    runs = [run_of(layout=layout, factor=factor, date=f"2026-01-0{day}") for layout in LAYOUTS for day in (1, 2, 3)]
    found = search(SMALL, HERE, PlanSpec(), batch_samples=64, steps=1, learnt=learnt_from(*runs))
    step = found.best.forecast.step_seconds
    judged = contest(found.candidates, {"time": 1.0}, dataclasses.replace(step, high=3 * step.value))
    assert 0 <= judged.regret_tried <= judged.regret < 1
    assert all(contender.regret >= 0 for contender in judged.contenders)
