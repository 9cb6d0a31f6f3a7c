"""One device: a batch is cut where that gains more than a forecast can tell, and more than its proof takes."""

from __future__ import annotations

import dataclasses

import pytest
from plan_examples import cluster, measured, profile

from paceline.plan.learn.correct import Learnt
from paceline.plan.learn.observation import Observation, machine_key
from paceline.plan.learn.recall import learn
from paceline.plan.search.found import Candidate, SearchResult
from paceline.plan.search.search import search
from paceline.plan.search.uncut import PROOF_SECONDS
from paceline.plan.search.values import SAFE
from paceline.spec.cluster import Cluster, Figure
from paceline.spec.plan import GoalSpec, PlanSpec
from paceline.spec.profile import Fill, ModelProfile
from paceline.task.profile.plain import task_key

BATCH = 16
LONG = 10_000_000  # steps in which nothing that is done once counts


def padded(whole: float, summed: bool = False, quarter: float = 0.5) -> ModelProfile:
    """Return a model whose rows are filled up to `whole` of a sample in one piece, to `quarter` of it cut in four."""
    fills = tuple(
        Fill(size, share, share, 1.0)
        for size, share in ((1, quarter), (2, quarter), (4, quarter), (8, (whole + quarter) / 2), (BATCH, whole))
    )
    return dataclasses.replace(profile(), fills=fills, summed=summed)


def known(source: str, launch_seconds: float = 1e-3) -> Cluster:
    """Return one device whose every figure is known in this way; launches of 1 ms take a tenth of a whole batch."""
    base = cluster(1)
    base = dataclasses.replace(base, device=dataclasses.replace(base.device, launch_seconds=measured(launch_seconds)))
    of_device = {
        field.name: dataclasses.replace(value, source=source)
        for field in dataclasses.fields(base.device)
        if isinstance(value := getattr(base.device, field.name), Figure)
    }
    device = dataclasses.replace(base.device, matmul_source=source, **of_device)
    return dataclasses.replace(base, device=device)


def found(
    model: ModelProfile, where: Cluster, steps: int = LONG, learnt: Learnt | None = None, **changes: object
) -> SearchResult:
    constraints = PlanSpec(precision="fp32", **changes)  # type: ignore[arg-type]
    return search(model, where, constraints, batch_samples=BATCH, steps=steps, coarse=True, learnt=learnt)


def seconds(result: SearchResult, micro_batch: int) -> float:
    """Return the forecast of a plan without recompute."""
    (value,) = (
        each.forecast.step_seconds.value
        for each in result.candidates
        if (each.plan.micro_batch, each.plan.recompute) == (micro_batch, "none")
    )
    return value


def test_a_gain_that_assumed_figures_cannot_tell_leaves_the_batch_in_one_piece() -> None:
    """A third less that is filled up, and four times the launches: a small difference of two large terms."""
    result = found(padded(0.8), known("assumed"))
    best = result.best.plan
    assert seconds(result, 8) * 1.02 < seconds(result, BATCH), "by the forecast it is cut in two"
    assert (best.micro_batch, best.accumulation) == (BATCH, 1)
    assert "in one piece" in result.kept_because and "cannot tell" in result.kept_because
    plans = [each.plan for each in result.candidates]
    assert plans[0] == best and len(set(plans)) == len(plans)


def test_the_same_gain_counts_where_figures_were_measured() -> None:
    result = found(padded(0.8), known("measured"))
    assert result.best.plan.accumulation > 1 and not result.kept_because


def test_a_large_gain_counts_on_assumed_figures_too() -> None:
    result = found(padded(1.0), known("assumed"))
    assert result.best.plan.accumulation > 1 and not result.kept_because


def test_a_proof_that_takes_longer_than_it_saves_is_not_made() -> None:
    """A plan that cuts a batch of somebody's own model is proven first: in a short run that is the larger part."""
    model, where = padded(0.8), known("measured")
    long = found(model, where)
    saved = seconds(long, BATCH) - long.best.forecast.step_seconds.value
    assert long.best.plan.accumulation > 1 and saved > 0
    enough = int(PROOF_SECONDS / saved)
    assert found(model, where, steps=enough + 2).best.plan == long.best.plan
    short = found(model, where, steps=enough - 2)
    assert short.best.plan.accumulation == 1 and "proof" in short.kept_because
    ours = found(padded(0.8, summed=True), where, steps=1)
    assert ours.best.plan.accumulation > 1, "a model of ours on its own objective is known to be a sum, and not proven"


def test_in_a_tie_the_batch_stays_whole_where_memory_is_no_risk() -> None:
    result = found(padded(0.5), known("measured"))
    gain = seconds(result, BATCH) / min(seconds(result, size) for size in (4, 8))
    assert gain < 1.02 and result.best.plan.accumulation == 1


def test_a_batch_that_may_not_fit_in_one_piece_is_cut() -> None:
    model, where = padded(0.8), known("assumed")
    whole, quarter = (
        next(each.forecast.peak_bytes for each in found(model, where, micro_batch=size).candidates)
        for size in (BATCH, 4)
    )
    assert quarter.high < whole.value
    memory = Figure(whole.value * 1.1, "measured")
    tight = dataclasses.replace(where, device=dataclasses.replace(where.device, memory_bytes=memory))
    result = found(model, tight, memory_risk=0.5, recompute="none")
    places = [place for place, each in enumerate(result.candidates) if each.plan.accumulation == 1]
    assert places and result.candidates.values.risk[places[0]] > SAFE
    assert result.best.plan.accumulation > 1


def test_memory_is_counted_and_a_goal_of_it_cuts_the_batch() -> None:
    result = found(padded(0.8), known("assumed"), goal=GoalSpec("memory"))
    assert result.best.plan.micro_batch == 1


def test_where_the_time_of_a_step_is_unknown_the_batch_stays_whole() -> None:
    where = known("assumed")
    unknown = dataclasses.replace(where.device, matmul_flops={}, matmul_source="unknown", attention_flops={})
    result = found(padded(0.8), dataclasses.replace(where, device=unknown))
    assert result.best.plan.accumulation == 1 and "unknown" in result.kept_because


def test_several_devices_are_proven_anyway_and_cut_as_before() -> None:
    model = padded(0.8)
    fills = tuple(dataclasses.replace(fill, ranks=ranks) for ranks in (1, 2) for fill in model.fills)
    where = dataclasses.replace(known("assumed"), devices=2, devices_per_node=2)
    result = found(dataclasses.replace(model, fills=fills), where)
    assert result.kept_because == ""


@pytest.mark.parametrize("asked", [2, 4])
def test_a_micro_batch_that_was_asked_for_is_taken(asked: int) -> None:
    result = found(padded(0.8), known("assumed"), micro_batch=asked)
    assert result.best.plan.micro_batch == asked and not result.kept_because


def learnt_from(model: ModelProfile, where: Cluster, ran: list[tuple[Candidate, float]]) -> Learnt | None:
    """Return what runs of plans leave, each of which took so many times its forecast."""
    runs = [
        Observation(
            date=f"2026-01-{number:02}T00:00:00+00:00", run=f"runs/{number}", machine=machine_key(where), name="a",
            profile=model, optimizer="adamw", plan=one.plan, devices=1, devices_per_node=1, steps=50,
            step_seconds=one.forecast.step_seconds.value * factor, spread=0.01,
            peak_bytes=one.forecast.peak_bytes.value,
        )
        for number, (one, factor) in enumerate(ran, 1)
    ]  # fmt: skip
    return learn(runs, task_key(model, "adamw"), lambda one: where)


def test_what_runs_tell_apart_is_cut_only_where_its_proof_takes_less() -> None:
    model, where = padded(0.8), dataclasses.replace(known("measured"), host="node-1")
    by_size = {one.plan.micro_batch: one for one in found(model, where).candidates if one.plan.recompute == "none"}
    ran = [(by_size[BATCH], 1.2), (by_size[8], 1.0)] * 3
    learnt = learnt_from(model, where, ran)
    assert found(model, where, learnt=learnt).best.plan.micro_batch == 8
    short = found(model, where, steps=2, learnt=learnt)
    assert short.best.plan.accumulation == 1 and "proof" in short.kept_because
    ours = padded(0.8, summed=True)
    assert found(ours, where, steps=2, learnt=learnt_from(ours, where, ran)).best.plan.micro_batch == 8


def test_a_batch_that_the_figures_leave_whole_is_not_said_to_be_cut_by_runs() -> None:
    model, where = padded(0.8), dataclasses.replace(known("assumed"), host="node-1")
    before = found(model, where).best
    after = found(model, where, learnt=learnt_from(model, where, [(before, 1.0)]))
    assert after.best.plan == before.plan and after.kept_because.startswith("forecasts put")
    assert "that runs here leave open" in after.kept_because
