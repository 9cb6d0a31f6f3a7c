"""Updates in low precision on one device: the casts of a run, and sums, scales and the update written plainly.

What makes the casts is the run's own (run/numerics/precision.py), and is not proven here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.run.assemble import hold_few_logits
from paceline.run.numerics.precision import COMPUTE_DTYPES, MASTER_DTYPES
from paceline.run.numerics.randomness.mode import SampleRandomness, Survey
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.numerics.randomness.survey import length_of
from paceline.run.parallel.apply import apply_plan
from paceline.run.parallel.data.uncut_parameters import stays_whole
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.steps.turns import main_turn
from paceline.spec.task import Task
from paceline.task.coupling import is_coupled
from paceline.task.data.protocol import Source
from paceline.task.models.blocks import find_blocks
from paceline.task.models.build import evaluating
from paceline.task.sums import back_through
from paceline.task.turns import Turn, turns_of
from paceline.verify.compare.difference import reach_of, wide
from paceline.verify.low.choices import HandedChoices, score_bits
from paceline.verify.low.wire import bits_of_values
from paceline.verify.reference.passes import counted, micro_batches, own_parameters, reference_randomness
from paceline.verify.reference.plain_optimizer import plain_optimizers
from paceline.verify.reference.router import counted_choices

MASTER = torch.float32  # what weights, gradients and sums are in, whatever the run's own tables say
PER_WEIGHT = ("gradients", "weights", "stored", "sum_bits")
Hyper = dict[str, Any]  # loss and norm as floats, gradients and changes of weights by name


def one_update(
    model: nn.Module,
    task: Task,
    plan: Plan,
    source: Source,
    items_per_sample: int,
    scale: float,
    handed: HandedChoices | None = None,
    step: int = 1,
    later: Sequence[Callable[[], None]] = (),
    looked: Survey | None = None,
) -> Hyper:
    """Return loss, gradient norm, gradients and changes of weights of a step's batch on one device, summed in fp32.

    The optimizer has no moments yet: changes of weights are those of a first update. `later` are called before the
    turns after the first, where they begin from other weights than the update before them has left. `looked` is what is
    known of the program's random numbers.

    The loss is scaled by powers of two, as in a run, which are taken out again exactly; `reach` is what it counts as at
    least where it is compared. `stored` says how far, relative to its change, a weight is off for being stored in fp32.
    With `handed` choices the scores that they stand against are told too, or None where the model has not asked for
    them.
    """
    one, own = prepared(model, task, plan, source, looked), own_parameters(model, turns_of(task, source.unit))
    names = {parameter: name for name, parameter in model.named_parameters()}
    down = scale / 2.0 ** round(math.log2(plan.batch_samples * items_per_sample))
    made, bits_of_scores = list[Hyper](), score_bits(model)
    main: Hyper = {}
    begin = iter((lambda: None, *later))
    with counted_choices(model) as router:
        for number, (turn, parameters) in enumerate(zip(one.turns, own, strict=True)):
            if turn.is_due(step):
                next(begin, lambda: None)()
                read = micro_batches(task, plan, source, step, one.coupled)
                trained = {names[parameter]: parameter for parameter in parameters}
                made.append(_one_turn(one, turn, trained, task, read, step, down, handed))
                main = made[-1] if number == main_turn(task) else main
    joined = {key: {at: x for one in made for at, x in one[key].items()} for key in PER_WEIGHT}
    bits = {key: min(one["state_bits"].get(key, 64) for one in made) for one in made for key in one["state_bits"]}
    return {"loss": main["loss"], "reach": main["reach"], "grad_norm": main["grad_norm"], **joined,
            "state_bits": bits, "router": router, "score_bits": bits_of_scores,
            "scores": handed.scores if handed is not None and handed.is_complete() else None,
            "finite": all(math.isfinite(one["grad_norm"]) for one in made),
            "loss_dtype": min((one["loss_dtype"] for one in made), key=lambda dtype: torch.finfo(dtype).bits),
            }  # fmt: skip


@dataclass(frozen=True)
class PreparedDevice:
    """A model that makes the casts of a plan on one device, and what its passes need."""

    model: nn.Module
    turns: Sequence[Turn]
    coupled: bool  # whether rows of a batch see each other
    randomness: SampleRandomness
    cast: Callable[[], AbstractContextManager[None]]  # within it gathered weights are one tensor for all their uses


def prepared(model: nn.Module, task: Task, plan: Plan, source: Source, looked: Survey | None = None) -> PreparedDevice:
    """Return the model with the casts of a plan, changed in place."""
    turns = turns_of(task, source.unit)
    objectives = [turn.objective for turn in turns]
    randomness = reference_randomness(task, plan, source, model, objectives, MASTER_DTYPES[plan.precision], looked)
    alone = dataclasses.replace(plan, layout=Layout(), recompute="none", offload="none", compile=False, stages=(),
                                rows=())  # fmt: skip
    # The head's gradient is rounded after each part of the logits.
    hold_few_logits(model, lambda: model, plan, turns, source, source.items_per_sample)
    gathered = gathered_weights(model) if plan.layout.is_sharded else []
    for weight in gathered:  # they are row after row, for which a convolution may have another kernel
        weight.data = weight.data.contiguous()
    coupled = any(is_coupled(model, objective) for objective in objectives)
    apply_plan(model, [block for _, block in find_blocks(model)], alone, None)
    cast = functools.partial(cast_once, model, gathered, COMPUTE_DTYPES[plan.precision])
    return PreparedDevice(model, turns, coupled, randomness, cast)


def one_evaluation(
    model: nn.Module,
    task: Task,
    plan: Plan,
    source: Source,
    step: int,
    handed: HandedChoices | None = None,
    looked: Survey | None = None,
) -> float:
    """Return the mean loss of a step's batch as an evaluation measures it, on one device.

    It is computed as when gradients follow: what casts otherwise without them would do so here too. But no weight wants
    any, since torch chooses other kernels for tensors that do (attention with a bias that is trained, as T5's).
    """
    one, turn = prepared(model, task, plan, source, looked), main_turn(task)
    model.requires_grad_(False)
    loss_total, items = 0.0, 0.0
    with evaluating(model):
        for positions, data in micro_batches(task, plan, source, step, one.coupled):
            rows = SampleRows(positions, 0, length_of(data))
            with one.randomness.during(rows), _chosen(handed, positions), one.cast():
                loss_sum, weight = one.turns[turn].objective(model, data)
            loss_total, items = loss_total + float(loss_sum.detach()), items + float(weight)
    return loss_total / items


def _chosen(handed: HandedChoices | None, positions: Iterable[int]) -> AbstractContextManager[None]:
    return contextlib.nullcontext() if handed is None else handed.chosen_for(positions)


def gathered_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that ranks gather in the compute format where they share the model's state."""
    return [weight for weight in model.parameters() if weight.is_floating_point() and not stays_whole(weight)]


@contextlib.contextmanager
def cast_once(model: nn.Module, weights: Collection[nn.Parameter], dtype: torch.dtype) -> Iterator[None]:
    """Have each of `weights` be one tensor of `dtype` for a whole forward pass, as one that is gathered is.

    The gradients of its uses come together in that tensor, and so in `dtype`. Elsewhere a unit that runs twice, or
    layers that an objective calls by themselves, cast anew at every call, and these gradients come together in fp32.
    """
    casts = {weight: weight.to(dtype) for weight in weights}
    tables = [module._parameters for module in model.modules()]
    places = [(table, name, weight) for table in tables for name, weight in table.items() if weight in casts]
    for table, name, weight in places:
        table[name] = casts[weight]  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, name, weight in places:
            table[name] = weight


def _one_turn(
    one: PreparedDevice,
    turn: Turn,
    trained: dict[str, nn.Parameter],
    task: Task,
    read: Iterable[tuple[Any, Any]],
    step: int,
    down: float,
    handed: HandedChoices | None,
) -> Hyper:
    """Return the numbers of one objective, and update the parameters that are its own, which are `trained`."""
    model, randomness = one.model, one.randomness
    losses, weights, dtypes = [], [], []
    model.zero_grad(set_to_none=True)
    for positions, data in read:
        rows = SampleRows(positions, turn.draws_as(step), length_of(data))
        with randomness.during(rows), _chosen(handed, positions), one.cast():
            loss_sum, weight = turn.objective(model, data)
        back_through(loss_sum * down, turn.objective)
        randomness.rest()
        losses.append(float(loss_sum.detach()))
        weights.append(float(weight))
        dtypes.append(loss_sum.dtype)
    total = counted(weights, step)
    sum_bits = {name: bits_of_values(p.grad) for name, p in trained.items() if p.grad is not None}
    gradients = {name: p.grad / (total * down) for name, p in trained.items() if p.grad is not None}
    reached = {name: trained[name] for name in gradients}
    norm = math.sqrt(sum(float(wide(g).square().sum()) for g in gradients.values()))
    before = {name: p.detach().clone() for name, p in reached.items()}
    reach = reach_of(norm, before.values())
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
    return {"loss": sum(losses) / total, "reach": reach, "grad_norm": norm, "gradients": gradients,
            "weights": updates, "stored": stored, "sum_bits": sum_bits, "state_bits": bits,
            "loss_dtype": dtypes[0]}  # fmt: skip
