"""The reference: the same steps on one device, written plainly with torch alone.

It shares the model, the objective, the sample order, the random numbers of a sample and the learning rate with the
run, and nothing else: no loader, no sharding, no accumulation scheme, no loss scaling.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.run.numerics.precision import MASTER_DTYPES, cast_floats, cast_model
from paceline.run.numerics.randomness.again import draw_again
from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.numerics.randomness.survey import length_of, survey_all
from paceline.spec.plan import Plan
from paceline.spec.steps.turns import main_turn
from paceline.spec.task import GroupSpec, Task
from paceline.task.coupling import is_coupled
from paceline.task.data.order.chosen import ONE, start_of
from paceline.task.data.order.of_source import ids_at
from paceline.task.data.protocol import Source
from paceline.task.models.build import build_model
from paceline.task.models.copied import copied
from paceline.task.objective import Objective
from paceline.task.optimizer.schedule import learning_rate
from paceline.task.turns import Turn, turns_of
from paceline.verify.compare.difference import wide
from paceline.verify.reference.noise_scale import NoiseScale
from paceline.verify.reference.plain_optimizer import first_match, plain_optimizers
from paceline.verify.reference.plain_selection import Selected, selected
from paceline.verify.reference.router import counted_choices, move_biases


@dataclass(frozen=True)
class ReferenceTurn:
    """The numbers of one objective in a step."""

    loss: float
    weight: float
    grad_norm: float
    clip_norm: float  # the norm above which its gradients were scaled down; 0 where the task does not clip
    gradients: dict[str, torch.Tensor]  # of the parameters that it trains, before they were scaled down


@dataclass(frozen=True)
class ReferenceStep:
    """One step's numbers on a single device; tensors are on the CPU, by parameter name."""

    loss: float
    weight: float
    grad_norm: float
    clip_norm: float  # the norm above which this step's gradients were scaled down; 0 where the task does not clip
    turns: dict[str, ReferenceTurn]  # by name, in their order; empty for a task of one objective
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    ids: list[int]  # of all samples that the step read
    router: dict[str, torch.Tensor]  # tokens per expert, by router; empty for a model without experts
    moments: dict[str, torch.Tensor]  # the optimizer's state after the update, by `PARAMETER.KEY`
    selected: Selected | None = None  # where a step trains on some of what it read


def reference_model(task: Task, source: Source, items_per_sample: int, dtype: torch.dtype) -> nn.Module:
    """Return the task's model with its initial weights on the CPU."""
    model = with_own_model(task).model
    built = build_model(model, source.vocab or 0, items_per_sample, task.seed, adaptation=task.adaptation)
    return cast_model(built, dtype)


def with_own_model(task: Task) -> Task:
    """Return the task with a copy of its model where that is an object, which is laid out and trained in place."""
    return dataclasses.replace(task, model=copied(task.model)) if isinstance(task.model, nn.Module) else task


def reference_randomness(
    task: Task, plan: Plan, source: Source, model: nn.Module, objectives: Sequence[Objective], dtype: torch.dtype
) -> SampleRandomness:
    """Return the random numbers of the task's samples for a model of `dtype` on the CPU; its modules draw them."""
    device = torch.device("cpu")
    _, example = next(micro_batches(task, plan, source, 1, whole=False))
    looked = survey_all(model, objectives, cast_floats(example, dtype), device)
    randomness = SampleRandomness(task.seed, device, looked, strict=False)
    draw_again(model, randomness)
    return randomness


def reference_steps(
    task: Task,
    plan: Plan,
    source: Source,
    items_per_sample: int,
    steps: int,
    model: nn.Module,
    *,
    rate: Callable[[int], float] | None = None,
    last: Plan | None = None,
    sizes: Sequence[int] = (),
    clip_norms: Sequence[Mapping[str, float]] = (),
    noise: NoiseScale | None = None,
    selects: bool = False,
) -> list[ReferenceStep]:
    """Run `steps` steps of the task on one device and return their numbers.

    The rows of a batch are read in the micro-batches of `plan`, one after the other; a batch whose rows see each other
    is read whole. So is that of a model which draws random numbers and takes any number of rows: the numbers belong to
    the samples, whatever else is read.

    With `rate`, the learning rate of a step, gradients are clipped and groups of parameters are left as they are in
    the steps in which the task says so; without it all parameters are trained. `last` is the plan whose
    micro-batches the last step reads, where that is another, and `sizes` are the samples of every step, where they are
    not all the plan's. With `clip_norms`, by turn, those of so many steps,
    these are the norms above which gradients are scaled down, and no further steps are run. `noise` measures the steps
    and says how many samples the next one has; `sizes` are then its own, which grow. With `selects` a step trains on
    those of its samples that the task selects, one after the other.
    """
    turns = turns_of(task, source.unit)
    own = own_parameters(model, turns)
    optimizers = [plain_optimizers(task.optimizer, model, parameters) for parameters in own]
    dtype = MASTER_DTYPES[plan.precision]
    objectives = [turn.objective for turn in turns]
    randomness = reference_randomness(task, plan, source, model, objectives, dtype)
    coupled = any(is_coupled(model, objective) for objective in objectives)
    whole = coupled or randomness.survey.is_cut_freely
    names = {parameter: name for name, parameter in model.named_parameters()}
    results = []
    for step in range(1, (len(clip_norms) or steps) + 1):
        cut = last if last is not None and step == steps else plan
        lr = rate(step) if rate else learning_rate(task.schedule, task.optimizer.lr, step, steps, 0, 1)
        done: dict[str, ReferenceTurn] = {}
        main, small_norm = main_turn(task), 0.0
        if noise is not None and noise.small():
            trained = _in_step(task.optimizer.groups, model, own[main], step)
            positions = _positions(plan, step, sizes)[: noise.small()]
            first = [(positions, source.read(_ids(task, source, positions), positions))]
            small_norm = _norm_of(model, turns[main], first, trained, randomness, dtype, step)
        read_at = _positions(plan, step, sizes)
        chosen = _selected(task, plan, source, model, turns[main], read_at, dtype) if selects else None
        with counted_choices(model) as router:
            for turn, parameters, updates in zip(turns, own, optimizers, strict=True):
                if not turn.is_due(step):
                    continue
                read = micro_batches(task, cut, source, step, whole, sizes=sizes)
                if chosen is not None:
                    each = read_at[list(chosen.places)].reshape(-1, 1)
                    read = ((at, source.read(_ids(task, source, at), at)) for at in each)
                factors = chosen.weights if chosen is not None else ()
                loss, weight = backward(model, turn, read, randomness, dtype, step, factors)
                parameters = _in_step(task.optimizer.groups, model, parameters, step) if rate else parameters
                gradients = _only(model, parameters, weight, names)
                limit = task.optimizer.clip_norm if turn.clip_norm is None else turn.clip_norm
                norm = _norm(gradients.values())
                clip_norm = limit if rate else clip_norm_of(limit, norm, step)
                clip_norm = clip_norms[step - 1][turn.name] if clip_norms else clip_norm
                if clip_norm:
                    torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], clip_norm)
                update(updates, lr)
                done[turn.name] = ReferenceTurn(loss / weight, weight, norm, clip_norm, gradients)
        move_biases(model, router)
        if noise is not None:
            noise.after(noise.small(), small_norm, done[turns[main].name].grad_norm)
        told = done[turns[main].name]
        results.append(
            ReferenceStep(
                loss=told.loss,
                weight=told.weight,
                grad_norm=told.grad_norm,
                clip_norm=told.clip_norm,
                turns={name: numbers for name, numbers in done.items() if name},
                gradients={name: grad for numbers in done.values() for name, grad in numbers.gradients.items()},
                weights={name: p.detach().clone() for name, p in model.named_parameters()},
                buffers={name: b.detach().clone() for name, b in model.named_buffers()},
                ids=_ids(task, source, read_at).tolist(),
                router=router,
                moments=moments_of(model, *(optimizer for updates in optimizers for optimizer, _ in updates)),
                selected=chosen,
            )
        )
    return results


def own_parameters(model: nn.Module, turns: Sequence[Turn]) -> list[list[nn.Parameter]]:
    """Return the trained parameters of each turn."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.requires_grad:
            aliases.setdefault(weight, []).append(name)
    takes = {weight: first_match(turns, names) for weight, names in aliases.items()}
    return [[weight for weight, at in takes.items() if at == number] for number in range(len(turns))]


def _in_step(
    groups: Sequence[GroupSpec], model: nn.Module, parameters: list[nn.Parameter], step: int
) -> list[nn.Parameter]:
    """Return those of the parameters that are trained in a 1-based step."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)

    def is_trained(weight: nn.Parameter) -> bool:
        at = first_match(groups, names[weight])
        until, after = (groups[at].frozen_until, groups[at].frozen_after) if at >= 0 else (None, None)
        return not ((until is not None and step <= until.value) or (after is not None and step > after.value))

    return [weight for weight in parameters if is_trained(weight)]


def backward(
    model: nn.Module,
    turn: Turn,
    read: Iterable[tuple[np.ndarray, Any]],
    randomness: SampleRandomness,
    dtype: torch.dtype,
    step: int,
    factors: Sequence[float] = (),
) -> tuple[float, float]:
    """Run an objective forward and backward on a whole step; return the sums of losses and weights.

    The loss of each of the parts that are read counts as many times as `factors` say, where there are any.
    """
    model.zero_grad(set_to_none=True)
    losses, weights = [], []
    for number, (positions, data) in enumerate(read):
        with randomness.during(SampleRows(positions, turn.draws_as(step), length_of(data))):
            loss_sum, weight = turn.objective(model, cast_floats(data, dtype))
        loss_sum = loss_sum * factors[number] if factors else loss_sum
        loss_sum.backward()
        losses.append(float(loss_sum.detach()))
        weights.append(float(weight))
    return sum(losses), sum(weights)


def _selected(
    task: Task, plan: Plan, source: Source, model: nn.Module, turn: Turn, positions: np.ndarray, dtype: torch.dtype
) -> Selected:
    """Return which of the samples at these positions the task trains on, at the weights of the moment."""

    def score(at: np.ndarray) -> tuple[float, float]:
        loss, weight = turn.objective(model, cast_floats(source.read(_ids(task, source, at), at), dtype))
        return float(loss), float(weight)

    scores = [functools.partial(score, at) for at in positions.reshape(-1, 1)]
    start = start_of(task.seed, int(positions[0])) / ONE
    return selected(task.selection, plan.batch_samples, start, model, scores)


def _norm_of(
    model: nn.Module,
    turn: Turn,
    read: Iterable[tuple[np.ndarray, Any]],
    trained: Sequence[nn.Parameter],
    randomness: SampleRandomness,
    dtype: torch.dtype,
    step: int,
) -> float:
    """Return the norm of the mean gradient of these samples, and change nothing."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    _, weight = backward(model, turn, read, randomness, dtype, step)
    norm = _norm(parameter.grad for parameter in trained if parameter.grad is not None)
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return norm / weight


def _norm(gradients: Iterable[torch.Tensor]) -> float:
    """Return the norm of all gradients together."""
    norms = [wide(gradient).norm() for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _only(
    model: nn.Module, parameters: Iterable[nn.Parameter], weight: float, names: dict[nn.Parameter, str]
) -> dict[str, torch.Tensor]:
    """Divide the gradients of a turn's own parameters by the weight, drop all others, and return copies by name."""
    kept = {names[parameter]: parameter.grad for parameter in parameters if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    for parameter in parameters:
        if (gradient := kept.get(names[parameter])) is not None:
            parameter.grad = gradient.div_(weight)
    return {name: gradient.clone() for name, gradient in kept.items()}


def update(updates: Iterable[tuple[torch.optim.Optimizer, float]], lr: float) -> None:
    """Change the weights of optimizers, each at its own scale of the learning rate, by their gradients."""
    for optimizer, scale in updates:
        for group in optimizer.param_groups:
            group["lr"] = lr * scale
        optimizer.step()


def moments_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of the tensors that optimizers keep for the parameters of a model, by `PARAMETER.KEY`."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, parameter in model.named_parameters()
        for optimizer in optimizers
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def clip_norm_of(limit: float, grad_norm: float, step: int) -> float:
    """Return the largest norm that a step's gradients keep: half of theirs, and in every second step twice as much.

    Thresholds far from the norms of a twin would say nothing of clipping, or nothing of steps that are not clipped.
    """
    if not limit or not 0 < grad_norm < math.inf:
        return limit
    return grad_norm * (2.0 if step % 2 == 0 else 0.5)


def _positions(plan: Plan, step: int, sizes: Sequence[int] = ()) -> np.ndarray:
    """Return the positions of a step's samples, int64 [batch]; `sizes` are those of the steps, else they are equal."""
    each = sizes or (plan.batch_samples,) * step
    return np.arange(sum(each[: step - 1]), sum(each[:step]), dtype=np.int64)


def _ids(task: Task, source: Source, positions: np.ndarray) -> np.ndarray:
    return ids_at(source, task.seed, positions)


def micro_batches(
    task: Task,
    plan: Plan,
    source: Source,
    step: int,
    whole: bool,
    data_ranks: range | None = None,
    sizes: Sequence[int] = (),
) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield (positions of the rows, data) of every micro-batch of a step, or of all, in the order of the rows.

    With `data_ranks` only those are read that these ranks read.
    """
    positions = _positions(plan, step, sizes)
    if whole:
        yield positions, source.read(_ids(task, source, positions), positions)
        return
    for data_rank in data_ranks or range(plan.layout.data_degree):
        rows = plan.rows_of(data_rank, len(positions))
        for part in range(plan.accumulation):
            cut = rows[len(rows) * part // plan.accumulation : len(rows) * (part + 1) // plan.accumulation]
            if len(cut):
                at = positions[cut.start : cut.stop]
                yield at, source.read(_ids(task, source, at), at)
