"""The reference: the same steps on one device, written plainly with torch alone.

It shares the model, the objective, the sample order, the seed of a micro-batch and the learning rate with the run, and
nothing else: no loader, no sharding, no accumulation scheme, no loss scaling.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.plan.layout import rows_of
from paceline.plan.plan import Plan
from paceline.run.precision import MASTER_DTYPES, cast_floats
from paceline.run.rng import seed_at
from paceline.run.schedule import learning_rate
from paceline.task.data.order import sample_ids
from paceline.task.data.source import Source
from paceline.task.models.build import build_model
from paceline.task.objective import resolve_objective
from paceline.task.task import OptimizerSpec, Task
from paceline.verify.router import counted_choices, move_biases


@dataclass(frozen=True)
class ReferenceStep:
    """One step's numbers on a single device; tensors are on the CPU, by parameter name."""

    loss: float
    weight: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    ids: list[int]
    router: dict[str, torch.Tensor]  # tokens per expert, by router; empty for a model without experts
    moments: dict[str, torch.Tensor]  # the optimizer's state after the update, by `PARAMETER.KEY`


def reference_model(task: Task, source: Source, items_per_sample: int, dtype: torch.dtype) -> nn.Module:
    """Return the task's model with its initial weights on the CPU."""
    model = copy.deepcopy(task.model) if isinstance(task.model, nn.Module) else task.model
    return build_model(model, source.vocab or 0, items_per_sample, task.seed).to(dtype=dtype).train()


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
) -> list[ReferenceStep]:
    """Run `steps` steps of the task on one device and return their numbers.

    The rows of a batch are read in the micro-batches of `plan`, one after the other, so that a model with dropout sees
    the masks that belong to those rows. `rate` gives the learning rate of a step instead of the task's schedule over
    these steps, and `last` is the plan whose micro-batches the last step reads, where that is another.
    """
    objective = resolve_objective(task.objective, source.unit)
    optimizer = _optimizer(task.optimizer, model)
    results = []
    for step in range(1, steps + 1):
        optimizer.zero_grad(set_to_none=True)
        losses, weights = [], []
        with counted_choices(model) as router:
            cut = last if last is not None and step == steps else plan
            for position, data in _micro_batches(task, cut, source, step):
                torch.manual_seed(seed_at(task.seed, position))
                loss_sum, weight = objective(model, cast_floats(data, MASTER_DTYPES[plan.precision]))
                loss_sum.backward()
                losses.append(float(loss_sum.detach()))
                weights.append(float(weight))
        total = sum(weights)
        trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
        for parameter in trained.values():
            assert parameter.grad is not None
            parameter.grad /= total
        gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients.values()]))
        if task.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), task.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(step) if rate else learning_rate(task.schedule, task.optimizer.lr, step, steps, 0, 1)
        optimizer.step()
        move_biases(model, router)
        results.append(
            ReferenceStep(
                loss=sum(losses) / total,
                weight=total,
                grad_norm=float(norm),
                gradients=gradients,
                weights={name: p.detach().clone() for name, p in model.named_parameters()},
                buffers={name: b.detach().clone() for name, b in model.named_buffers()},
                ids=_ids(task, source, _positions(plan, step)).tolist(),
                router=router,
                moments=moments_of(model, optimizer),
            )
        )
    return results


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of the tensors that an optimizer keeps for the parameters of a model, by `PARAMETER.KEY`."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _positions(plan: Plan, step: int) -> np.ndarray:
    """Return the positions of a step's samples, int64 [batch]."""
    return np.arange((step - 1) * plan.batch_samples, step * plan.batch_samples, dtype=np.int64)


def _ids(task: Task, source: Source, positions: np.ndarray) -> np.ndarray:
    return sample_ids(task.seed, positions, source.samples)


def _micro_batches(task: Task, plan: Plan, source: Source, step: int) -> Iterator[tuple[int, Any]]:
    """Yield (position of the first row, data) of every micro-batch of a step, in the order of the rows."""
    positions = _positions(plan, step)
    for data_rank in range(plan.layout.data_degree):
        rows = rows_of(plan.batch_samples, plan.layout.data_degree, data_rank)
        for part in range(plan.accumulation):
            cut = rows[len(rows) * part // plan.accumulation : len(rows) * (part + 1) // plan.accumulation]
            if len(cut):
                at = positions[cut.start : cut.stop]
                yield int(at[0]), source.read(_ids(task, source, at), at)


def _optimizer(spec: OptimizerSpec, model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if spec.name == "adamw":
        return torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, foreach=False)
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.beta1, foreach=False)
