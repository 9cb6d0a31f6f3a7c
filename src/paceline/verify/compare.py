"""Compare a layout with the reference, step by step and tensor by tensor, inside a world of ranks.

Every rank calls `compare`. Rank 0 computes the reference and shares its numbers; every rank then holds its own part of
each tensor against the same part of the reference, so a difference is found on the rank that has it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.plan.plan import Plan
from paceline.run.assemble import Assembled, assemble
from paceline.run.loader import BatchStream
from paceline.run.precision import MASTER_DTYPES
from paceline.run.schedule import learning_rate
from paceline.run.world import World
from paceline.task.data.source import Source
from paceline.task.task import Task
from paceline.verify.reference import ReferenceStep, reference_model, reference_steps
from paceline.verify.tolerance import FLOOR, QUANTITIES, tolerance


@dataclass(frozen=True)
class Difference:
    """How far one tensor or number is from the reference, on the rank where it is farthest."""

    quantity: str
    name: str
    step: int
    rank: int
    relative: float
    ratio: float  # size of ours over size of the reference's; an axis degree here means a scale bug
    ours: float  # the element that differs most
    reference: float


def compare(task: Task, plan: Plan, world: World, source: Source, items_per_sample: int, steps: int) -> dict[str, Any]:
    """Return {equal, dtype, seconds, differences: {quantity: largest}, first_difference}; the same on every rank."""
    began = time.perf_counter()
    model = reference_model(task, source, items_per_sample, MASTER_DTYPES[plan.precision])
    reference: list[ReferenceStep] = []
    if world.is_first:
        reference = reference_steps(task, plan, source, items_per_sample, steps, model)
    built = assemble(task, plan, world, source, items_per_sample)
    found: list[Difference] = []
    for step in range(1, steps + 1):
        expected = _shared(reference[step - 1] if world.is_first else None, world)
        found += _step(built, task, plan, world, source, step, steps, expected)
    worst = dict.fromkeys(QUANTITIES, 0.0)
    for difference in found:
        worst[difference.quantity] = _larger(worst[difference.quantity], difference.relative)
    wrong = [d for d in found if not d.relative <= tolerance(d.quantity, plan.precision)]
    return {
        "equal": not wrong,
        "dtype": plan.precision,
        "steps": steps,
        "seconds": time.perf_counter() - began,
        "differences": worst,
        "first_difference": describe(wrong[0], plan) if wrong else None,
    }


def _step(
    built: Assembled,
    task: Task,
    plan: Plan,
    world: World,
    source: Source,
    step: int,
    steps: int,
    expected: ReferenceStep,
) -> list[Difference]:
    """Run one step of the layout and return all its differences, worst rank first for each, in order of cause."""
    gradients: list[Difference] = []

    def observe(correction: float) -> None:
        held = {n: p.grad * correction for n, p in built.model.named_parameters() if p.grad is not None}
        gradients.extend(_differences("gradients", held, expected.gradients, step, world))

    built.stepper.observe = observe
    stream = BatchStream(source, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    lr = learning_rate(task.schedule, task.optimizer.lr, step, steps, 0, 1)
    stats = built.stepper.step(stream.at((step - 1) * plan.batch_samples), lr)
    scalars = [
        _scalar("loss", stats.loss, expected.loss, step),
        _scalar("weight", stats.weight, expected.weight, step),
    ]
    norm = _scalar("grad_norm", stats.grad_norm, expected.grad_norm, step)
    weights = dict(built.model.named_parameters())
    buffers = dict(built.model.named_buffers())
    return [
        *scalars,
        *gradients,
        norm,
        *_differences("weights", weights, expected.weights, step, world),
        *_differences("buffers", buffers, expected.buffers, step, world),
    ]


def _differences(
    quantity: str, ours: dict[str, Any], reference: dict[str, torch.Tensor], step: int, world: World
) -> list[Difference]:
    """Return one Difference per tensor, from the rank where it is largest."""
    total = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in reference.values()))
    local = []
    for name, expected in reference.items():
        if name not in ours:
            local.append((math.inf, 0.0, math.nan, float(expected.abs().max())))
            continue
        mine, part = _parts(ours[name].detach(), expected)
        local.append(_measure(mine.double(), part.double(), FLOOR * total))
    extra = [name for name in ours if name not in reference]
    local += [(math.inf, math.inf, math.nan, math.nan)] * len(extra)
    ranks = world.gather(local)
    found = []
    for index, name in enumerate([*reference, *extra]):
        rank = max(range(world.size), key=lambda r: _order(ranks[r][index][0]))
        relative, ratio, value, expected_value = ranks[rank][index]
        found.append(Difference(quantity, name, step, rank, relative, ratio, value, expected_value))
    return found


def _parts(ours: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a tensor and the same part of the reference."""
    if not isinstance(ours, DTensor):
        return ours, reference
    spread = distribute_tensor(reference.to(ours.device), ours.device_mesh, ours.placements, src_data_rank=None)
    return ours.to_local(), spread.to_local()


def _measure(ours: torch.Tensor, reference: torch.Tensor, floor: float) -> tuple[float, float, float, float]:
    if ours.shape != reference.shape:
        return math.inf, math.nan, math.nan, math.nan
    if not ours.numel():
        return 0.0, 1.0, 0.0, 0.0
    difference = (ours - reference).flatten()
    size = float(reference.norm())
    at = int(difference.abs().argmax())
    relative = float(difference.norm()) / max(size, floor, 1e-300)
    ratio = float(ours.norm()) / size if size else math.nan
    return relative, ratio, float(ours.flatten()[at]), float(reference.flatten()[at])


def _scalar(quantity: str, ours: float, reference: float, step: int) -> Difference:
    relative = abs(ours - reference) / max(abs(reference), 1e-300)
    return Difference(
        quantity, quantity, step, 0, relative, ours / reference if reference else math.nan, ours, reference
    )


def _shared(step: ReferenceStep | None, world: World) -> ReferenceStep:
    """Return rank 0's reference step on every rank."""
    box: list[Any] = [step]
    if world.size > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _larger(a: float, b: float) -> float:
    return a if _order(a) >= _order(b) else b


def describe(difference: Difference, plan: Plan) -> dict[str, Any]:
    """Return a difference as plain data, with a likely cause."""
    return {**vars(difference), "likely": _likely(difference, plan)}


def _likely(difference: Difference, plan: Plan) -> str:
    """Return the family of mistakes that such a difference usually comes from."""
    if difference.quantity == "buffers":
        return "a buffer depends on each rank's own part of the batch, as BatchNorm statistics do"
    factors: dict[str, int] = {axis: degree for axis, degree in plan.layout.mesh_shape.items() if degree > 1}
    factors["accumulation"] = plan.accumulation
    for name, degree in factors.items():
        for factor in (degree, 1 / degree):
            if degree > 1 and abs(difference.ratio / factor - 1) < 0.02:
                return f"scale: the ratio {difference.ratio:.4g} is the {name} degree {degree} or its inverse"
    if difference.quantity in ("weights", "gradients") and abs(difference.ratio - 1) < 0.5:
        return "normalisation or masking: sizes are close and values are not; are all ranks' items weighted alike?"
    return "unknown"
