"""What a story runs: its starts, their plans and worlds, and the course of the learning rate."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

from paceline.run.process.world import World
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan
from paceline.spec.steps.growth import BatchChange, GrowthSpec
from paceline.spec.steps.update import OptimizerSpec, ScheduleSpec
from paceline.spec.task import ModelSpec, Task
from paceline.task.models.sizes import is_named
from paceline.units import Amount

SAVED = 3  # the step after which the checkpoint is written, where no schedule makes the batch grow
GROWN_AFTER = 2  # steps, where the task's batch grows
# By a schedule it grows a second time, by one sample: some ranks then have the same rows of a batch as before. Who
# works out what several steps read, more of them the longer they are alike (order/many_steps.py), does so by then.
DOUBLED, ONE_MORE = 4, 2  # steps of either batch before the checkpoint
THAWED = 3  # the first step that trains a group which was left as it is, or leaves one that was trained
SMALLEST_RATIO = 1e-12  # of the noise scale over the batch: at any larger one it grows
WARMUP = 2  # steps
NEVER_MADE = 2  # the last steps of the run that the learning rate is planned over
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
    def saved(self) -> int:
        """The step after which the checkpoint is written: the last but one of the run."""
        return len(self.sizes) - 1

    @property
    def steps(self) -> int:
        """How many steps the start makes: up to the checkpoint, or one from there."""
        return 1 if self.resumed else self.saved


def acts_of(task: Task, plan: Plan, world: World, on_copies: bool = False) -> list[Act]:
    """Return the starts of the run, in order: under the plan, on another layout of its ranks, under the plan again, and
    on one device alone.

    What only the plan's own layout loads (a part of a layer, a second place of a tied weight) the third one shows. With
    `on_copies` every rank of the other layout has all weights.
    """
    other, sizes = other_layout(task, plan, on_copies), story_sizes(task, plan)
    chooses, last = task.selection.selects, len(sizes)
    acts = [
        Act(plan, world, 1, sizes, chooses),
        Act(other, world, last, sizes, chooses, f"after a resume as {other.layout}"),
    ]
    if world.size > 1:
        if other.layout != plan.layout:
            acts.append(Act(plan, world, last, sizes, chooses, f"after a resume as {plan.layout}"))
        single = World(0, 1, world.local_rank, world.device)
        acts.append(Act(alone(plan), single, last, sizes, chooses, "after a resume on one device"))
    return acts


def planned_steps(sizes: tuple[int, ...]) -> int:
    """Return the steps that the learning rate is planned over, of a story whose steps read so many samples each."""
    return len(sizes) + NEVER_MADE


def story_schedule(schedule: ScheduleSpec, samples: int, steps: int) -> ScheduleSpec:
    """Return the task's schedule over the story: another rate at every step, and lengths that need converting.

    `samples` are what a step reads before the batch grows, `steps` those that the rate is planned over.
    """
    return dataclasses.replace(
        schedule,
        kind="linear" if schedule.kind == "constant" or schedule.is_own else schedule.kind,
        warmup=Amount(WARMUP * samples, "samples"),
        decay=Amount((steps - WARMUP) * samples, "samples"),
        final=min(schedule.final, LARGEST_FINAL),
        arguments={},
    )


def story_growth(task: Task, plan: Plan, items_per_sample: int = 1) -> GrowthSpec:
    """Return how the story's batch grows, where the task's does, before the checkpoint: see `story_sizes`.

    By the noise scale it is measured in every step, and grows once it was measured twice, whatever it is above zero.
    By a schedule it grows after as many steps, which are counted in the unit in which the task counts.
    """
    growth, sizes = task.growth, story_sizes(task, plan)
    if not growth.grows:
        return GrowthSpec()
    if growth.by == "noise":
        return GrowthSpec(
            "noise", growth.learning_rate, largest=Amount(sizes[-1] + 1, "samples"), noise_ratio=SMALLEST_RATIO,
            measure_every=1, measurements=GROWN_AFTER,
        )  # fmt: skip
    unit = next((change.after.unit for change in growth.changes if change.after is not None), "steps")
    changes = [
        BatchChange(Amount(_counted(sizes[:step], unit, items_per_sample), unit), Amount(after, "samples"))
        for step, (before, after) in enumerate(itertools.pairwise(sizes), 1)
        if after != before
    ]
    return GrowthSpec("schedule", growth.learning_rate, tuple(changes))


def _counted(sizes: tuple[int, ...], unit: str, items_per_sample: int) -> int:
    """Return how much steps of these sizes are, in a unit."""
    return {"steps": len(sizes), "samples": sum(sizes), "tokens": sum(sizes) * items_per_sample}[unit]


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

    A batch that grows doubles, and by a schedule has one sample more after that. Where the noise scale decides, one
    device says what it has decided. A batch does not grow where a task selects.
    """
    read = task.selection.candidates_of(plan.batch_samples)
    if not task.growth.grows:
        return (read,) * (SAVED + 1)
    doubled = 2 * plan.batch_samples
    if task.growth.by == "schedule":
        return (read,) * GROWN_AFTER + (doubled,) * DOUBLED + (doubled + 1,) * (ONE_MORE + 1)
    return (read,) * GROWN_AFTER + (doubled,) * (SAVED + 1 - GROWN_AFTER)


def expected_factor(growth: GrowthSpec, samples: int, first: int) -> float:
    """Return what the learning rate of a step of so many samples is multiplied by, from the definition."""
    return {"linear": samples / first, "sqrt": (samples / first) ** 0.5, "none": 1.0}[growth.learning_rate]


def expected_rate(schedule: ScheduleSpec, peak: float, step: int, steps: int) -> float:
    """Return the learning rate of a 1-based step of the story, from the definition and not from `learning_rate`.

    Up to the peak in equal steps; then from it, over the rest of the `steps`, down to `final` of it.
    """
    if step <= WARMUP:
        return peak * step / WARMUP
    done = (step - WARMUP) / (steps - WARMUP)
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
