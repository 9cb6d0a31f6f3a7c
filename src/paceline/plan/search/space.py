"""The space of plans: which degrees, layouts and whole plans a task, a cluster and a spec's constraints allow."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.cost.columns import AXES, Columns, Ints
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.feasible.refusals import layout_refusal, pipeline_stages, plan_refusal
from paceline.plan.feasible.stages import INTERLEAVED, stage_refusal
from paceline.spec.layout import DATA_AXES, MODEL_AXES, Layout, accumulation_for, largest_part, layouts_over
from paceline.spec.plan import (
    RECOMPUTE,
    SAVED_KINDS,
    SCHEDULES,
    Plan,
    PlanSpec,
    classes_of,
    parse_rows,
    parse_stages,
    rows_refusal,
)
from paceline.units import plural

TRIED_RECOMPUTE = ("none", "selective", "full")  # without being asked; memory budgets follow on the best of these
BUDGETS = (0.75, 0.5, 0.25)  # tried where the budget is the planner's choice
TRIED_SCHEDULES = ("interleaved", "zero-bubble", "1f1b")  # GPipe, unless asked for, holds more and gains nothing


@dataclass(frozen=True)
class Refusal:
    """A plan that was not taken, and why."""

    plan: Plan
    because: str


def base_plan(constraints: PlanSpec, precision: str, batch_samples: int) -> Plan:
    """Return a plan with all that the constraints settle and no search is made over."""
    return Plan(
        precision=precision,
        compile=constraints.compile,
        batch_samples=batch_samples,
        cp_method=constraints.cp_method,
        expert_slots=constraints.expert_slots,
        recompute_save=tuple(kind for kind in SAVED_KINDS if kind in constraints.recompute_save),
        offload="none" if constraints.offload == "auto" else constraints.offload,
        frozen="as-model" if constraints.frozen == "auto" else constraints.frozen,
        sync=constraints.sync,
        rows=parse_rows(constraints.rows),
    )


def alone(axis: str, degree: int) -> Layout:
    """Return the layout of one axis alone: the least that uses it."""
    return Layout(dp_shard=degree, ep=degree) if axis == "ep" else Layout(**{axis: degree})


def allowed_layouts(context: PricedTask, constraints: PlanSpec, base: Plan, refused: list[Refusal]) -> list[Layout]:
    """Return the layouts of exactly the cluster's devices that keep the constraints and that the model allows.

    A degree that the model cannot have is refused once, whatever the other axes. Raises DoesNotFit for a demanded axis
    that cannot be had, and ConfigError for degrees that do not make the number of devices.
    """
    devices, closed = context.cluster.devices, context.profile.closed_axes or {}
    divisors = [degree for degree in range(1, devices + 1) if devices % degree == 0]
    degrees: dict[str, list[int]] = {}
    for axis in (*DATA_AXES, *MODEL_AXES):
        demanded = getattr(constraints, axis)
        if axis in MODEL_AXES and axis in closed:
            _check_demand(axis, demanded, closed[axis])
            if devices > 1:
                refused.append(_closed_refusal(axis, devices, closed[axis], base))
            degrees[axis] = [1]
            continue
        degrees[axis] = []
        for degree in [demanded] if demanded else divisors if axis != "ep" or _has_experts(context) else [1]:
            plan = dataclasses.replace(base, layout=alone(axis, degree), accumulation=degree)
            because = layout_refusal(plan, context.profile) or pipeline_stages(plan, context.profile)
            if because is None:
                degrees[axis].append(degree)
                continue
            _check_demand(axis, demanded if axis in MODEL_AXES else 0, because)
            refused.append(Refusal(plan, because))
    layouts = list(layouts_over(devices, degrees))
    if not layouts:
        wanted = {axis: [getattr(constraints, axis)] if getattr(constraints, axis) else divisors for axis in degrees}
        wanted |= {axis: [1] for axis in MODEL_AXES if axis in closed}
        if not any(True for _ in layouts_over(devices, wanted)):
            raise _contradiction(constraints, devices)
    return _asked_for(_sound(context, layouts, base, refused), constraints, base, refused)


def _asked_for(layouts: list[Layout], constraints: PlanSpec, base: Plan, refused: list[Refusal]) -> list[Layout]:
    """Return the layouts that an option which asks for an axis has a use for; all of them where none has.

    Others are refused, once for each option: a class of shards asks for shards, blocks of stages for a pipeline.
    """
    asks = (
        ("zero", constraints.zero, lambda layout: layout.state_degree > 1, "state that is sharded"),
        ("stages", constraints.stages, lambda layout: layout.pp > 1, "a pipeline"),
    )
    for name, value, uses, what in asks:
        kept = [layout for layout in layouts if uses(layout)] if value else []
        if kept:
            other = next((layout for layout in layouts if not uses(layout)), None)
            if other is not None:
                refused.append(
                    Refusal(dataclasses.replace(base, layout=other), f"plan.{name} = {value} asks for {what}")
                )
            layouts = kept
    return layouts


def _has_experts(context: PricedTask) -> bool:
    return any(block.experts for block in context.profile.shapes)


def _check_demand(axis: str, demanded: int, because: str) -> None:
    if demanded > 1:
        raise DoesNotFit(
            f"plan.{axis} = {demanded} cannot be had", because, f"leave plan.{axis} unset, or use dp_shard"
        )


def _closed_refusal(axis: str, devices: int, because: str, base: Plan) -> Refusal:
    factor = next(degree for degree in range(2, devices + 1) if devices % degree == 0)
    rest = {} if axis == "ep" else {"dp_replicate": devices // factor}
    layout = dataclasses.replace(alone(axis, factor), **rest)
    return Refusal(dataclasses.replace(base, layout=layout, batch_samples=1), because)


def _contradiction(constraints: PlanSpec, devices: int) -> ConfigError:
    axes = {axis: getattr(constraints, axis) for axis in (*DATA_AXES, *MODEL_AXES) if getattr(constraints, axis)}
    asked = " and ".join(f"plan.{axis} = {degree}" for axis, degree in axes.items())
    product = math.prod(degree for axis, degree in axes.items() if axis != "ep")
    return ConfigError(
        f"{asked or 'the open axes'} with {plural(devices, 'device')}",
        "dp_replicate x dp_shard x cp x tp x pp must be the number of devices, and ep must divide dp_shard x cp",
        f"cluster.devices = {product}" if product > 1 else "leave them unset: the planner chooses",
    )


def _sound(context: PricedTask, layouts: list[Layout], base: Plan, refused: list[Refusal]) -> list[Layout]:
    """Return the layouts that the model allows as a whole and that leave no data rank without samples.

    Each reason is told once, and so is each data degree that is too large.
    """
    batch, kept, told = base.batch_samples, [], set()
    for layout in layouts:
        plan = dataclasses.replace(base, layout=layout)
        because = layout_refusal(plan, context.profile) or rows_refusal(plan)
        if layout.data_degree > batch:
            because = (
                f"a global batch of {plural(batch, 'sample')} leaves some of {layout.data_degree} devices without any"
            )
        if because is None:
            kept.append(layout)
        elif because not in told:
            told.add(because)
            refused.append(Refusal(plan, because))
    return kept


def recompute_modes(context: PricedTask, constraints: PlanSpec) -> tuple[tuple[str, float], ...]:
    """Return the (mode, budget) of activation checkpointing to price; a budget of 0 where the mode has none.

    Raises ConfigError for a mode that the model cannot have, and for options that contradict it.
    """
    if constraints.recompute_budget and constraints.recompute != "budget":
        raise ConfigError(
            f"plan.recompute_budget = {constraints.recompute_budget:g} with recompute = '{constraints.recompute}'",
            "a budget is one way to recompute, beside selective and full",
            'recompute = "budget"',
        )
    if not constraints.recompute_save and constraints.recompute in ("selective", "budget"):
        raise ConfigError(
            "plan.recompute_save = []", "selective recompute that keeps nothing is full recompute", 'recompute = "full"'
        )
    if constraints.recompute == "auto":
        tried = TRIED_RECOMPUTE if context.recomputable else ("none",)
        return tuple((mode, 0.0) for mode in tried if mode != "selective" or constraints.recompute_save)
    if constraints.recompute != "none" and not context.recomputable:
        raise ConfigError(
            f"plan.recompute = '{constraints.recompute}' with the model {context.profile.name}",
            "activation checkpointing works on repeated blocks, and none were found in this model",
            'recompute = "none", or hold the repeated layers in an nn.ModuleList',
        )
    if constraints.recompute == "budget":
        asked = constraints.recompute_budget
        return tuple(("budget", part) for part in ((asked,) if asked else BUDGETS))
    return ((constraints.recompute, 0.0),)


def micro_batches(
    batch_samples: int, data_degree: int, demanded: int = 0, *, shares: Sequence[int] = (), coarse: bool = False
) -> tuple[int, ...]:
    """Return the micro-batches worth pricing: even parts of a device's share, powers of two, and the whole share.

    `shares` are as in `rows_of`; `coarse` leaves the powers of two alone.
    """
    if demanded:
        return (demanded,)
    largest = largest_part(batch_samples, data_degree, shares)
    parts = set() if coarse else {-(-largest // count) for count in range(1, 17)}
    powers = {2**exponent for exponent in range(largest.bit_length())}
    return tuple(sorted(parts | powers))


def pipelines(context: PricedTask, constraints: PlanSpec, pp: int) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return the (schedule, stages per device, blocks of every stage) to price: one that means nothing without `pp`."""
    if pp == 1:
        return [("1f1b", 1, ())]
    found = []
    blocks, asked = context.profile.repeated_blocks, constraints.schedule != "auto"
    for schedule in (constraints.schedule,) if asked else TRIED_SCHEDULES:
        for several in _chunks(schedule, constraints, blocks // pp):
            if not asked and several > 1 and schedule not in INTERLEAVED:
                continue
            stages = parse_stages(constraints.stages) or context.split(pp * several)
            if asked or len(stages) == pp * several:
                found.append((schedule, several, stages))
    return found


def _chunks(schedule: str, constraints: PlanSpec, most: int) -> tuple[int, ...]:
    """Return the stages per device worth pricing: powers of two, and as many as there are blocks."""
    if constraints.virtual_stages:
        return (constraints.virtual_stages,)
    if schedule != "interleaved":
        return (1,)
    powers = {2**exponent for exponent in range(1, max(most, 1).bit_length())}
    return tuple(sorted(powers | ({most} if most > 1 else set()))) or (2,)


@dataclass
class Space:
    """Every plan that a search prices, put together as columns; what cannot be had is refused on the way.

    Other settings depend on a few things of a layout; layouts that agree in these things share one list of settings.
    """

    context: PricedTask
    constraints: PlanSpec
    base: Plan
    modes: tuple[tuple[str, float], ...]  # of recompute, with their budgets
    refused: list[Refusal]
    coarse: bool = False
    splits: list[tuple[int, ...]] = field(default_factory=list)
    _settings: dict[tuple[int, ...], Ints] = field(default_factory=dict)
    _reasons: dict[tuple[object, ...], str | None] = field(default_factory=dict)

    def columns(self, layouts: list[Layout]) -> Columns:
        """Return all plans of the layouts."""
        blocks, lengths = [np.zeros((0, len(SETTINGS)), dtype=np.int64)], []
        for layout in layouts:
            blocks.append(self._of_layout(layout))
            lengths.append(len(blocks[-1]))
        degrees = np.array([[getattr(layout, axis) for axis in AXES] for layout in layouts], dtype=np.int64)
        spread = np.repeat(degrees.reshape(-1, len(AXES)), np.array(lengths, dtype=np.int64), axis=0)
        settings = dict(zip(SETTINGS, np.ascontiguousarray(np.concatenate(blocks).T), strict=True))
        mode = settings.pop("mode")
        return Columns(
            **{axis: np.ascontiguousarray(spread[:, place]) for place, axis in enumerate(AXES)},
            **settings,
            recompute=np.array([RECOMPUTE.index(way) for way, _ in self.modes], dtype=np.int64)[mode],
            budget=np.array([budget for _, budget in self.modes])[mode],
            settled=np.full(len(mode), -1),
            splits=tuple(self.splits),
            blocks=(),
            common=self.base,
            paces=self.context.cluster.paces,
        )

    def _of_layout(self, layout: Layout) -> Ints:
        """Return the settings of a layout's plans, one row each."""
        in_use = Layout(dp_shard=min(2, layout.data_degree * layout.cp), tp=min(2, layout.tp), pp=layout.pp)
        key = (layout.data_degree, min(2, layout.state_degree), in_use.dp_shard, in_use.tp, in_use.pp)
        if key not in self._settings:
            self._settings[key] = self._lay_out(layout, in_use)
        return self._settings[key]

    def _lay_out(self, layout: Layout, in_use: Layout) -> Ints:
        """Return rows of SETTINGS. What a whole plan cannot be is refused, once for each reason where none is left."""
        batch, shares = (self.base.batch_samples, layout.data_degree), self.base.rows
        classes = self._classes(layout)
        # In a single micro-batch gradients are scattered as they come, so that these are one plan.
        same = {(3, True)} if (3, False) in classes else set()
        sizes = [
            (size, accumulation_for(*batch, size, shares))
            for size in micro_batches(*batch, self.constraints.asked_micro_batch, shares=shares, coarse=self.coarse)
        ]
        closed = "accumulation" in (self.context.profile.closed_axes or {})
        rows, told = [], set()
        ways = pipelines(self.context, self.constraints, layout.pp)
        if not ways:
            self._refuse_stages(layout)
        for (schedule, several, stages), (place, (way, budget)) in itertools.product(ways, enumerate(self.modes)):
            shown = dataclasses.replace(
                self.base, layout=layout, recompute=way, schedule=schedule, virtual_stages=several, stages=stages,
                zero=classes[0][0], recompute_budget=budget,
            )  # fmt: skip
            reasons = [self._because(shown, *both, in_use) for both in sizes]
            fitting = [both for both, because in zip(sizes, reasons, strict=True) if because is None]
            first = next((at for at, because in enumerate(reasons) if because), None)
            if first is not None and (not fitting or closed) and reasons[first] not in told:
                told.add(reasons[first])
                size, accumulation = sizes[first]
                plan = dataclasses.replace(shown, micro_batch=size, accumulation=accumulation)
                self.refused.append(Refusal(plan, str(reasons[first])))
            split = self._place(stages) if layout.pp > 1 else -1
            places = (place, SCHEDULES.index(schedule), several, split)
            rows += [(*one, *both, *places) for one in classes for both in fitting if both[1] > 1 or one not in same]
        return np.array(rows, dtype=np.int64).reshape(-1, len(SETTINGS))

    def _refuse_stages(self, layout: Layout) -> None:
        """Note why no pipeline of a layout has the stages that are asked for, once for each reason."""
        asked = self.constraints
        plan = dataclasses.replace(
            self.base, layout=layout, stages=parse_stages(asked.stages), virtual_stages=asked.virtual_stages or 1,
            schedule="interleaved" if asked.virtual_stages > 1 else "1f1b",
        )  # fmt: skip
        because = stage_refusal(plan, self.context.profile.repeated_blocks)
        if because and because not in (each.because for each in self.refused):
            self.refused.append(Refusal(plan, because))

    def _classes(self, layout: Layout) -> tuple[tuple[int, bool], ...]:
        """Return the (ZeRO class, whether ZeRO-3 has whole gradients) to price for a layout.

        Whole gradients of ZeRO-3 gain nothing in fp32, where ZeRO-2 needs no more memory and sends less; beside a
        pipeline, whose stages are small, they are priced where they are asked for.
        """
        if layout.state_degree == 1:
            return ((3, False),)
        asked = self.constraints.gradients != "auto"
        classes = classes_of(self.constraints.zero, self.constraints.gradients)
        narrow = self.base.precision not in ("fp32", "fp64") and layout.pp == 1
        return classes if asked or narrow else tuple(one for one in classes if one != (3, True))

    def _because(self, shown: Plan, size: int, accumulation: int, in_use: Layout) -> str | None:
        """Return why a plan cannot be had. Limits of whole plans see `pp`, and which others are in use."""
        largest = largest_part(shown.batch_samples, shown.layout.data_degree, shown.rows)
        if size > largest:
            return f"a device's part of the batch is {plural(largest, 'sample')} at most"
        closed = self.context.profile.closed_axes or {}
        if accumulation > 1 and "accumulation" in closed:
            return closed["accumulation"]
        pipeline = (in_use.pp, shown.schedule, shown.virtual_stages)
        key = (*pipeline, in_use.dp_shard, in_use.tp, accumulation, shown.recompute)
        if key not in self._reasons:
            plan = dataclasses.replace(shown, layout=in_use, micro_batch=size, accumulation=accumulation)
            self._reasons[key] = plan_refusal(plan, self.context.profile)
        return self._reasons[key]

    def _place(self, stages: tuple[int, ...]) -> int:
        if stages not in self.splits:
            self.splits.append(stages)
        return self.splits.index(stages)


SETTINGS = ("zero", "whole_gradients", "micro_batch", "accumulation", "mode", "schedule", "virtual_stages", "split")
