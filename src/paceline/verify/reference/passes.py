"""What one device does of a step: reads samples, passes a model forward and backward, and changes its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from paceline.errors import NothingToLearn
from paceline.run.numerics.precision import cast_floats, cast_model
from paceline.run.numerics.randomness.again import draw_again
from paceline.run.numerics.randomness.mode import SampleRandomness, Survey
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.numerics.randomness.survey import length_of, survey_all
from paceline.spec.plan import Plan
from paceline.spec.steps.update import GroupSpec
from paceline.spec.task import Task
from paceline.task.data.order.of_source import ids_at
from paceline.task.data.protocol import Source
from paceline.task.models.build import build_model
from paceline.task.models.copied import copied
from paceline.task.models.held import buffers_kept
from paceline.task.objective import Objective
from paceline.task.sums import back_through
from paceline.task.turns import Turn
from paceline.verify.compare.difference import wide
from paceline.verify.reference.plain_documents import placed_plainly
from paceline.verify.reference.plain_optimizer import FACTOR, first_match


def reference_model(task: Task, source: Source, items_per_sample: int, dtype: torch.dtype) -> nn.Module:
    """Return the task's model with its initial weights on the CPU."""
    model = with_own_model(task).model
    built = build_model(model, source.vocab or 0, items_per_sample, task.seed, adaptation=task.adaptation)
    return cast_model(built, dtype)


def with_own_model(task: Task) -> Task:
    """Return the task with a copy of its model where that is an object, which is laid out and trained in place."""
    return dataclasses.replace(task, model=copied(task.model)) if isinstance(task.model, nn.Module) else task


def reference_randomness(
    task: Task,
    plan: Plan,
    source: Source,
    model: nn.Module,
    objectives: Sequence[Objective],
    dtype: torch.dtype,
    looked: Survey | None = None,
) -> SampleRandomness:
    """Return the random numbers of the task's samples for a model of `dtype` on the CPU; its modules draw them.

    `looked` is what was seen of another model of the same program, so that this one need not be looked at.
    """
    device = torch.device("cpu")
    if looked is None:
        _, example = next(micro_batches(task, plan, source, 1, whole=False))
        looked = survey_all(model, objectives, cast_floats(example, dtype), device)
    randomness = SampleRandomness(task.seed, device, looked, strict=False)
    draw_again(model, randomness)
    return randomness


def own_parameters(model: nn.Module, turns: Sequence[Turn]) -> list[list[nn.Parameter]]:
    """Return the trained parameters of each turn."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.requires_grad:
            aliases.setdefault(weight, []).append(name)
    takes = {weight: first_match(turns, names) for weight, names in aliases.items()}
    return [[weight for weight, at in takes.items() if at == number] for number in range(len(turns))]


def in_step(
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


def counted(weights: Sequence[float], step: int) -> float:
    """Return the sum of what micro-batches count; raise NothingToLearn where all of a step's samples count nothing."""
    if (total := sum(weights)) == 0:
        raise NothingToLearn(
            f"the samples that the proof reads for step {step} have no item to learn from",
            f"the objective's weights add up to zero over its {len(weights)} micro-batches, the first of the data's "
            "order, which are fewer than a step's",
            "check the labels: are all of them masked? Where few samples have any, prove on data where all have some",
        )
    return total


def backward(
    model: nn.Module,
    turn: Turn,
    read: Iterable[tuple[np.ndarray, object]],
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
            loss_sum, weight = turn.objective(model, placed_plainly(turn.objective, cast_floats(data, dtype)))
        loss_sum = loss_sum * factors[number] if factors else loss_sum
        back_through(loss_sum, turn.objective)
        losses.append(float(loss_sum.detach()))
        weights.append(float(weight))
    return sum(losses), counted(weights, step)


def norm_of(
    model: nn.Module,
    turn: Turn,
    read: Iterable[tuple[np.ndarray, object]],
    trained: Sequence[nn.Parameter],
    randomness: SampleRandomness,
    dtype: torch.dtype,
    step: int,
) -> float:
    """Return the norm of the mean gradient of these samples, and change nothing."""
    with buffers_kept(model):
        _, weight = backward(model, turn, read, randomness, dtype, step)
    norm = norm_together(parameter.grad for parameter in trained if parameter.grad is not None)
    model.zero_grad(set_to_none=True)
    return norm / weight


def norm_together(gradients: Iterable[torch.Tensor]) -> float:
    """Return the norm of all gradients together."""
    norms = [wide(gradient).norm() for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def mean_gradients(
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
            group["lr"] = lr * scale * group.get(FACTOR, 1.0)
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


def positions_of(plan: Plan, step: int, sizes: Sequence[int] = ()) -> np.ndarray:
    """Return the positions of a step's samples, int64 [batch]; `sizes` are those of the steps, else they are equal."""
    each = sizes or (plan.batch_samples,) * step
    return np.arange(sum(each[: step - 1]), sum(each[:step]), dtype=np.int64)


def ids_of(task: Task, source: Source, positions: np.ndarray) -> np.ndarray:
    return ids_at(source, task.seed, positions)


def micro_batches(
    task: Task,
    plan: Plan,
    source: Source,
    step: int,
    whole: bool,
    data_ranks: range | None = None,
    sizes: Sequence[int] = (),
) -> Iterator[tuple[np.ndarray, object]]:
    """Yield (positions of the rows, data) of every micro-batch of a step, or of all, in the order of the rows.

    With `data_ranks` only those are read that these ranks read.
    """
    positions = positions_of(plan, step, sizes)
    if whole:
        yield positions, source.read(ids_of(task, source, positions), positions)
        return
    for data_rank in data_ranks or range(plan.layout.data_degree):
        rows = plan.rows_of(data_rank, len(positions))
        for part in range(plan.accumulation):
            cut = rows[len(rows) * part // plan.accumulation : len(rows) * (part + 1) // plan.accumulation]
            if len(cut):
                at = positions[cut.start : cut.stop]
                yield at, source.read(ids_of(task, source, at), at)
