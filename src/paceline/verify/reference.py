"""The reference: the same steps on one device, written plainly with torch alone.

It shares the model, the objective, the sample order, the random numbers of a sample and the learning rate with the
run, and nothing else: no loader, no sharding, no accumulation scheme, no loss scaling.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.plan.layout import rows_of
from paceline.plan.plan import Plan
from paceline.run.precision import MASTER_DTYPES, cast_floats, cast_model
from paceline.run.randomness.again import draw_again
from paceline.run.randomness.mode import SampleRandomness
from paceline.run.randomness.shares import SampleRows
from paceline.run.randomness.survey import length_of, survey
from paceline.run.schedule import learning_rate
from paceline.task.coupling import is_coupled
from paceline.task.data.order import sample_ids
from paceline.task.data.source import Source
from paceline.task.models.build import build_model
from paceline.task.objective import Objective, resolve_objective
from paceline.task.task import OptimizerSpec, Task
from paceline.verify.plain_optimizer import plain_optimizers
from paceline.verify.router import counted_choices, move_biases


@dataclass(frozen=True)
class ReferenceStep:
    """One step's numbers on a single device; tensors are on the CPU, by parameter name."""

    loss: float
    weight: float
    grad_norm: float
    clip_norm: float  # the norm above which this step's gradients were scaled down; 0 where the task does not clip
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    ids: list[int]
    router: dict[str, torch.Tensor]  # tokens per expert, by router; empty for a model without experts
    moments: dict[str, torch.Tensor]  # the optimizer's state after the update, by `PARAMETER.KEY`


def reference_model(task: Task, source: Source, items_per_sample: int, dtype: torch.dtype) -> nn.Module:
    """Return the task's model with its initial weights on the CPU."""
    model = with_own_model(task).model
    return cast_model(build_model(model, source.vocab or 0, items_per_sample, task.seed), dtype)


def with_own_model(task: Task) -> Task:
    """Return the task with a copy of its model where that is an object, which is laid out and trained in place."""
    return dataclasses.replace(task, model=copy.deepcopy(task.model)) if isinstance(task.model, nn.Module) else task


def reference_randomness(
    task: Task, plan: Plan, source: Source, model: nn.Module, objective: Objective, dtype: torch.dtype
) -> SampleRandomness:
    """Return the random numbers of the task's samples for a model of `dtype` on the CPU; its modules draw them."""
    device = torch.device("cpu")
    _, example = next(micro_batches(task, plan, source, 1, whole=False))
    looked = survey(model, objective, cast_floats(example, dtype), device)
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
    clip_norms: Sequence[float] = (),
) -> list[ReferenceStep]:
    """Run `steps` steps of the task on one device and return their numbers.

    The rows of a batch are read in the micro-batches of `plan`, one after the other; a batch whose rows see each other
    is read whole. So is that of a model which draws random numbers: they belong to the samples, whatever else is read.

    With `rate`, the learning rate of a step, gradients are clipped as the task says. `last` is the plan whose
    micro-batches the last step reads, where that is another. With `clip_norms`, those of so many steps, these are the
    norms above which gradients are scaled down, and no further steps are run.
    """
    objective = resolve_objective(task.objective, source.unit)
    optimizers = plain_optimizers(task.optimizer, model)
    dtype = MASTER_DTYPES[plan.precision]
    randomness = reference_randomness(task, plan, source, model, objective, dtype)
    whole = is_coupled(model, objective) or bool(randomness.survey.patterns)
    results = []
    for step in range(1, (len(clip_norms) or steps) + 1):
        model.zero_grad(set_to_none=True)
        losses, weights = [], []
        with counted_choices(model) as router:
            cut = last if last is not None and step == steps else plan
            for positions, data in micro_batches(task, cut, source, step, whole):
                with randomness.during(SampleRows(positions, step, length_of(data))):
                    loss_sum, weight = objective(model, cast_floats(data, dtype))
                loss_sum.backward()
                losses.append(float(loss_sum.detach()))
                weights.append(float(weight))
        total = sum(weights)
        trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
        for parameter in trained.values():
            assert parameter.grad is not None
            parameter.grad /= total
        gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        norm = torch.linalg.vector_norm(torch.stack([g.norm(dtype=torch.float64) for g in gradients.values()]))
        clip_norm = task.optimizer.clip_norm if rate else clip_norm_of(task.optimizer, float(norm), step)
        clip_norm = clip_norms[step - 1] if clip_norms else clip_norm
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), clip_norm)
        lr = rate(step) if rate else learning_rate(task.schedule, task.optimizer.lr, step, steps, 0, 1)
        for optimizer, scale in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            optimizer.step()
        move_biases(model, router)
        results.append(
            ReferenceStep(
                loss=sum(losses) / total,
                weight=total,
                grad_norm=float(norm),
                clip_norm=clip_norm,
                gradients=gradients,
                weights={name: p.detach().clone() for name, p in model.named_parameters()},
                buffers={name: b.detach().clone() for name, b in model.named_buffers()},
                ids=_ids(task, source, _positions(plan, step)).tolist(),
                router=router,
                moments=moments_of(model, *(optimizer for optimizer, _ in optimizers)),
            )
        )
    return results


def moments_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of the tensors that optimizers keep for the parameters of a model, by `PARAMETER.KEY`."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, parameter in model.named_parameters()
        for optimizer in optimizers
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def clip_norm_of(spec: OptimizerSpec, grad_norm: float, step: int) -> float:
    """Return the largest norm that a step's gradients keep: half of theirs, and in every second step twice as much.

    Thresholds far from the norms of a twin would say nothing of clipping, or nothing of steps that are not clipped.
    """
    if not spec.clip_norm or not 0 < grad_norm < math.inf:
        return spec.clip_norm
    return grad_norm * (2.0 if step % 2 == 0 else 0.5)


def _positions(plan: Plan, step: int) -> np.ndarray:
    """Return the positions of a step's samples, int64 [batch]."""
    return np.arange((step - 1) * plan.batch_samples, step * plan.batch_samples, dtype=np.int64)


def _ids(task: Task, source: Source, positions: np.ndarray) -> np.ndarray:
    return sample_ids(task.seed, positions, source.samples)


def micro_batches(task: Task, plan: Plan, source: Source, step: int, whole: bool) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield (positions of the rows, data) of every micro-batch of a step, or of all, in the order of the rows."""
    positions = _positions(plan, step)
    if whole:
        yield positions, source.read(_ids(task, source, positions), positions)
        return
    for data_rank in range(plan.layout.data_degree):
        rows = rows_of(plan.batch_samples, plan.layout.data_degree, data_rank)
        for part in range(plan.accumulation):
            cut = rows[len(rows) * part // plan.accumulation : len(rows) * (part + 1) // plan.accumulation]
            if len(cut):
                at = positions[cut.start : cut.stop]
                yield at, source.read(_ids(task, source, at), at)
