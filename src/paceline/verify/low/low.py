"""The check of low precision: a layout in bf16 or fp16 against one device that makes the same casts.

Two kinds of mistakes look like rounding and are none: a sum kept or sent in the compute format, and a decision (skip
this step, send this token there) that ranks take for themselves. So formats are looked at where gradients travel and
rest, and ranks are asked for their decisions; numbers are compared on top of that, for the first update:

- A layout that computes each micro-batch whole on one device (data axes, a pipeline) makes the same products, bit for
  bit, and differs by sums in fp32 alone: fp32's tolerances hold.
- `tp`, `cp` and `ep` add up in other orders inside of layers, and round in between. How far that may move each quantity
  is measured: one device computes it again from weights that are moved by up to one unit in the last place of the
  compute format, at random. Differences beyond MARGIN times that movement are mistakes.
- Where a token near a tie may go to another expert (a routed model on `tp`, `cp` or `ep`), one device is handed the
  choices of the layout. Its own scores must be tied for those that it would not have made itself, as near as they move
  by that unit, and every number is held to what one device computes for these choices.
- Where rows see each other, rounding has no bound that a mistake would not fit in: numbers are left to fp32 and fp64.

What the first update has no sign of (casts of weights as they were before it, a loss scale from before a skip, other
casts in evaluations) shows in loss and gradients of the next one, in fp16 of the one after a skip too, and in the loss
of an evaluation. Each is held against one device that is handed the weights which the layout has then, before every
turn of several objectives, and its choices of experts, so that rounding does not add up. Moments are in fp32 whatever
the format, and fp32 and fp64 have theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.run.assemble import Assembled, assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.step import StepStats
from paceline.run.process.world import World
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import Task
from paceline.task.data.protocol import Source
from paceline.verify.compare.diagnosis import Diagnosis, told
from paceline.verify.compare.difference import Difference, together
from paceline.verify.compare.in_a_group import has_evaluations
from paceline.verify.compare.layout import clipped
from paceline.verify.compare.measures import measured_numbers, measured_tensors, number_differences
from paceline.verify.compare.tolerance import QUANTITIES, larger
from paceline.verify.low.going_on import Held, each_start, held_by
from paceline.verify.low.reference import At, LowDevice, LowReference
from paceline.verify.low.watch import Watch, wrong_at
from paceline.verify.low.wire import bits_of_values
from paceline.verify.process.tensors_as_bytes import Shared, told_by_first

STEPS = 2
FEW_DRAWS = 2  # of moved weights, for a first look; of so few the movement of a single number may come out too small
AT: At = ("evaluation", "evaluation")
UNKNOWN_CHOICES = "numbers: how its blocks choose experts is not known, so that one device cannot be handed the choices"


def low(
    task: Task,
    plan: Plan,
    world: World,
    source: Source,
    items_per_sample: int,
    steps: int,
    kept: dict[object, object] | None = None,
    *,
    brief: bool = False,
) -> CheckProof:
    """Return what this check finds; `first_difference` may be of a `dtype` or a `decision` too.

    A `brief` check measures nothing for the first update, whose numbers are compared where one device makes the same
    products; in fp16 the second update is the one after a skip. It measures less, and all where that finds something.
    """
    device = LowDevice(task, plan, source, items_per_sample)
    if brief:
        found = _low(dataclasses.replace(device, draws=FEW_DRAWS), world, brief=True)
        if found.equal:
            return found
    return _low(device, world, brief=brief)


def _low(device: LowDevice, world: World, *, brief: bool) -> CheckProof:
    """Return what the check finds with so many draws of moved weights."""
    began = time.perf_counter()
    task, plan, source, items_per_sample = device.task, device.plan, device.source, device.items_per_sample
    first = dataclasses.replace(device, draws=0) if brief else device
    expected: LowReference | str = _of_first(world, lambda: _computed(first))
    if isinstance(expected, str):
        return CheckProof(True, plan.precision, 0, time.perf_counter() - began, {}, None, left_out=expected)
    built = assemble(clipped(task, {"": 0.0}), plan, world, source, items_per_sample)
    if built.stepper.scaler is not None:
        built.stepper.scaler.scale = expected.scale
    stream = BatchStream(source, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    watch = Watch(built, plan, world, expected)
    ours = _update(built, task, watch, stream, 1)
    expected = expected if brief else _following(expected, device, watch, world)
    wrong = watch.formats(1, ours.sum_bits) + watch.decisions(ours.stats, 1) + _misrouted(expected, 1)
    held = [_HeldStep(expected, _differences(ours, expected.numbers, 1, world, plan))]
    scales = built.stepper.scaler is not None
    last = 1 if brief and scales else STEPS
    for step in range(2, last + 1):
        later, stats = _later(built, task, watch, stream, step, device)
        held.append(later)
        wrong += watch.formats(step) + watch.decisions(stats, step) + _misrouted(later.reference, step)
    if scales:
        wrong += watch.overflow(stream, last + 1, task.optimizer.lr)
        if not wrong:  # at other scales of the loss
            after, _ = _later(built, task, watch, stream, last + 2, device)
            held.append(after)
            wrong += _misrouted(after.reference, last + 2)
    if has_evaluations(task):  # they leave gathered weights, so nothing that looks at shards comes after
        held.append(_evaluated(watch, stream, last, device))
    sizes = [(d, one.reference.bound(d.quantity, d.name)) for one in held for d in one.compared]
    wrong += [difference for difference, most in sizes if not difference.relative <= most]
    worst = dict.fromkeys(("loss", "gradients", "grad_norm", "weights"), 0.0)
    for difference, _ in sizes:
        worst[difference.quantity] = larger(worst.get(difference.quantity, 0.0), difference.relative)
    of_bound = max((difference.relative / most for difference, most in sizes if most), default=0.0)
    return CheckProof(
        equal=not wrong,
        dtype=plan.precision,
        steps=last,
        seconds=time.perf_counter() - began,
        differences=worst,
        first_difference=told(wrong[0], wrong, _meaning(wrong[0])) if wrong else None,
        left_out=UNKNOWN_CHOICES if expected.follows and not any(one.reference.allowed for one in held) else "",
        of_bound=of_bound,
    )


@dataclass(frozen=True)
class _HeldStep:
    """What a step of a layout, or an evaluation, is held against, and how far from that it is."""

    reference: LowReference
    found: list[Difference]

    @property
    def compared(self) -> list[Difference]:
        """The differences that say anything, in order of cause."""
        compared = [d for d in self.found if self.reference.compares(d.quantity, d.name)]
        return sorted(compared, key=lambda difference: QUANTITIES.index(difference.quantity))


def _later(
    built: Assembled, task: Task, watch: Watch, stream: BatchStream, step: int, device: LowDevice
) -> tuple[_HeldStep, StepStats]:
    """Make a later update, and hold it against one device that has the layout's own weights before it."""
    world, plan, known = watch.world, watch.plan, watch.expected
    starts: list[Held] = []
    scale = built.stepper.scaler.scale if built.stepper.scaler else 1.0
    with each_start(built, world, starts) if not known.coupled else contextlib.nullcontext():
        ours = _update(built, task, watch, stream, step)
    if known.coupled:
        return _HeldStep(dataclasses.replace(known, misrouted=()), []), ours.stats
    choices = watch.choices(step) if known.follows else None
    expected = _of_first(world, lambda: device.going_on(known, starts, step, scale, choices))
    return _HeldStep(expected, _differences(ours, expected.numbers, step, world, plan)), ours.stats


def _evaluated(watch: Watch, stream: BatchStream, step: int, device: LowDevice) -> _HeldStep:
    """Evaluate what a layout has after a step, and hold it against one device that has the same weights."""
    world, known = watch.world, watch.expected
    if known.coupled:
        return _HeldStep(known, [])
    start = held_by(watch.built.model, world, watch.plan.layout)
    ours = watch.evaluated(stream, step + 1)
    choices = watch.choices(step + 1) if known.follows else None
    if known.follows and choices is None:
        return _HeldStep(known, [])
    reach = known.numbers["reach"]
    expected, bound = _of_first(world, lambda: device.evaluated(start, step + 1, choices, reach))
    found = number_differences({AT[0]: ours}, {AT[0]: expected}, step, world, reach)
    return _HeldStep(dataclasses.replace(known, allowed={AT: bound} if math.isfinite(bound) else {}), found)


def _of_first(world: World, made: Callable[[], Shared]) -> Shared:
    """Return on every rank what the first one makes."""
    return told_by_first(world, made() if world.is_first else None)


def _computed(device: LowDevice) -> LowReference | str:
    """Return what one device computes, or why it cannot: a CPU lacks some operators in these formats."""
    try:
        return device.reference()
    except RuntimeError as error:
        return f"one device cannot compute it in {device.plan.precision}: {error}"


def _following(expected: LowReference, device: LowDevice, watch: Watch, world: World) -> LowReference:
    """Return what one device computes for the layout's own choices of experts, where numbers say nothing else."""
    if not expected.follows:
        return expected
    choices = watch.choices(1)
    mine = device.following(expected, choices) if world.is_first and choices is not None else expected
    return told_by_first(world, mine if world.is_first else None)


def _misrouted(expected: LowReference, step: int) -> list[Difference]:
    return [
        wrong_at(
            "decision",
            f"the experts of {one.block}: {one.tokens} of {one.of} tokens went to others than the best, by more than "
            "rounding can",
            step,
            0,
            "choice",
        )
        for one in expected.misrouted
        if one.tokens
    ]


@dataclass(frozen=True)
class _Update:
    """What an update of a layout had on this rank, by name."""

    stats: StepStats
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]  # by how much they changed
    sum_bits: dict[str, int]  # of the values of summed gradients


def _update(built: Assembled, task: Task, watch: Watch, stream: BatchStream, step: int) -> _Update:
    """Make an update and return its numbers."""
    before = {name: weight.detach().clone() for name, weight in built.model.named_parameters()}
    gradients: dict[str, torch.Tensor] = {}
    bits: dict[str, int] = {}

    def observe(correction: float) -> None:
        for name, parameter in built.model.named_parameters():
            if parameter.grad is not None:
                bits[name] = bits_of_values(parameter.grad)
                gradients[name] = parameter.grad * correction

    built.stepper.observe = observe
    stats = watch.step(stream, step, task.optimizer.lr)
    built.stepper.observe = None
    updates = {name: w.detach() - before[name] for name, w in built.model.named_parameters() if name in gradients}
    return _Update(stats, gradients, updates, bits)


def _differences(ours: _Update, numbers: dict[str, Any], step: int, world: World, plan: Plan) -> list[Difference]:
    """Return how far the numbers of an update are from one device's."""
    said = {"loss": ours.stats.loss, "grad_norm": ours.stats.grad_norm}
    counts = zip(numbers["router"], ours.stats.router.counts if ours.stats.router else (), strict=True)
    loads = {name: torch.tensor(row, dtype=torch.float64) for name, row in counts}
    measured = [
        measured_tensors("router", loads, numbers["router"], step, plan.layout),
        measured_numbers(said, {name: numbers[name] for name in said}, step, numbers["reach"]),
        measured_tensors("gradients", ours.gradients, numbers["gradients"], step, plan.layout),
        measured_tensors("weights", ours.weights, numbers["weights"], step, plan.layout),
    ]
    return together(measured, world)


def _meaning(first: Difference) -> Diagnosis:
    if first.kind == "exchange":
        return Diagnosis("other format", "it travels in another format than the one that the plan computes in")
    if first.quantity == "dtype":
        return Diagnosis("half-reduced precision", "it is kept or sent in fewer bits than on one device")
    if first.kind == "choice":
        return Diagnosis("router choice", "tokens go to experts that their own scores put behind others")
    if first.quantity == "decision":
        return Diagnosis("update", "ranks that must decide alike do not")
    return Diagnosis("other numbers", "it differs by more than rounding in this format can")
