"""Mistakes that two of an axis, one bucket, one chunk, one threshold or rows of one kind do not show."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from planted import (
    Objective,
    Patch,
    Planted,
    backward_scaled_by,
    counted,
    nothing,
    objective_changed_by,
    optimizer_of,
)
from torch import Tensor, nn

from paceline.run.loop import step as step_module
from paceline.run.loop.loader import MicroBatch
from paceline.run.loop.step import Stepper
from paceline.run.memory.offload_state import OffloadedUpdate
from paceline.run.parallel.context.exchange import Gathered, Ring
from paceline.run.parallel.data.statistics import RankSums
from paceline.run.parallel.pipeline.stage_module import StageModule
from paceline.run.parallel.tensor import Region
from paceline.run.process.world import World
from paceline.run.replicas.allreduce import ReducedGradients
from paceline.spec.data.labels import IGNORED
from paceline.task.models.layers import loss as loss_module
from paceline.task.models.layers.batch_norm import WholeBatchNorm

# ---- three of an axis ------------------------------------------------------------------------------------------------


def keys_and_values_swapped_on_the_way(patch: Patch, world: World) -> None:
    """A rank passes on what it got as [values, keys]; of two ranks none passes anything on."""
    blocks = Ring.blocks

    def swapping(self: Ring) -> Any:
        send = self._pass_keys
        self._pass_keys = lambda keys: send(keys.flip(0))  # type: ignore[method-assign]
        yield from blocks(self)

    patch.setattr(Ring, "blocks", swapping)


def second_step_of_the_ring_without_gradients(patch: Patch, world: World) -> None:
    add = Ring.add
    seen: dict[int, int] = {}

    def adding(self: Ring, by_k: Tensor, by_v: Tensor) -> None:
        seen[id(self)] = seen.get(id(self), 0) + 1
        keep = 0.0 if seen[id(self)] == 2 else 1.0
        add(self, by_k * keep, by_v * keep)
        if seen[id(self)] == self._ranks - 1:
            del seen[id(self)]

    patch.setattr(Ring, "add", adding)


def next_rank_alone(patch: Patch, world: World) -> None:
    """Of the ranks after it, a rank's second chunk sees the next one's keys."""

    def of(self: Gathered, everything: Tensor) -> Tensor:
        late = everything[self._rank + 1 : self._rank + 2]
        return late if self._late else everything[: self._rank, ..., : self._chunk, :]

    patch.setattr(Gathered, "_of", of)


def middle_stage_forgets(patch: Patch, world: World) -> None:
    """Stages that are neither first nor last lose the gradients of their first micro-batch."""
    before = StageModule._before_backward

    def forgetting(self: StageModule, rows: Any, grad: Tensor) -> None:
        before(self, rows, grad)
        if self._backwards == 2 and not self._stage.is_first and not self._stage.is_last:
            self._stage.gradients.zero()

    patch.setattr(StageModule, "_before_backward", forgetting)


def pairs_of_tensor_ranks(patch: Patch, world: World) -> None:
    """The outputs of row-split layers are summed over the first two ranks of a group."""
    leave = Region.leave
    patch.setattr(Region, "leave", lambda self, x: leave(self, x if self.group.rank() < 2 else x * 0))


# ---- the fourth bucket, the second chunk, the third micro-batch ------------------------------------------------------


def fourth_bucket_not_reduced(patch: Patch, world: World) -> None:
    reduce_next = ReducedGradients._reduce_next

    def all_but_the_fourth(self: ReducedGradients) -> None:
        if self._next == 3:
            self._buckets[3].ranks_reached.fill_(1.0)
            self._buckets[3].work = dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)
            self._next += 1
        else:
            reduce_next(self)

    patch.setattr(ReducedGradients, "_reduce_next", all_but_the_fourth)


def state_of_the_second_bucket_stays(patch: Patch, world: World) -> None:
    init = OffloadedUpdate.__init__

    def without_one(self: OffloadedUpdate, *args: Any, **rest: Any) -> None:
        init(self, *args, **rest)
        self._buckets = [bucket for at, bucket in enumerate(self._buckets) if at != 1]

    patch.setattr(OffloadedUpdate, "__init__", without_one)


def second_chunk_left_out(patch: Patch, world: World) -> None:
    """Of several chunks of logits the second counts in the weight, and not in the loss."""
    forward = loss_module._LinearCrossEntropy.forward

    def without_second(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, backward: bool, size: int) -> Tensor:
        labels = labels.clone()
        labels[size : 2 * size] = IGNORED
        return forward(ctx, hidden, head, labels, backward, size)

    patch.setattr(loss_module._LinearCrossEntropy, "forward", staticmethod(without_second))


def third_micro_batch_dropped(patch: Patch, world: World) -> None:
    def factor(micro: MicroBatch, all_of_rank: list[MicroBatch]) -> float:
        return float(micro is not all_of_rank[2]) if len(all_of_rank) > 2 else 1.0

    backward_scaled_by(patch, factor)


# ---- rows of one kind ------------------------------------------------------------------------------------------------


def rows_of(micro: MicroBatch) -> int:
    return len(micro.data["labels"]) if micro.counts else 0


def wrong_where_even(patch: Patch, world: World) -> None:
    """A short cut for micro-batches of one size, which are taken for means."""

    def factor(micro: MicroBatch, all_of_rank: list[MicroBatch]) -> float:
        return 0.5 if len({rows_of(one) for one in all_of_rank}) == 1 else 1.0

    backward_scaled_by(patch, factor)


def wrong_where_uneven(patch: Patch, world: World) -> None:
    """Micro-batches weigh alike: right only where all have as many labels."""

    def factor(micro: MicroBatch, all_of_rank: list[MicroBatch]) -> float:
        return sum(map(counted, all_of_rank)) / len(all_of_rank) / max(1.0, counted(micro))

    backward_scaled_by(patch, factor)


def stand_ins_weigh(patch: Patch, world: World) -> None:
    """A stand-in row's loss is left out, and its gradient is not."""

    def change(objective: Objective, micros: list[MicroBatch]) -> Objective:
        turn = iter(micros)

        def weighed(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            loss, weight = objective(model, batch)
            if not next(turn).counts:
                (loss * 1e-3).backward(retain_graph=True)
            return loss, weight

        return weighed

    objective_changed_by(patch, change)


# ---- thresholds and rates --------------------------------------------------------------------------------------------


def clipped_at_twice_the_norm(patch: Patch, world: World) -> None:
    update = Stepper._update

    def later(self: Stepper, *args: Any) -> bool:
        self.clip_norm *= 2
        return update(self, *args)

    patch.setattr(Stepper, "_update", later)


def always_scaled_to_the_threshold(patch: Patch, world: World) -> None:
    patch.setattr(step_module, "min", lambda one, ratio: ratio, raising=False)


def rate_of_the_first_step(patch: Patch, world: World) -> None:
    update = Stepper._update
    first: dict[int, float] = {}

    def steady(self: Stepper, *args: Any) -> bool:
        *rest, lr = args
        return update(self, *rest, first.setdefault(id(self), lr))

    patch.setattr(Stepper, "_update", steady)


def statistics_of_own_rows(patch: Patch, world: World) -> None:
    patch.setattr(RankSums, "__call__", lambda self, x: x * 1.0)


def running_statistics_of_one_rank(patch: Patch, world: World) -> None:
    keep = WholeBatchNorm._keep
    patch.setattr(WholeBatchNorm, "_keep", lambda self, *batch: keep(self, *batch) if world.is_first else None)


def _eps_of_the_twin(spec: Any) -> Any:
    return dataclasses.replace(spec, eps=1e-4)


THREE_PROOFS = [
    Planted("context parallel", "keys and values are swapped when they are passed on", "ring of four",
            keys_and_values_swapped_on_the_way, "loss", "forward pass", "loss"),
    Planted("context parallel", "the ring's second step loses its gradients", "ring of four",
            second_step_of_the_ring_without_gradients, "gradients", "gradient normalisation", "embed_tokens"),
    Planted("context parallel", "a rank sees the keys of the next rank alone", "sequences shared by four",
            next_rank_alone, "loss", "forward pass", "loss"),
    Planted("pipeline", "a middle stage forgets the gradients of its first micro-batch", "four stages",
            middle_stage_forgets, "gradients", "gradient normalisation", "layers.", "left out"),
    Planted("tensor parallel", "outputs are summed over the first two tensor ranks", "tensor ranks of four",
            pairs_of_tensor_ranks, "loss", "forward pass", "loss", "summed over tp"),
    Planted("gradient synchronisation", "the fourth bucket of gradients is never reduced", "copies",
            fourth_bucket_not_reduced, "gradients", "gradients not summed", "layers."),
    Planted("optimizer", "of the state on the host the second bucket is left out", "state on the host",
            state_of_the_second_bucket_stays, "weights", "optimizer groups", "norm.weight"),
    Planted("forward pass", "the second chunk of logits is left out of the loss", "copies",
            second_chunk_left_out, "loss", "labels", "loss"),
    Planted("accumulation normalisation", "the third micro-batch has no gradient", "zero 3",
            third_micro_batch_dropped, "gradients", "gradient normalisation", "embed_tokens"),
    Planted("accumulation normalisation", "micro-batches of one size are taken for means", "copies",
            wrong_where_even, "gradients", "gradient scale", "embed_tokens"),
    Planted("accumulation normalisation", "micro-batches weigh alike whatever they hold", "zero 1",
            wrong_where_uneven, "gradients", "gradient normalisation", "embed_tokens"),
    Planted("uneven batches", "a stand-in row has a gradient", "zero 1",
            stand_ins_weigh, "gradients", "gradient normalisation", "embed_tokens"),
    Planted("clipping", "gradients are clipped at twice the threshold", "copies",
            clipped_at_twice_the_norm, "weights", "optimizer", "", "clipping"),
    Planted("clipping", "gradients below the threshold are scaled up to it", "zero 3",
            always_scaled_to_the_threshold, "weights", "optimizer", "", "clipping"),
    Planted("optimizer", "eps is the same for every task", "copies",
            optimizer_of(_eps_of_the_twin), "weights", "optimizer"),
    Planted("optimizer", "every step takes the learning rate of the first", "zero 3",
            rate_of_the_first_step, "weights", "optimizer"),
    Planted("loss not a sum over rows", "InfoNCE sees the rows of its own micro-batch", "contrast",
            nothing, "whole batch", "loss not a sum over rows", "loss", 'coupled = "batch"'),
    Planted("loss not a sum over rows", "batch statistics are written by hand", "batch statistics",
            nothing, "whole batch", "loss not a sum over rows", "loss"),
    Planted("batch-norm statistics", "each rank normalises by the statistics of its own rows", "statistics of all",
            statistics_of_own_rows, "loss", "batch-norm statistics", "loss"),
    Planted("batch-norm statistics", "one rank alone keeps running statistics", "statistics of all",
            running_statistics_of_one_rank, "buffers", "batch-norm statistics", "running_mean"),
    Planted("loss not a sum over rows", "the objective returns a mean and one item", "mean and one",
            nothing, "whole batch", "loss not a sum over rows", "loss"),
    Planted("loss not a sum over rows", "the objective returns a mean and the number of rows", "mean and rows",
            nothing, "whole batch", "loss not a sum over rows", "loss"),
    Planted("loss not a sum over rows", "gathered rows of other ranks have no gradient", "gathered contrast",
            nothing, "gradients", "gradient normalisation"),
]  # fmt: skip
