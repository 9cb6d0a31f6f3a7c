"""Compare a layout with the reference, step by step and tensor by tensor, inside a world of ranks.

Every rank calls `compare`. Rank 0 computes the reference and shares its numbers; every rank then holds its own part of
each tensor against the same part of the reference, so a difference is found on the rank that has it. What fp32 misses
by rounding alone (conditioning.py) is compared in fp64 too, and has to be equal there.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.errors import NumericalStop
from paceline.run.assemble import Assembled, assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.process.world import World
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof, FirstDifference, Rounding
from paceline.spec.task import Task
from paceline.task.data.protocol import Source
from paceline.task.optimizer.schedule import learning_rate
from paceline.verify.compare.asked import Asked
from paceline.verify.compare.diagnosis import Traits, diagnose, told, traits_of
from paceline.verify.compare.difference import Difference, MeasuredHere, scaled, together
from paceline.verify.compare.measures import measured_numbers, measured_samples, measured_tensors, measured_turns
from paceline.verify.compare.routing import measured_loads, measured_routing
from paceline.verify.compare.tolerance import QUANTITIES, larger
from paceline.verify.process.quick import told_by_first
from paceline.verify.reference.passes import with_own_model
from paceline.verify.reference.steps import ReferenceStep, reference_steps
from paceline.verify.rounding.conditioning import Again, Move, beyond_rounding, computed_again, settled, steps_apart


@dataclass(frozen=True)
class Reference:
    """What one device computes: its weights and buffers at the start, traits of the model, and every step's numbers."""

    initial: dict[str, torch.Tensor]
    traits: Traits
    steps: list[ReferenceStep]


def compare(
    task: Task,
    plan: Plan,
    world: World,
    source: Source,
    items_per_sample: int,
    steps: int,
    kept: dict[object, Reference] | None = None,
    *,
    plain: bool = False,
) -> CheckProof:
    """Return how some steps of the layout stand to one device's. It is the same on every rank.

    `kept` holds references of the same task that were computed before, and is added to: layouts that read a batch in
    the same parts have the same reference. `plain` has the reference compute attention plainly too, without the kernel
    that both would share.
    """
    asked = Asked(task, plan, source, items_per_sample, steps, plain)
    known: dict[object, Reference] = {} if kept is None else kept

    def exact() -> CheckProof:
        return settled(*_compared(asked.in_format("fp64"), world, known), exact)

    return settled(*_compared(asked, world, known), exact)


def _compared(asked: Asked, world: World, kept: dict[object, Reference]) -> tuple[CheckProof, Rounding | None]:
    """Return what a comparison in the plan's own precision finds, and what rounding explains of it."""
    began = time.perf_counter()
    plan = asked.plan
    reference = _reference(asked, kept) if world.is_first else None
    again = None if reference is None else _again(asked, reference)
    known = told_by_first(world, reference and _without_moments(reference))
    task = with_own_model(clipped(asked.task, _clip_norms(known.steps[0])))
    built = assemble(task, plan, world, asked.source, asked.items_per_sample)
    measured = [measured_tensors("initial", _state(built.model), known.initial, 0, plan.layout)]
    ended: list[Difference] = []
    compared = asked.steps
    for step, expected in enumerate(known.steps, 1):
        try:
            measured += _step(built, asked, world, step, expected, known.initial)
        except NumericalStop:
            if is_finite(expected):
                ended = [overflow(expected, step)]
            elif step == 1:
                raise  # of the task, whatever the layout
            else:
                compared = step - 1  # one device ends there too
            break
    found = together(measured, world) + ended
    worst = dict.fromkeys((name for name in QUANTITIES if name != "whole batch"), 0.0)
    for difference in found:
        worst[difference.quantity] = larger(worst[difference.quantity], difference.relative)
    wrong, rounding = beyond_rounding(found, plan.precision, again, world)
    first = first_difference(wrong, found, plan, known.traits)
    seconds = time.perf_counter() - began
    return CheckProof(first is None, plan.precision, compared, seconds, worst, first), rounding


def _reference(asked: Asked, kept: dict[object, Reference]) -> Reference:
    """Return what one device computes, from `kept` where it is there."""
    plan = asked.plan
    cut = (plan.batch_samples, plan.layout.data_degree, plan.accumulation, plan.rows)
    key = (plan.precision, asked.steps, *cut, asked.plain)
    if key not in kept:
        kept[key] = _computed(asked, asked.model())
    return kept[key]


def _computed(asked: Asked, model: nn.Module, clip_norms: Sequence[Mapping[str, float]] = ()) -> Reference:
    """Return what one device computes with a model: all steps, or those whose norms to clip at are given."""
    traits = traits_of(model)
    initial = {name: tensor.detach().clone() for name, tensor in _state(model).items()}
    given = (asked.task, asked.plan, asked.source, asked.items_per_sample, asked.steps, model)
    return Reference(initial, traits, reference_steps(*given, clip_norms=clip_norms))


def _without_moments(reference: Reference) -> Reference:
    """Return what of a reference is compared: steps say nothing of the optimizer's state but by the next one."""
    return dataclasses.replace(reference, steps=[dataclasses.replace(step, moments={}) for step in reference.steps])


def _again(asked: Asked, reference: Reference) -> Again:
    """Return how one device computes the same again, clipped as the reference was: the layout has its norms too."""
    clip_norms = [_clip_norms(step) for step in reference.steps]

    def computed(made: int, move: Move | None) -> Reference:
        return _computed(asked, asked.model(move), clip_norms[:made])

    return computed_again(computed, _apart, asked.narrowest)


def _apart(ours: Reference, known: Reference) -> Iterator[Difference]:
    for step, (one, other) in enumerate(zip(ours.steps, known.steps, strict=True), 1):
        yield from steps_apart(one, other, (ours.initial, known.initial), step)


def first_difference(
    wrong: list[Difference], found: list[Difference], plan: Plan, traits: Traits
) -> FirstDifference | None:
    """Return the first of the differences that are wrong, with what it usually comes from, or None."""
    if not wrong:
        return None
    first = wrong[0]
    at_once = [d for d in wrong if d.step == first.step]
    compared = sum(d.quantity == "gradients" and d.step == first.step for d in found)
    return told(first, at_once, diagnose(at_once, compared, plan, traits))


def _step(
    built: Assembled,
    asked: Asked,
    world: World,
    step: int,
    expected: ReferenceStep,
    initial: dict[str, torch.Tensor],
) -> list[MeasuredHere]:
    """Run one step of the layout and return all that this rank measures of it, in order of cause."""
    task, plan = asked.task, asked.plan
    held: dict[str, torch.Tensor] = {}

    def observe(correction: float) -> None:
        held.update({n: scaled(p.grad, correction) for n, p in built.model.named_parameters() if p.grad is not None})

    built.stepper.observe = observe
    if step > 1:  # the first step has what `assemble` made of the task
        built.stepper.clip_norm = expected.clip_norm
        for turn in built.stepper.turns if expected.turns else ():
            turn.clip_norm = _clip_norms(expected).get(turn.turn.name)
    stream = BatchStream(asked.source, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    first = (step - 1) * plan.batch_samples
    batch = stream.at(first)
    read = [(micro.position, micro.ids.tolist()) for micro in batch.micro_batches if micro.counts]
    lr = learning_rate(task.schedule, task.optimizer.lr, step, asked.steps, 0, 1)
    stats = built.stepper.step(batch, lr)
    weight, loss, norm = (
        measured_numbers({name: getattr(stats, name)}, {name: getattr(expected, name)}, step)
        for name in ("weight", "loss", "grad_norm")
    )
    weights, buffers = dict(built.model.named_parameters()), dict(built.model.named_buffers())
    return [
        measured_samples(read, expected.ids, first, step, plan.layout),
        weight,
        *measured_loads(stats.router, expected.router, step, plan.layout),
        loss,
        *measured_turns(stats.turns, expected.turns, step, "loss"),
        *measured_routing(stats.router, expected.routing, step),
        measured_tensors("gradients", held, expected.gradients, step, plan.layout),
        norm,
        *measured_turns(stats.turns, expected.turns, step, "grad_norm"),
        measured_tensors("weights", weights, expected.weights, step, plan.layout, initial),
        measured_tensors("buffers", buffers, expected.buffers, step, plan.layout, initial),
    ]


def is_finite(step: ReferenceStep) -> bool:
    """Return whether one device's step has numbers."""
    return math.isfinite(step.loss + step.grad_norm)


def overflow(expected: ReferenceStep, step: int) -> Difference:
    """Return the difference of a step that is no number in the layout, and is one on one device."""
    return Difference("grad_norm", "grad_norm", step, 0, math.nan, math.nan, math.nan, expected.grad_norm)


def clipped(task: Task, clip_norms: Mapping[str, float]) -> Task:
    """Return the task with other norms above which gradients are scaled down, by turn; "" is the optimizer's."""
    turns = tuple(dataclasses.replace(turn, clip_norm=clip_norms.get(turn.name)) for turn in task.turns)
    optimizer = dataclasses.replace(task.optimizer, clip_norm=clip_norms[""])
    return dataclasses.replace(task, optimizer=optimizer, turns=turns)


def _clip_norms(step: ReferenceStep) -> dict[str, float]:
    return {"": step.clip_norm, **{name: turn.clip_norm for name, turn in step.turns.items()}}


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
