"""The check of low precision: a layout in bf16 or fp16 against one device that makes the same casts.

Two kinds of mistakes look like rounding and are none: a sum kept or sent in the compute format, and a decision (skip
this step, send this token there) that ranks take for themselves. So formats are looked at where gradients travel and
rest, and ranks are asked for their decisions; numbers are compared on top of that, for one update:

- A layout that computes each micro-batch whole on one device (data axes, a pipeline) makes the same products, bit for
  bit, and differs by sums in fp32 alone: fp32's tolerances hold.
- `tp`, `cp` and `ep` add up in other orders inside of layers, and round in between. How far that may move each quantity
  is measured: one device computes it again from weights that are moved by up to one unit in the last place of the
  compute format, at random. Differences beyond MARGIN times that movement are mistakes.
- Where a token near a tie may go to another expert (a routed model on `tp`, `cp` or `ep`), one device is handed the
  choices of the layout. Its own scores must be tied for those that it would not have made itself, as near as they move
  by that unit, and every number is held to what one device computes for these choices.
- Where rows see each other, rounding has no bound that a mistake would not fit in: numbers are left to fp32 and fp64.
"""

from __future__ import annotations

import time
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
from paceline.verify.compare.difference import Difference, number_differences, tensor_differences
from paceline.verify.compare.layout import clipped
from paceline.verify.compare.tolerance import QUANTITIES, larger
from paceline.verify.low.reference import LowDevice, LowReference
from paceline.verify.low.watch import Watch, wrong_at
from paceline.verify.low.wire import SENT, bits_of_values
from paceline.verify.rounding.conditioning import DRAWS

STEPS = 2
UNKNOWN_CHOICES = "numbers: how its blocks choose experts is not known, so that one device cannot be handed the choices"
BETTER = "went to others than the best"


def low(
    task: Task,
    plan: Plan,
    world: World,
    source: Source,
    items_per_sample: int,
    steps: int,
    kept: dict[Any, Any] | None = None,
    *,
    brief: bool = False,
) -> CheckProof:
    """Return what this check finds; `first_difference` may be of a `dtype` or a `decision` too.

    A `brief` check makes one step, and compares numbers where one device makes the same products.
    """
    began = time.perf_counter()
    device = LowDevice(task, plan, source, items_per_sample, draws=0 if brief else DRAWS)
    expected = world.gather(_computed(device) if world.is_first else None)[0]
    if isinstance(expected, str):
        return CheckProof(True, plan.precision, 0, time.perf_counter() - began, {}, None, left_out=expected)
    built = assemble(clipped(task, {"": 0.0}), plan, world, source, items_per_sample)
    if built.stepper.scaler is not None:
        built.stepper.scaler.scale = expected.scale
    stream = BatchStream(source, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    watch = Watch(built, plan, world, expected)
    ours = _first_update(built, task, watch, stream)
    expected = _following(expected, device, watch, world)
    found = _differences(ours, expected.numbers, world, plan)
    wrong = watch.formats(1, ours.sum_bits) + watch.decisions(ours.stats, 1) + _misrouted(expected)
    last = 1 if brief else STEPS
    for step in range(2, last + 1):
        stats = watch.step(stream, step, task.optimizer.lr)
        wrong += watch.formats(step) + watch.decisions(stats, step)
    if built.stepper.scaler is not None:
        wrong += watch.overflow(stream, last + 1, task.optimizer.lr)
    compared = [d for d in found if expected.compares(d.quantity, d.name)]
    compared.sort(key=lambda difference: QUANTITIES.index(difference.quantity))  # in order of cause
    wrong += [d for d in compared if not d.relative <= expected.bound(d.quantity, d.name)]
    worst = dict.fromkeys(("loss", "gradients", "grad_norm", "weights"), 0.0)
    for difference in compared:
        worst[difference.quantity] = larger(worst.get(difference.quantity, 0.0), difference.relative)
    sizes = [(d.relative, expected.bound(d.quantity, d.name)) for d in compared]
    of_bound = max((relative / most for relative, most in sizes if most), default=0.0)
    return CheckProof(
        equal=not wrong,
        dtype=plan.precision,
        steps=last,
        seconds=time.perf_counter() - began,
        differences=worst,
        first_difference=told(wrong[0], wrong, _meaning(wrong[0])) if wrong else None,
        left_out=UNKNOWN_CHOICES if expected.follows and not expected.allowed else "",
        of_bound=of_bound,
    )


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
    choices = watch.choices()
    mine = device.following(expected, choices) if world.is_first and choices is not None else expected
    followed: LowReference = world.gather(mine if world.is_first else None)[0]
    return followed


def _misrouted(expected: LowReference) -> list[Difference]:
    return [
        wrong_at(
            "decision",
            f"the experts of {one.block}: {one.tokens} of {one.of} tokens {BETTER}, by more than rounding can",
            1,
            0,
        )
        for one in expected.misrouted
        if one.tokens
    ]


@dataclass(frozen=True)
class _Update:
    """What the first update of a layout had on this rank, by name."""

    stats: StepStats
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]  # by how much they changed
    sum_bits: dict[str, int]  # of the values of summed gradients


def _first_update(built: Assembled, task: Task, watch: Watch, stream: BatchStream) -> _Update:
    """Make the first update and return its numbers."""
    before = {name: weight.detach().clone() for name, weight in built.model.named_parameters()}
    gradients: dict[str, torch.Tensor] = {}
    bits: dict[str, int] = {}

    def observe(correction: float) -> None:
        for name, parameter in built.model.named_parameters():
            if parameter.grad is not None:
                bits[name] = bits_of_values(parameter.grad)
                gradients[name] = parameter.grad * correction

    built.stepper.observe = observe
    stats = watch.step(stream, 1, task.optimizer.lr)
    built.stepper.observe = None
    updates = {name: w.detach() - before[name] for name, w in built.model.named_parameters() if name in gradients}
    return _Update(stats, gradients, updates, bits)


def _differences(ours: _Update, numbers: dict[str, Any], world: World, plan: Plan) -> list[Difference]:
    """Return how far the numbers of an update are from one device's."""
    said = {"loss": ours.stats.loss, "grad_norm": ours.stats.grad_norm}
    counts = zip(numbers["router"], ours.stats.router.counts if ours.stats.router else (), strict=True)
    loads = {name: torch.tensor(row, dtype=torch.float64) for name, row in counts}
    return [
        *tensor_differences("router", loads, numbers["router"], 1, world, plan.layout),
        *number_differences(said, {name: numbers[name] for name in said}, 1, world),
        *tensor_differences("gradients", ours.gradients, numbers["gradients"], 1, world, plan.layout),
        *tensor_differences("weights", ours.weights, numbers["weights"], 1, world, plan.layout),
    ]


def _meaning(first: Difference) -> Diagnosis:
    if first.quantity == "dtype" and SENT in first.name:
        return Diagnosis("other format", "it travels in another format than the one that the plan computes in")
    if first.quantity == "dtype":
        return Diagnosis("half-reduced precision", "it is kept or sent in fewer bits than on one device")
    if first.quantity == "decision" and BETTER in first.name:
        return Diagnosis("router choice", "tokens go to experts that their own scores put behind others")
    if first.quantity == "decision":
        return Diagnosis("update", "ranks that must decide alike do not")
    return Diagnosis("other numbers", "it differs by more than rounding in this format can")
