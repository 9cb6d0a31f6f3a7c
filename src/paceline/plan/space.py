"""The space of plans: which degrees, layouts and whole plans a task, a cluster and a spec's constraints allow."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.cost.inputs import Context
from paceline.plan.cost.recompute import BUDGETS
from paceline.plan.layout import Layout, accumulation_for, layouts_over
from paceline.plan.plan import SAVED_KINDS, Plan, PlanSpec
from paceline.plan.refusals import PLAN_REFUSALS, layout_refusal, pipeline_stages
from paceline.plan.stages import INTERLEAVED

DATA_AXES = ("dp_replicate", "dp_shard")
MODEL_AXES = ("cp", "tp", "pp", "ep")
# Without being asked: a budget is a demand of its own.
TRIED_RECOMPUTE = ("none", "selective", "full")
TRIED_SCHEDULES = ("1f1b", "interleaved")  # without being asked: GPipe holds more and gains nothing
UNMENTIONED = "this version computes the data axes dp_replicate and dp_shard only"


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
        recompute_save=tuple(kind for kind in SAVED_KINDS if kind in constraints.recompute_save),
        offload="none" if constraints.offload == "auto" else constraints.offload,
    )


def alone(axis: str, degree: int) -> Layout:
    """Return the layout of one axis alone: the least that uses it."""
    return Layout(dp_shard=degree, ep=degree) if axis == "ep" else Layout(**{axis: degree})


def allowed_layouts(context: Context, constraints: PlanSpec, base: Plan, refused: list[Refusal]) -> list[Layout]:
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
    return _sound(context, layouts, base, refused)


def _has_experts(context: Context) -> bool:
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
        f"{asked or 'the open axes'} with {devices} device(s)",
        "dp_replicate x dp_shard x cp x tp x pp must be the number of devices, and ep must divide dp_shard x cp",
        f"cluster.devices = {product}" if product > 1 else "leave them unset: the planner chooses",
    )


def _sound(context: Context, layouts: list[Layout], base: Plan, refused: list[Refusal]) -> list[Layout]:
    """Return the layouts that the model allows as a whole and that leave no data rank without samples.

    Each reason is told once, and so is each data degree that is too large.
    """
    batch, kept, told = base.batch_samples, [], set()
    for layout in layouts:
        plan = dataclasses.replace(base, layout=layout)
        because = layout_refusal(plan, context.profile)
        if layout.data_degree > batch:
            because = f"a global batch of {batch} sample(s) leaves some of {layout.data_degree} devices without any"
        if because is None:
            kept.append(layout)
        elif because not in told:
            told.add(because)
            refused.append(Refusal(plan, because))
    return kept


def recompute_modes(context: Context, constraints: PlanSpec) -> tuple[tuple[str, float], ...]:
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


def micro_batches(batch_samples: int, data_degree: int, demanded: int = 0) -> tuple[int, ...]:
    """Return the micro-batches worth pricing: even parts of a device's share, powers of two, and the whole share."""
    if demanded:
        return (demanded,)
    largest = -(-batch_samples // data_degree)
    parts = {-(-largest // count) for count in range(1, 17)}
    powers = {2**exponent for exponent in range(largest.bit_length())}
    return tuple(sorted(parts | powers))


def rungs(batch_samples: int, data_degree: int, demanded: int = 0) -> tuple[int, ...]:
    """Return fewer micro-batches, where plans are many: powers of two and the whole share."""
    if demanded:
        return (demanded,)
    largest = -(-batch_samples // data_degree)
    return tuple(sorted({largest, *(2**exponent for exponent in range(largest.bit_length()))}))


def pipelines(context: Context, constraints: PlanSpec, layout: Layout) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return the (schedule, stages per device, blocks of every stage) to price: one that means nothing without `pp`."""
    if layout.pp == 1:
        return [("1f1b", 1, ())]
    found = []
    blocks = context.profile.repeated_blocks
    for schedule in TRIED_SCHEDULES if constraints.schedule == "auto" else (constraints.schedule,):
        several = constraints.virtual_stages or (2 if schedule == "interleaved" else 1)
        asked = constraints.schedule != "auto"
        if not asked and ((several > 1 and schedule not in INTERLEAVED) or layout.pp * several > blocks):
            continue
        stages = parse_stages(constraints.stages) or context.split(layout.pp * several)
        found.append((schedule, several, stages))
    return found


def parse_stages(text: str) -> tuple[int, ...]:
    """Return the blocks of every stage from "3+2x4+3"; () for an empty text. Raises ConfigError."""
    sizes: list[int] = []
    for part in text.replace(" ", "").split("+") if text.strip() else []:
        times, _, size = part.rpartition("x")
        if not size.isdigit() or (times and not times.isdigit()):
            raise ConfigError(f"plan.stages = '{text}'", "it lists the blocks of every pipeline stage", '"3+2x4+3"')
        sizes += [int(size)] * int(times or 1)
    return tuple(sizes)


def plans_of(
    context: Context,
    constraints: PlanSpec,
    layout: Layout,
    base: Plan,
    modes: tuple[tuple[str, float], ...],
    refused: list[Refusal],
) -> Iterator[list[Plan]]:
    """Yield the plans of a layout, those that differ in the micro-batch alone together, smallest first.

    What a whole plan cannot be is refused without a price, once for each reason where no micro-batch is left.
    """
    batch, closed = base.batch_samples, context.profile.closed_axes or {}
    largest = -(-batch // layout.data_degree)
    classes = ((constraints.zero,) if constraints.zero else (1, 2, 3)) if layout.state_degree > 1 else (3,)
    choices = micro_batches if max(layout.cp, layout.tp, layout.pp, layout.ep) == 1 else rungs
    sizes = choices(batch, layout.data_degree, constraints.micro_batch)
    told: set[str] = set()
    for (schedule, several, stages), zero, (mode, budget) in itertools.product(
        pipelines(context, constraints, layout), classes, modes
    ):
        shown = dataclasses.replace(
            base, layout=layout, zero=zero, recompute=mode, schedule=schedule, virtual_stages=several, stages=stages,
            recompute_budget=budget,
        )  # fmt: skip
        if pipeline_stages(shown, context.profile) is None:
            shown = context.with_blocks(shown)
        group, reasons = [], []
        for size in sizes:
            accumulation = accumulation_for(batch, layout.data_degree, size)
            plan = dataclasses.replace(shown, micro_batch=size, accumulation=accumulation)
            because = next((text for limit in PLAN_REFUSALS if (text := limit(plan, context.profile))), None)
            if size > largest:
                because = f"a device's part of the batch is {largest} sample(s) at most"
            elif accumulation > 1 and "accumulation" in closed:
                because = closed["accumulation"]
            if because is None:
                group.append(plan)
            else:
                reasons.append(Refusal(plan, because))
        if (not group or "accumulation" in closed) and reasons and reasons[0].because not in told:
            told.add(reasons[0].because)
            refused.append(reasons[0])
        yield group
