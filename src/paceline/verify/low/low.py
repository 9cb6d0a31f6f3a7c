"""The check of low precision: a layout in bf16 or fp16 against one device that makes the same casts.

Two kinds of mistakes look like rounding and are none: a sum kept or sent in the compute format, and a decision (skip
this step, send this token there) that ranks take for themselves. So formats are looked at where gradients travel and
rest, and ranks are asked for their decisions; numbers are compared on top of that, for one update:

- A layout that computes each micro-batch whole on one device (data axes, a pipeline) makes the same products, bit for
  bit, and differs by sums in fp32 alone: fp32's tolerances hold.
- `tp` and `cp` add up in other orders inside of layers, and round in between. How far that may move each quantity is
  measured: one device computes it again from weights that are moved by up to one unit in the last place of the compute
  format, at random. Differences beyond MARGIN times that movement are mistakes.
- Where a token near a tie may go to another expert (a routed model on `tp`, `cp` or `ep`), or rows see each other,
  rounding has no bound that a mistake would not fit in: numbers are left to fp32 and fp64.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from paceline.run.assemble import Assembled, assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.step import StepStats
from paceline.run.process.world import World
from paceline.spec.plan import Plan
from paceline.spec.task import Task
from paceline.task.data.source import Source
from paceline.verify.compare.diagnosis import Diagnosis
from paceline.verify.compare.difference import Difference, number_differences, tensor_differences
from paceline.verify.compare.layout import clipped
from paceline.verify.compare.tolerance import QUANTITIES, larger
from paceline.verify.low.reference import Expected, expected_of
from paceline.verify.low.watch import Watch

STEPS = 2
LISTED = 8  # tensors that a result names; the rest is counted


def low(
    task: Task,
    plan: Plan,
    world: World,
    source: Source,
    items_per_sample: int,
    steps: int,
    kept: dict[Any, Any] | None = None,
) -> dict[str, Any]:
    """Return the record of a check (see checks.py); `first_difference` may be of a `dtype` or a `decision` too.

    `of_bound` is the largest part that a difference has of what it may be; `left_out` says why nothing was compared.
    """
    began = time.perf_counter()
    mine = _expected(task, plan, source, items_per_sample) if world.is_first else None
    expected = world.gather(mine)[0]
    if isinstance(expected, str):
        return {**_record(plan, began, [], {}), "left_out": expected}
    built = assemble(clipped(task, {"": 0.0}), plan, world, source, items_per_sample)
    if built.stepper.scaler is not None:
        built.stepper.scaler.scale = expected.scale
    stream = BatchStream(source, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    watch = Watch(built, plan, world, expected)
    found, stats = _first_update(built, task, plan, world, watch, stream, expected)
    wrong = watch.formats(1) + watch.decisions(stats, 1)
    for step in range(2, STEPS + 1):
        stats = watch.step(stream, step, task.optimizer.lr)
        wrong += watch.formats(step) + watch.decisions(stats, step)
    if built.stepper.scaler is not None:
        wrong += watch.overflow(stream, STEPS + 1, task.optimizer.lr)
    compared = [d for d in found if expected.compares(d.quantity, d.name)]
    compared.sort(key=lambda difference: QUANTITIES.index(difference.quantity))  # in order of cause
    wrong += [d for d in compared if not d.relative <= expected.bound(d.quantity, d.name)]
    worst = dict.fromkeys(("loss", "gradients", "grad_norm", "weights"), 0.0)
    for difference in compared:
        worst[difference.quantity] = larger(worst[difference.quantity], difference.relative)
    of_bound = max((d.relative / expected.bound(d.quantity, d.name) for d in compared), default=0.0)
    return {**_record(plan, began, wrong, worst), "of_bound": of_bound}


def _expected(task: Task, plan: Plan, source: Source, items_per_sample: int) -> Expected | str:
    """Return what one device computes, or why it cannot: a CPU lacks some operators in these formats."""
    try:
        return expected_of(task, plan, source, items_per_sample)
    except RuntimeError as error:
        return f"one device cannot compute it in {plan.precision}: {error}"


def _record(plan: Plan, began: float, wrong: list[Difference], worst: dict[str, float]) -> dict[str, Any]:
    return {
        "equal": not wrong,
        "dtype": plan.precision,
        "steps": STEPS,
        "seconds": time.perf_counter() - began,
        "differences": worst,
        "first_difference": _told(wrong) if wrong else None,
    }


def _first_update(
    built: Assembled, task: Task, plan: Plan, world: World, watch: Watch, stream: BatchStream, expected: Expected
) -> tuple[list[Difference], StepStats]:
    """Make the first update and return how far its numbers are from one device's."""
    before = {name: weight.detach().clone() for name, weight in built.model.named_parameters()}
    gradients: dict[str, torch.Tensor] = {}

    def observe(correction: float) -> None:
        for name, parameter in built.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad * correction

    built.stepper.observe = observe
    stats = watch.step(stream, 1, task.optimizer.lr)
    built.stepper.observe = None
    ours = {"loss": stats.loss, "grad_norm": stats.grad_norm}
    numbers = expected.numbers
    found = number_differences(ours, {name: numbers[name] for name in ours}, 1, world)
    found += tensor_differences("gradients", gradients, numbers["gradients"], 1, world, plan.layout)
    updates = {name: w.detach() - before[name] for name, w in built.model.named_parameters() if name in gradients}
    return found + tensor_differences("weights", updates, numbers["weights"], 1, world, plan.layout), stats


def _told(wrong: list[Difference]) -> dict[str, Any]:
    """Return the first difference as plain data, with what it means."""
    first = wrong[0]
    meaning = {
        "dtype": Diagnosis("half-reduced precision", "it is kept or sent in fewer bits than on one device"),
        "decision": Diagnosis("update", "ranks that must decide alike do not"),
    }.get(first.quantity, Diagnosis("other numbers", "it differs by more than rounding in this format can"))
    same = [d.name for d in wrong if d.quantity == first.quantity]
    return {**vars(first), "tensors": same[:LISTED], "tensors_in_all": len(same), **vars(meaning)}
