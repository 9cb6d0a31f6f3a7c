"""What a story runs: its starts, their plans and worlds, and the course of the learning rate."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from paceline.run.process.world import World
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan
from paceline.spec.steps.growth import BatchChange, GrowthSpec
from paceline.spec.task import ModelSpec, OptimizerSpec, ScheduleSpec, Task
from paceline.task.models.sizes import is_named
from paceline.units import Amount

SAVED = 3  # the step after which the checkpoint is written
GROWN_AFTER = 2  # steps, where the task's batch grows
THAWED = 3  # the first step that trains a group which was left as it is, or leaves one that was trained
SMALLEST_RATIO = 1e-12  # of the noise scale over the batch: at any larger one it grows
WARMUP = 2  # steps
LENGTH = 6  # steps of the run that the learning rate is planned over; the last two are never made
CANDIDATES, CHOSEN = "loss of all candidates", "chosen candidates"  # what of a selection is compared
LARGEST_FINAL = 0.5  # of the peak: a rate that stays where it is would hide a schedule that is lost


@dataclass(frozen=True)
class Act:
    """One start of the run: its plan and world, the step that it begins with, and what happened before it."""

    plan: Plan
    world: World
    begins: int
    sizes: tuple[int, ...]  # samples of every step of the run
    selects: bool = False  # whether a step trains on some of the samples that it reads
    resumed: str = ""  # such as "after a resume as dp_replicate=2"; empty for the start that saves

    def position(self, step: int) -> int:
        """Return how many samples are consumed before a 1-based step."""
        return sum(self.sizes[: step - 1])

    @property
    def steps(self) -> int:
        """How many steps the start makes: up to the checkpoint, or one from there."""
        return 1 if self.resumed else SAVED


def acts_of(task: Task, plan: Plan, world: World, on_copies: bool = False) -> list[Act]:
    """Return the starts of the run, in order: under the plan, on another layout of its ranks, on one device alone.

    With `on_copies` every rank of the other layout has all weights.
    """
    other, sizes = other_layout(task, plan, on_copies), story_sizes(task, plan)
    chooses = task.selection.selects
    acts = [
        Act(plan, world, 1, sizes, chooses),
        Act(other, world, SAVED + 1, sizes, chooses, f"after a resume as {other.layout}"),
    ]
    if world.size > 1:
        single = World(0, 1, world.local_rank, world.device)
        acts.append(Act(alone(plan), single, SAVED + 1, sizes, chooses, "after a resume on one device"))
    return acts


def story_schedule(schedule: ScheduleSpec, samples: int) -> ScheduleSpec:
    """Return the task's schedule over the story: another rate at every step, and lengths that need converting.

    `samples` are what a step reads.
    """
    return dataclasses.replace(
        schedule,
        kind="linear" if schedule.kind == "constant" or schedule.is_own else schedule.kind,
        warmup=Amount(WARMUP * samples, "samples"),
        decay=Amount((LENGTH - WARMUP) * samples, "samples"),
        final=min(schedule.final, LARGEST_FINAL),
        arguments={},
    )


def story_growth(growth: GrowthSpec, plan: Plan, items_per_sample: int = 1) -> GrowthSpec:
    """Return how the story's batch grows, where the task's does: to about twice as much, before the checkpoint.

    By the noise scale it is measured in every step, and grows once it was measured twice, whatever it is above zero.
    By a schedule it grows after as many steps, which are counted in the unit in which the task counts.
    """
    if not growth.grows:
        return GrowthSpec()
    most = Amount(grown_batch(growth, plan) + (growth.by == "noise"), "samples")
    if growth.by == "noise":
        return GrowthSpec(
            "noise", growth.learning_rate, largest=most, noise_ratio=SMALLEST_RATIO, measure_every=1,
            measurements=GROWN_AFTER,
        )  # fmt: skip
    unit = next((change.after.unit for change in growth.changes if change.after is not None), "steps")
    each = {"steps": 1, "samples": plan.batch_samples, "tokens": plan.batch_samples * items_per_sample}[unit]
    return GrowthSpec("schedule", growth.learning_rate, (BatchChange(Amount(GROWN_AFTER * each, unit), most),))


def grown_batch(growth: GrowthSpec, plan: Plan) -> int:
    """Return the samples of a batch that has grown, of a story: the noise scale doubles it."""
    return 2 * plan.batch_samples + (growth.by != "noise")


def story_freezing(optimizer: OptimizerSpec) -> OptimizerSpec:
    """Return the optimizer with groups that stay as they are up to, or from, a step of the story's."""

    def at_most(step: Amount | None, last: int) -> Amount | None:
        return None if step is None else Amount(min(step.value, last), "steps")

    groups = [
        dataclasses.replace(
            group,
            # One that is trained for a while alone still is so for a step.
            frozen_until=at_most(group.frozen_until, THAWED - 1 - (group.frozen_after is not None)),
            frozen_after=at_most(group.frozen_after, THAWED - 1),
        )
        for group in optimizer.groups
    ]
    return dataclasses.replace(optimizer, groups=tuple(groups))


def story_sizes(task: Task, plan: Plan) -> tuple[int, ...]:
    """Return what every step of the story reads, in samples, from the definition and not from the run's own course.

    Where the noise scale decides, one device says what it has decided. A batch does not grow where a task selects.
    """
    read = task.selection.candidates_of(plan.batch_samples)
    grown = grown_batch(task.growth, plan) if task.growth.grows else read
    return (read,) * GROWN_AFTER + (grown,) * (SAVED + 1 - GROWN_AFTER)


def expected_factor(growth: GrowthSpec, samples: int, first: int) -> float:
    """Return what the learning rate of a step of so many samples is multiplied by, from the definition."""
    return {"linear": samples / first, "sqrt": (samples / first) ** 0.5, "none": 1.0}[growth.learning_rate]


def expected_rate(schedule: ScheduleSpec, peak: float, step: int) -> float:
    """Return the learning rate of a 1-based step of the story, from the definition and not from `learning_rate`.

    Up to the peak in equal steps; then from it, over the steps that are left, down to `final` of it.
    """
    if step <= WARMUP:
        return peak * step / WARMUP
    done = (step - WARMUP) / (LENGTH - WARMUP)
    left = (1 + math.cos(math.pi * done)) / 2 if schedule.kind == "cosine" else 1 - done
    return peak * (schedule.final + (1 - schedule.final) * left)


def other_layout(task: Task, plan: Plan, on_copies: bool = False) -> Plan:
    """Return the plan on which the story goes on: another layout of the same ranks, where the model allows one.

    A module of the user's is not asked which axes are open to it: it gets another data axis where it has one already,
    and else the same layout. Where a step is one micro-batch, it stays one. With `on_copies` no weight is in parts.
    """
    layout, ranks = plan.layout, plan.layout.devices
    family = isinstance(task.model, ModelSpec) and is_named(task.model.name)
    if ranks == 1 or not (family or layout.data_degree > 1):
        return plan
    copies = on_copies or layout == Layout(dp_shard=ranks)
    return _over(plan, Layout(dp_replicate=ranks) if copies else Layout(dp_shard=ranks))


def alone(plan: Plan) -> Plan:
    """Return the plan on one device."""
    return _over(plan, Layout())


def _over(plan: Plan, layout: Layout) -> Plan:
    """Return the plan on a layout of data axes alone."""
    batch = plan.batch_samples
    whole = plan.accumulation == 1
    micro_batch = max(1, -(-batch // layout.data_degree)) if whole else plan.micro_batch
    return dataclasses.replace(
        plan,
        layout=layout,
        micro_batch=micro_batch,
        accumulation=accumulation_for(batch, layout.data_degree, micro_batch),
        schedule="1f1b",
        virtual_stages=1,
        stages=(),
        rows=(),
    )
