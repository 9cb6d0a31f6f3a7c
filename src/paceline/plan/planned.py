"""Plan a task: from a spec to a plan and its price, with what the choice was made from and what follows from it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from paceline.cluster.grid.carbon import changes_by_hour, with_carbon
from paceline.cluster.override import with_tf32
from paceline.cluster.resolve import resolve_cluster
from paceline.errors import DoesNotFit
from paceline.plan.choice import Choice, Prepared
from paceline.plan.cost.peer_copies import peer_copy_terms
from paceline.plan.cost.time.growth import seconds_at, too_large, with_growth
from paceline.plan.learn.recall import recall
from paceline.plan.learn.task_measurement import read_measurements
from paceline.plan.prepare import prepare_task
from paceline.plan.risk.contest import Contest, contest
from paceline.plan.risk.expected import Expected, expected_run
from paceline.plan.search.found import SearchResult
from paceline.plan.search.front import Front, front_plans
from paceline.plan.search.search import search
from paceline.plan.search.values import TIE_RATIO, Values, goal_values
from paceline.plan.unused import unused_options
from paceline.spec.cluster import Cluster
from paceline.spec.forecast import Forecast
from paceline.spec.load import Spec
from paceline.spec.optimizers import optimizer_key
from paceline.spec.plan import Plan, PlanSpec, counts_text
from paceline.spec.profile import ModelProfile
from paceline.spec.steps.growth import course_of, whole_samples
from paceline.spec.sync import refuse_between
from paceline.task.profile.plain import task_key
from paceline.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from paceline.plan.placement.place import Placement
    from paceline.plan.risk.choice_switches import Sensitivity

# Of texts of 5 to 60 tokens a step in bf16 took 1.4 times the processor's time, and the process 1.7 times the memory
# (AMD EPYC with AVX-512 BF16, torch 2.13).
RAGGED_WIDE = "fp32: rows differ in length, and a CPU makes its kernels in bf16 anew for each length"
JOINT_TRIED = 64  # best plans of equal rows, whose layouts are tried with rows by speed


@dataclass(frozen=True)
class Planned(Choice):
    """A task on a cluster, planned: the choice, and what is worked out of it when it is first asked for."""

    @cached_property
    def contest(self) -> Contest:
        """Which other plans may turn out better, given how far forecasts err, and which few are worth a try."""
        return contest(self.search.candidates, self.spec.plan.goal.weights, self.forecast.step_seconds)

    @cached_property
    def expected(self) -> Expected:
        """The whole run under the cluster's failures; of unknown values where nothing is known of them."""
        return expected_run(self)

    @cached_property
    def sensitivity(self) -> Sensitivity:
        """What would change the choice."""
        from paceline.plan.risk.sensitivity import sensitivity  # asked for by `--explain` alone

        return sensitivity(self)

    @cached_property
    def front(self) -> Front:
        """The plans that no other one beats in everything that is known of all, in rising order of time."""
        return front_plans(self.search.candidates)

    @cached_property
    def placement(self) -> Placement:
        """Where the plan's ranks stand on the cluster."""
        from paceline.plan.placement.place import place

        optimizer = optimizer_key(self.spec.task.optimizer)
        return place(self.profile, self.cluster, self.plan, self.forecast.step_seconds.value, optimizer)


def plan_task(spec: Spec, *, say: Callable[[str], None] | None = None) -> Planned:
    """Return the best plan of a spec's task on its cluster, with its price. `say` hears of slow preparations.

    Raises DoesNotFit where no plan fits, and the errors of data, model and cluster.
    """
    if not spec.cluster.groups:
        cluster, remarks = resolve_cluster(spec.cluster)
        return plan_prepared(prepare_task(spec, say=say), cluster, tuple(remarks))
    return _plan_on_groups(prepare_task(spec, say=say))


def plan_prepared(prepared: Prepared, cluster: Cluster, remarks: tuple[str, ...] = ()) -> Planned:
    """Return the best plan of a prepared task on a cluster. Raises DoesNotFit where none fits or keeps the limits.

    Raises ConfigError where the run would end while copies differ.
    """
    refuse_between(prepared.spec.plan.sync, {"task.stop": prepared.steps})
    cluster = with_tf32(cluster) if prepared.spec.run.tf32 else cluster
    asked, when = prepared.spec.cluster, prepared.spec.run.when
    cluster = with_carbon(cluster, asked, when)
    planned = _planned(prepared, cluster, remarks, goodput=1.0)
    if changes_by_hour(asked, when):  # which hours they are is known with the length of the run
        cluster = with_carbon(cluster, asked, when, planned.forecast.run_seconds.value)
        planned = _planned(prepared, cluster, remarks, goodput=1.0)
    constraints = prepared.spec.plan
    if constraints.deadline is None and constraints.budget_usd is None:
        return planned
    goodput = planned.expected.goodput
    if not goodput < 1:  # failures take nothing, or nothing is known of them
        return planned
    # Failures take about the same share of the time of every plan. So the share of the best plan stands for all
    # plans: of a deadline of 20 h and a goodput of 90 %, plans may use 18 h.
    return _planned(prepared, cluster, remarks, goodput)


def _planned(prepared: Prepared, cluster: Cluster, remarks: tuple[str, ...], goodput: float) -> Planned:
    spec, optimizer = prepared.spec, optimizer_key(prepared.spec.task.optimizer)
    learnt, measured = None, None
    if not cluster.paces:  # what was learnt of devices that are alike says nothing of those that are not
        learnt = recall(prepared.profile, optimizer, cluster, spec.cluster)
        measured = read_measurements(task_key(prepared.profile, optimizer), cluster) if spec.cluster.learn else {}
    asked, because = _with_precision(prepared, cluster)
    found = search(
        prepared.profile,
        cluster,
        asked,
        batch_samples=prepared.batch_samples,
        steps=prepared.steps,
        optimizer=optimizer,
        goodput=goodput,
        learnt=learnt,
        measured=measured,
        scored=spec.task.selection.scored,
        stages=spec.run.stages_within(prepared.steps),
    )
    found = replace(found, precision_because=because) if because else found
    forecast, grows = _with_growth(prepared, found)
    return Planned(
        spec=spec,
        cluster=cluster,
        profile=prepared.profile,
        facts=prepared.facts,
        search=found,
        plan=found.best.plan,
        forecast=_with_copies(prepared, cluster, forecast),
        batch_samples=prepared.batch_samples,
        steps=prepared.steps,
        remarks=(
            *spec.remarks,
            *remarks,
            *_notes(prepared),
            *grows,
            *_selection_remarks(prepared),
            *_offload_remarks(found.best.plan, spec.plan, cluster),
            *_frozen_remarks(found.best.plan, spec.plan, found.candidates.context.profile),
            *_compile_remarks(found.best.plan, prepared.profile),
            *unused_options(found.best.plan, spec.plan),
        ),
        learnt=learnt,
        settled=prepared.settled,
    )


def _with_precision(prepared: Prepared, cluster: Cluster) -> tuple[PlanSpec, str]:
    """Return the spec's constraints with what the data decide of the precision, and why; "" where they do not."""
    asked = prepared.spec.plan
    if asked.precision != "auto" or cluster.device.kind != "cpu" or not prepared.facts.longest:
        return asked, ""
    return replace(asked, precision="fp32"), RAGGED_WIDE


def _plan_on_groups(prepared: Prepared) -> Planned:
    """Return the best plan of one layout over groups of different devices, whose rows follow their speeds.

    Layouts are taken from the best with equal rows. Raises DoesNotFit where none fits.
    """
    from paceline.plan.placement.joint import join_groups, rows_by_pace

    spec, asked = prepared.spec, prepared.spec.plan
    joint = join_groups(spec.cluster, prepared.profile, asked, prepared.batch_samples)
    asked = dataclasses.replace(asked, precision=joint.precision)

    def planned(asked: PlanSpec) -> Planned:
        return plan_prepared(dataclasses.replace(prepared, spec=dataclasses.replace(spec, plan=asked)), joint.cluster,
                             joint.remarks)  # fmt: skip

    every, refused = [], None
    try:
        every.append(planned(asked))
    except DoesNotFit as error:  # rows by speed may keep a limit that equal ones do not
        if asked.rows or (asked.deadline is None and asked.budget_usd is None):
            raise
        refused = error
    equal = every[0] if every else planned(dataclasses.replace(asked, deadline=None, budget_usd=None))
    tried = dict.fromkeys(candidate.plan.layout for candidate in equal.search.candidates[:JOINT_TRIED])
    for layout in tried if not asked.rows else ():
        rows = rows_by_pace(layout, prepared.batch_samples, joint.cluster.paces)
        degrees = dataclasses.asdict(layout)
        try:
            every.append(planned(dataclasses.replace(asked, rows=counts_text(rows), **degrees)))
        except DoesNotFit:  # in the parts that the speeds ask for
            continue
    if not every:
        assert refused is not None
        raise refused
    return dataclasses.replace(_best_by_goal(every), spec=spec)


def _best_by_goal(every: Sequence[Planned]) -> Planned:
    """Return the plan that serves the goal best, of those in a tie the fastest, and of equally fast ones the first."""
    taken = functools.reduce(Values.joined, (one.search.candidates.values.take([0]) for one in every))
    scores = goal_values(taken, every[0].spec.plan.goal.weights)
    seconds = np.where(np.isfinite(taken.time) & (scores <= np.min(scores) * TIE_RATIO), taken.time, np.inf)
    return every[int(np.argmin(seconds))]


def _with_growth(prepared: Prepared, found: SearchResult) -> tuple[Forecast, tuple[str, ...]]:
    """Return the best plan's forecast with the price of every batch that a schedule has, and what is said of it.

    Raises DoesNotFit where a later batch does not fit: a schedule of a pipeline may hold what all micro-batches keep.
    """
    growth, plan, forecast = prepared.spec.task.growth, found.best.plan, found.best.forecast
    if not growth.grows:
        return forecast, ()
    context, items = found.candidates.context, prepared.facts.items_per_sample
    stretches = list(course_of(growth, prepared.batch_samples, items).stretches(steps=prepared.steps))
    if growth.by == "noise" and growth.largest is not None:
        largest = whole_samples(growth.largest, items, "task.growth.largest")
    else:
        largest = max(samples for _, samples in stretches)
    if needed := too_large(context, plan, largest):
        raise DoesNotFit(
            f"a global batch of {largest:,} samples does not fit {plan}",
            f"it needs {format_bytes(needed)} a device, though {prepared.batch_samples:,} samples fit",
            "plan.schedule other than gpipe, a smaller plan.micro_batch, or a smaller largest batch",
        )
    if growth.by == "noise":
        last = seconds_at(context, plan, largest)
        said = f"priced at the first batch; a step of the largest, {largest:,} samples, takes {format_seconds(last)}"
        return forecast, (f"the global batch grows by the gradient noise scale: {said}",)
    told = ", ".join(f"{count:,} steps of {samples:,} samples" for count, samples in stretches)
    return with_growth(context, plan, forecast, stretches), (f"the global batch grows: {told}",)


def _with_copies(prepared: Prepared, cluster: Cluster, forecast: Forecast) -> Forecast:
    """Return a forecast with the price of copies in other nodes' memory, where the run makes any."""
    items = prepared.facts.items_per_sample
    copies = peer_copy_terms(prepared.spec, cluster, forecast, prepared.batch_samples, items)
    return replace(forecast, copies=copies) if copies else forecast


def _notes(prepared: Prepared) -> tuple[str, ...]:
    """Return what is to be said of the data and of the model's profile."""
    return (*prepared.facts.notes, *filter(None, [prepared.profile.note]), *prepared.profile.remarks)


def _selection_remarks(prepared: Prepared) -> tuple[str, ...]:
    """Return what is to be said of a task that trains on some of what it reads."""
    selection, samples = prepared.spec.task.selection, prepared.batch_samples
    if not selection.selects:
        return ()
    read = f"every step reads and scores {selection.candidates_of(samples):,} samples and trains on {samples:,} of them"
    if selection.by == "largest":
        return (f"{read}, those of the largest loss: the gradient is biased towards them",)
    return (f"{read}, weighted so that the expected gradient is that of all; its variance is in the journal",)


def _offload_remarks(plan: Plan, asked: PlanSpec, cluster: Cluster) -> tuple[str, ...]:
    """Return what is to be said of a plan that moves state to the host: why it does, or that it is of no use."""
    if plan.offload == "none":
        return ()
    if cluster.device.kind == "cpu":
        return (f"offload = {plan.offload} saves nothing here: a CPU's host memory is the device's own",)
    if asked.offload == "auto":
        return (f"offload = {plan.offload}: without it no plan fits",)
    return ()


def _frozen_remarks(plan: Plan, asked: PlanSpec, profile: ModelProfile) -> tuple[str, ...]:
    """Return why frozen weights are spread, where that is the planner's choice."""
    if plan.frozen != "spread" or asked.frozen != "auto":
        return ()
    alone, packed = profile.forward_only_parameters, profile.packed_parameters
    held = [f"{format_count(alone)} parameters that only go forward"] if alone else []
    held += [f"{format_count(packed)} weights in four bits"] if packed else []
    what = f"{' and '.join(held)} rest over all data ranks"
    return (f"frozen = spread: {what}; held as the trained ones, no plan is as good or fits",)


def _compile_remarks(plan: Plan, profile: ModelProfile) -> tuple[str, ...]:
    """Return what is to be said of a plan that compiles a model which draws random numbers."""
    if not plan.compile or not profile.drawing:
        return ()
    return (
        f"compile = true: {len(profile.drawing)} blocks draw random numbers and run uncompiled, since the compiler's "
        "own would follow the micro-batch; a dropout of 0 has them compiled",
    )
