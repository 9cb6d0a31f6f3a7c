"""The reference in low precision: one update on one device that makes the casts of a run, and how near is near enough.

What makes the casts is the run's own (run/numerics/precision.py), and is not proven here. Sums, scales and the update
are plain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.run.numerics.precision import COMPUTE_DTYPES, MASTER_DTYPES, scaler_for
from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.numerics.randomness.survey import length_of
from paceline.run.parallel.apply import apply_plan
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.spec.optimizers import rounds_inside
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec, Task
from paceline.spec.turns import main_turn
from paceline.task.coupling import is_coupled
from paceline.task.data.source import Source
from paceline.task.declared import is_routed
from paceline.task.models.blocks import find_blocks
from paceline.task.models.decoder import Decoder
from paceline.task.models.moe import routers
from paceline.task.models.sizes import is_named
from paceline.task.objective import BUILT_IN
from paceline.task.turns import Turn, turns_of
from paceline.verify.compare.diagnosis import traits_of
from paceline.verify.compare.difference import number_differences, tensor_differences, wide
from paceline.verify.compare.tolerance import tolerance
from paceline.verify.reference.plain_optimizer import plain_optimizers
from paceline.verify.reference.steps import micro_batches, own_parameters, reference_model, reference_randomness
from paceline.verify.rounding.conditioning import DRAWS, MARGIN, moved_by_one_ulp

MASTER = torch.float32  # what weights, gradients and sums are in, whatever the run's own tables say
HEADROOM = 8.0  # of the loss scale: ranks that add up in another order may overflow a little earlier
Numbers = dict[str, Any]  # loss and norm as floats, gradients and changes of weights by name
At = tuple[str, str]  # (quantity, name)


@dataclass(frozen=True)
class Expected:
    """What one device computes, how far a layout may be off, and which formats are one device's own too."""

    numbers: Numbers
    allowed: dict[At, float]  # empty where numbers say nothing
    scale: float  # of the loss
    loss_dtype: torch.dtype
    state_bits: dict[str, int]  # fewest of any parameter's optimizer state, by its key
    coupled: bool  # whether rows of a batch see each other

    def compares(self, quantity: str, name: str) -> bool:
        """Return whether a difference says anything: it has a bound, or one device has no such tensor."""
        is_extra = bool(self.allowed) and quantity in ("gradients", "weights") and name not in self.numbers[quantity]
        return (quantity, name) in self.allowed or is_extra

    def bound(self, quantity: str, name: str) -> float:
        """Return the largest relative difference that is none; of a tensor that one device lacks, hardly any."""
        return self.allowed.get((quantity, name), 1e-30)


def expected_of(task: Task, plan: Plan, source: Source, items_per_sample: int) -> Expected:
    """Return what one device computes of the first batch and how near a layout must come to it."""

    def computed(scale: float, move: int = 0) -> Numbers:
        model = reference_model(task, source, items_per_sample, MASTER)
        if move:
            moved_by_one_ulp(model, COMPUTE_DTYPES[plan.precision], seed=move)
        return _one_update(model, task, plan, source, items_per_sample, scale)

    model = reference_model(task, source, items_per_sample, MASTER)
    turns = turns_of(task, source.unit)
    coupled = any(is_coupled(model, turn.objective) for turn in turns)
    scaler = scaler_for(plan.precision)
    scale = scaler.scale if scaler else 1.0
    numbers = computed(scale)
    while scaler is not None and scale > scaler.smallest and not numbers["finite"]:
        scale /= 2
        numbers = computed(scale)
    if scaler is not None:
        scale = max(scaler.smallest, scale / HEADROOM)
        numbers = computed(scale)
    allowed = {}
    rounded = _rounded_apart(model, plan.layout)
    if rounded is not None:  # what comes after an update sees weights that were cast anew from sums in another order
        names = {parameter: name for name, parameter in model.named_parameters()}
        rounded = {*rounded, *(names[weight] for later in own_parameters(model, turns)[1:] for weight in later)}
    if rounded is not None and not coupled:
        allowed = _sums_alone(numbers)
        places = [at for at in allowed if at[1] in rounded or (rounded and at[0] == "grad_norm")]
        moved = _moved(numbers, [computed(scale, move) for move in range(1, DRAWS + 1)]) if places else {}
        allowed |= {at: max(allowed[at], MARGIN * moved[at]) for at in places}
    if rounds_inside(task.optimizer):  # the last digit of a gradient decides how its update rounds
        allowed = {at: most for at, most in allowed.items() if at[0] != "weights"}
    family = isinstance(task.model, ModelSpec) and is_named(task.model.name)
    built_in = (task.objective == "auto" or task.objective in BUILT_IN) and not task.turns
    loss_dtype = MASTER if family and built_in else numbers["loss_dtype"]
    return Expected(numbers, allowed, scale, loss_dtype, numbers["state_bits"], coupled)


def _rounded_apart(model: nn.Module, layout: Layout) -> Collection[str] | None:
    """Return the names of the numbers that a layout rounds at other places than one device, None if they say nothing.

    Data axes and a pipeline make the very products of one device. But a weight on two stages has its gradients added
    in fp32, which on one device come together in the compute format. Where a token near a tie may go to another expert
    a difference has no bound.
    """
    if layout.tp == layout.cp == layout.ep == 1:
        return traits_of(model).tied if layout.pp > 1 else ()
    if routers(model) or any(map(is_routed, model.modules())):
        return None
    return {"loss", "grad_norm", *(name for name, _ in model.named_parameters())}


def _sums_alone(numbers: Numbers) -> dict[At, float]:
    """Return the differences allowed to a layout that adds up the same products in fp32."""
    allowed = {at: tolerance(at[0], "fp32") for at in _places(numbers)}
    for name, coarse in numbers["stored"].items():
        allowed["weights", name] += coarse
    return allowed


def _moved(numbers: Numbers, others: list[Numbers]) -> dict[At, float]:
    """Return how far each quantity is from what it was in others, by the root of the mean square."""
    alone = World(0, 1, 0, torch.device("cpu"))
    squares = dict.fromkeys(_places(numbers), 0.0)
    for other in others:
        found = number_differences(
            {name: other[name] for name in ("loss", "grad_norm")},
            {name: numbers[name] for name in ("loss", "grad_norm")}, 1, alone,
        )  # fmt: skip
        for kind in ("gradients", "weights"):
            found += tensor_differences(kind, other[kind], numbers[kind], 1, alone, Layout())
        for difference in found:
            squares[difference.quantity, difference.name] += difference.relative**2 / len(others)
    return {at: math.sqrt(square) for at, square in squares.items()}


def _places(numbers: Numbers) -> list[At]:
    tensors = [(kind, name) for kind in ("gradients", "weights") for name in numbers[kind]]
    return [("loss", "loss"), ("grad_norm", "grad_norm"), *tensors]


def _one_update(
    model: nn.Module, task: Task, plan: Plan, source: Source, items_per_sample: int, scale: float
) -> Numbers:
    """Return loss, gradient norm, gradients and changes of weights of the first batch on one device, summed in fp32.

    The loss is scaled by powers of two, as in a run, which are taken out again exactly. `stored` says how far, relative
    to its change, a weight is off for being stored in fp32.
    """
    turns = turns_of(task, source.unit)
    objectives = [turn.objective for turn in turns]
    coupled = any(is_coupled(model, objective) for objective in objectives)
    randomness = reference_randomness(task, plan, source, model, objectives, MASTER_DTYPES[plan.precision])
    alone = dataclasses.replace(plan, layout=Layout(), recompute="none", offload="none", compile=False, stages=())
    if isinstance(model, Decoder):
        model.logits_elements = plan.logits_elements  # the head's gradient is rounded after each part of the logits
    own = own_parameters(model, turns)
    names = {parameter: name for name, parameter in model.named_parameters()}
    apply_plan(model, [block for _, block in find_blocks(model)], alone, None)
    down = scale / 2.0 ** round(math.log2(plan.batch_samples * items_per_sample))
    made = []
    for turn, parameters in zip(turns, own, strict=True):
        read = micro_batches(task, plan, source, 1, coupled)
        trained = {names[parameter]: parameter for parameter in parameters}
        made.append(_one_turn(model, turn, trained, task, read, randomness, down))
    main = made[main_turn(task)]
    joined = {key: {at: x for one in made for at, x in one[key].items()} for key in ("gradients", "weights", "stored")}
    bits = {key: min(one["state_bits"].get(key, 64) for one in made) for one in made for key in one["state_bits"]}
    return {"loss": main["loss"], "grad_norm": main["grad_norm"], **joined, "state_bits": bits,
            "finite": all(math.isfinite(one["grad_norm"]) for one in made),
            "loss_dtype": min((one["loss_dtype"] for one in made), key=lambda dtype: torch.finfo(dtype).bits),
            }  # fmt: skip


def _one_turn(
    model: nn.Module,
    turn: Turn,
    trained: dict[str, nn.Parameter],
    task: Task,
    read: Iterable[tuple[Any, Any]],
    randomness: SampleRandomness,
    down: float,
) -> Numbers:
    """Return the numbers of one objective, and update the parameters that are its own, which are `trained`."""
    losses, weights, dtypes = [], [], []
    model.zero_grad(set_to_none=True)
    for positions, data in read:
        with randomness.during(SampleRows(positions, turn.draws_as(1), length_of(data))):
            loss_sum, weight = turn.objective(model, data)
        (loss_sum * down).backward()
        randomness.rest()
        losses.append(float(loss_sum.detach()))
        weights.append(float(weight))
        dtypes.append(loss_sum.dtype)
    total = sum(weights)
    gradients = {name: p.grad / (total * down) for name, p in trained.items() if p.grad is not None}
    reached = {name: trained[name] for name in gradients}
    norm = math.sqrt(sum(float(wide(g).square().sum()) for g in gradients.values()))
    before = {name: p.detach().clone() for name, p in reached.items()}
    model.zero_grad(set_to_none=True)
    for name, parameter in reached.items():
        parameter.grad = gradients[name].clone()
    bits: dict[str, int] = {}
    for optimizer, factor in plain_optimizers(task.optimizer, model, trained.values()):
        for group in optimizer.param_groups:
            group["lr"] = task.optimizer.lr * factor
        optimizer.step()
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    bits[key] = min(bits.get(key, 64), torch.finfo(value.dtype).bits)
    updates = {name: p.detach() - before[name] for name, p in reached.items()}
    eps = torch.finfo(MASTER).eps
    stored = {name: eps * float(before[name].norm() / u.norm().clamp_min(1e-30)) for name, u in updates.items()}
    return {"loss": sum(losses) / total, "grad_norm": norm, "gradients": gradients, "weights": updates,
            "stored": stored, "state_bits": bits, "loss_dtype": dtypes[0]}  # fmt: skip
