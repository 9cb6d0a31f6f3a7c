"""Small tasks whose copies are kept in step, and what a plain loop makes of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from tests_shared import SEQ_LEN, PaddedText, decoder_task, plan_of, world_here
from torch.distributed.tensor import DTensor

from paceline.run.assemble import Assembled, assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.process.world import World
from paceline.spec.layout import Layout, rows_of
from paceline.spec.plan import Plan
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.sync import Sync
from paceline.spec.task import Task
from paceline.task.data.order.permutation import sample_ids
from paceline.task.objective import next_token
from paceline.verify.reference.passes import reference_model
from paceline.verify.reference.plain_optimizer import plain_optimizers

BATCH = 12  # rows, of which two copies read six each
SGD = OptimizerSpec(name="sgd", lr=0.3, clip_norm=0.0)


class EvenText(PaddedText):
    """Rows of which every label counts, so that copies weigh alike."""

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        rows = super().read(ids, positions)
        return {**rows, "labels": rows["labels"].where(rows["labels"] >= 0, rows["tokens"])}


def copies_plan(sync: Sync, layout: Layout | None = None, **changes: Any) -> Plan:
    """Return a plan of two copies in fp64, each of two micro-batches."""
    changes = {"precision": "fp64", "bucket_bytes": 4096, **changes}
    return plan_of(layout or Layout(dp_replicate=2), BATCH, sync=sync, **{"micro_batch": 2, **changes})


def copies_task(**changes: Any) -> Task:
    return decoder_task(**changes)


def began(task: Task, plan: Plan) -> tuple[World, Assembled]:
    """Return the assembled task under a plan, on this rank."""
    world = world_here()
    return world, assemble(task, plan, world, task.data, SEQ_LEN)


def steps_of(built: Assembled, task: Task, plan: Plan, first: int, last: int) -> list[Any]:
    """Make steps `first` to `last` and return what they did."""
    world = built.stepper.world
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    return [
        built.stepper.step(stream.at((step - 1) * plan.batch_samples, step), task.optimizer.lr)
        for step in range(first, last + 1)
    ]


def whole_weights(built: Assembled) -> dict[str, torch.Tensor]:
    """Return this rank's copy of all weights."""
    return {
        name: (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()
        for name, weight in built.model.named_parameters()
    }


def by_hand(task: Task, sync: Sync, copies: int, steps: int) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Return (losses, weights of every copy) of `steps` steps in a plain loop that takes the copies in turn.

    The outer step is torch's SGD over the shared weights, whose gradient is the mean of the copies' changes.
    """
    models = [reference_model(task, task.data, SEQ_LEN, torch.float64).train() for _ in range(copies)]
    own = [plain_optimizers(task.optimizer, model, list(model.parameters())) for model in models]
    shared = [weight.detach().clone().requires_grad_() for weight in models[0].parameters()]
    outer = torch.optim.SGD(shared, lr=sync.lr, momentum=sync.momentum, nesterov=sync.momentum > 0)
    losses = []
    for step in range(1, steps + 1):
        sums = []
        for copy, (model, optimizers) in enumerate(zip(models, own, strict=True)):
            rows = rows_of(BATCH, copies, copy)
            at = np.arange(rows.start, rows.stop, dtype=np.int64) + (step - 1) * BATCH
            model.zero_grad()
            loss, weight = next_token(model, task.data.read(sample_ids(task.seed, at, task.data.samples), at))
            (loss / weight).backward()
            sums.append((float(loss.detach()), float(weight)))
            if task.optimizer.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), task.optimizer.clip_norm)
            for optimizer, scale in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = task.optimizer.lr * scale
                optimizer.step()
        losses.append(sum(loss for loss, _ in sums) / sum(weight for _, weight in sums))
        if step % sync.every == 0:
            with torch.no_grad():
                for index, weight in enumerate(shared):
                    held = [list(model.parameters())[index] for model in models]
                    weight.grad = torch.stack([weight - one for one in held]).mean(0)
                outer.step()
                for model in models:
                    for weight, one in zip(shared, model.parameters(), strict=True):
                        one.copy_(weight)
    return losses, [{name: w.detach() for name, w in model.named_parameters()} for model in models]


def rounded_by_hand(task: Task, copies: int, steps: int) -> dict[str, torch.Tensor]:
    """Return the weights after a plain loop of one model, to whose gradient each copy adds what it sends in bf16.

    What rounding leaves out of a copy's sum, of losses over the power of two that the step expects as weight, is added
    to the copy's next sum.
    """
    model = reference_model(task, task.data, SEQ_LEN, torch.float64).train()
    weights = list(model.parameters())
    optimizers = plain_optimizers(task.optimizer, model, weights)
    left = [[torch.zeros_like(weight) for weight in weights] for _ in range(copies)]
    expected = 2.0 ** round(math.log2(BATCH * SEQ_LEN))
    for step in range(1, steps + 1):
        totals, items = [torch.zeros_like(weight) for weight in weights], 0.0
        for copy in range(copies):
            rows = rows_of(BATCH, copies, copy)
            at = np.arange(rows.start, rows.stop, dtype=np.int64) + (step - 1) * BATCH
            loss, weight = next_token(model, task.data.read(sample_ids(task.seed, at, task.data.samples), at))
            items += float(weight)
            for total, kept, grad in zip(
                totals, left[copy], torch.autograd.grad(loss / expected, weights), strict=True
            ):
                sent = (grad + kept).bfloat16().double()
                kept.add_(grad - sent)
                total.add_(sent)
        for weight, total in zip(weights, totals, strict=True):
            weight.grad = total * (expected / items)
        torch.nn.utils.clip_grad_norm_(weights, task.optimizer.clip_norm)
        for optimizer, scale in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = task.optimizer.lr * scale
            optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}
