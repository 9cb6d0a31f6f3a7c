"""The reference: the same steps on one device, written plainly with torch alone.

It shares the model, the objective, the sample order, the seed of a micro-batch and the learning rate with the run, and
nothing else: no loader, no sharding, no accumulation scheme, no loss scaling.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.plan.layout import rows_of
from paceline.plan.plan import Plan
from paceline.run.precision import MASTER_DTYPES, cast_floats, cast_model
from paceline.run.rng import seed_at
from paceline.run.schedule import learning_rate
from paceline.task.coupling import is_coupled
from paceline.task.data.order import sample_ids
from paceline.task.data.source import Source
from paceline.task.models.build import build_model
from paceline.task.objective import resolve_objective
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


def reference_model(task: Task, source: Source, items_per_sample: int, dtype: torch.dtype) -> nn.Module:
    """Return the task's model with its initial weights on the CPU."""
    model = copy.deepcopy(task.model) if isinstance(task.model, nn.Module) else task.model
    return cast_model(build_model(model, source.vocab or 0, items_per_sample, task.seed), dtype)


def masks_follow_cut(task: Task, plan: Plan, source: Source, model: nn.Module) -> bool:
    """Return whether dropout masks of the plan are rightly others than those of one device, and so no part of a proof.

    Ranks that share a row draw masks for their own tokens, where one device draws for whole rows; ranks of a coupled
    batch draw for their own rows, where one device draws for all.
    """
    return plan.layout.cp > 1 or is_coupled(model, resolve_objective(task.objective, source.unit))


def stop_dropout(model: nn.Module) -> None:
    """Set the probability of every dropout layer to zero."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def reference_steps(
    task: Task, plan: Plan, source: Source, items_per_sample: int, steps: int, model: nn.Module
) -> list[ReferenceStep]:
    """Run `steps` steps of the task on one device and return their numbers.

    The rows of a batch are read in the micro-batches of `plan`, one after the other, so that a model with dropout sees
    the masks that belong to those rows; a batch whose rows see each other is read whole.
    """
    objective = resolve_objective(task.objective, source.unit)
    optimizers = plain_optimizers(task.optimizer, model)
    whole = is_coupled(model, objective)
    results = []
    for step in range(1, steps + 1):
        model.zero_grad(set_to_none=True)
        losses, weights = [], []
        with counted_choices(model) as router:
            for position, data in _micro_batches(task, plan, source, step, whole):
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
        clip_norm = clip_norm_of(task.optimizer, float(norm), step)
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), clip_norm)
        for optimizer, scale in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(task.schedule, task.optimizer.lr, step, steps, 0, 1) * scale
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
            )
        )
    return results


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


def _micro_batches(task: Task, plan: Plan, source: Source, step: int, whole: bool) -> Iterator[tuple[int, Any]]:
    """Yield (position of the first row, data) of every micro-batch of a step, or of all, in the order of the rows."""
    positions = _positions(plan, step)
    if whole:
        yield int(positions[0]), source.read(_ids(task, source, positions), positions)
        return
    for data_rank in range(plan.layout.data_degree):
        rows = rows_of(plan.batch_samples, plan.layout.data_degree, data_rank)
        for part in range(plan.accumulation):
            cut = rows[len(rows) * part // plan.accumulation : len(rows) * (part + 1) // plan.accumulation]
            if len(cut):
                at = positions[cut.start : cut.stop]
                yield int(at[0]), source.read(_ids(task, source, at), at)
