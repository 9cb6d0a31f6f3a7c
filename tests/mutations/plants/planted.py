"""Mistakes that have gone wrong silently elsewhere, planted into the running system, and what must catch each.

A plant replaces a function or an attribute of ours inside the ranks, for as long as one proof runs. Nothing of the
reference is touched, and nothing of torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests_shared import Dropout, decoder_task
from torch import nn
from torch.distributed import fsdp

from paceline.run import assemble as assemble_module
from paceline.run import initial
from paceline.run.loop import loader, passes
from paceline.run.loop.loader import MicroBatch
from paceline.run.loop.passes import SequentialPasses
from paceline.run.loop.step import Stepper
from paceline.run.memory import recompute
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.parallel import apply
from paceline.run.parallel.data import sharding as data
from paceline.run.parallel.data.sharding import ShardedGradients
from paceline.run.process.world import World
from paceline.run.replicas.allreduce import ReducedGradients
from paceline.run.updates.optimizer import build_optimizer
from paceline.spec import layout as layout_module
from paceline.spec.plan import Plan
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import Task
from paceline.task.data.order import many_steps
from paceline.task.models.held import is_sharded_unit

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch, World], None]


@dataclass(frozen=True)
class Planted:
    """One mistake: its family, what is planted, into which case, and what the proof must name."""

    family: str
    what: str
    case: str
    plant: Plant
    quantity: str
    diagnosed: str  # the family that the proof names
    tensor: str = ""  # part of the name of the first tensor or number that differs
    says: str = ""  # part of the likely cause
    part: str = ""  # of the proof, where the parts before it must say "equal"
    step: int = 0  # at which it must be named, where that tells something


def task_of(case: str) -> Task:
    """Return the task of a case, for runs that are resumed."""
    changes: dict[str, Any] = {"optimizer": OptimizerSpec(lr=1e-2, eps=1e-5, clip_norm=0.5)}
    model: Any = dataclasses.replace(decoder_task().model, hidden=16, layers=2, heads=2, kv_heads=1, ffn=24, tied=False)
    if case.startswith("dropout"):
        model, changes["objective"] = Dropout, "next_token"
    return decoder_task(model=model, **changes)


# ---- how gradients come together ------------------------------------------------------------------------------------


def counted(micro: MicroBatch) -> float:
    return float((micro.data["labels"] != -100).sum()) if micro.counts else 0.0


Objective = Callable[[nn.Module, Any], tuple[torch.Tensor, Any]]


def objective_changed_by(patch: Patch, change: Callable[[Objective, list[MicroBatch]], Objective]) -> None:
    """Have the passes of a step run with another objective, made from the task's and the rank's micro-batches."""
    original = SequentialPasses.accumulate

    def accumulate(self: SequentialPasses, micros: Sequence[MicroBatch], down: float) -> tuple[Any, Any]:
        objective = self.objective
        self.objective = change(objective, [*micros])
        try:
            return original(self, micros, down)
        finally:
            self.objective = objective

    patch.setattr(SequentialPasses, "accumulate", accumulate)


def backward_scaled_by(patch: Patch, factor: Callable[[MicroBatch, list[MicroBatch]], float]) -> None:
    """Have every backward pass run on the loss times a factor, while loss and weight are reported as they are."""

    def change(objective: Objective, micros: list[MicroBatch]) -> Objective:
        turn = iter(micros)

        def scaled(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
            loss, weight = objective(model, batch)
            by = factor(next(turn), micros)
            return loss * by + (loss * (1 - by)).detach(), weight

        return scaled

    objective_changed_by(patch, change)


def over_all_ranks(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def mean_of_means(patch: Patch, world: World) -> None:
    def change(objective: Objective, micros: list[MicroBatch]) -> Objective:
        def mean(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
            loss, weight = objective(model, batch)
            return loss / weight, torch.ones(())

        return mean

    objective_changed_by(patch, change)


def gradient_mean_of_means(patch: Patch, world: World) -> None:
    def factor(micro: MicroBatch, all_of_rank: list[MicroBatch]) -> float:
        return sum(map(counted, all_of_rank)) / len(all_of_rank) / counted(micro)

    backward_scaled_by(patch, factor)


def ranks_as_equals(patch: Patch, world: World) -> None:
    totals: dict[int, float] = {}

    def factor(micro: MicroBatch, all_of_rank: list[MicroBatch]) -> float:
        mine, first = sum(map(counted, all_of_rank)), all_of_rank[0].position
        if first not in totals:
            totals[first] = over_all_ranks(mine)
        return totals[first] / world.size / mine

    backward_scaled_by(patch, factor)


def divided_by_accumulation(patch: Patch, world: World) -> None:
    backward_scaled_by(patch, lambda micro, all_of_rank: 1 / len(all_of_rank))


def averaged_copies(patch: Patch, world: World) -> None:
    finish = ReducedGradients.finish

    def averaged(self: ReducedGradients) -> None:
        finish(self)
        for bucket in self._buckets:
            bucket.flat /= world.size

    patch.setattr(ReducedGradients, "finish", averaged)


def averaged_shards(patch: Patch, world: World) -> None:
    shard = data.shard

    def averaged(model: nn.Module, *rest: Any) -> None:
        shard(model, *rest)
        for module in model.modules():
            if is_sharded_unit(module):
                module.set_gradient_divide_factor(float(world.size))

    patch.setattr(apply, "shard", averaged)


def clip_before_reduce(patch: Patch, world: World) -> None:
    def finish(self: ReducedGradients) -> None:
        norm = torch.stack([bucket.flat.norm() for bucket in self._buckets]).norm()
        for bucket in self._buckets:
            bucket.flat *= min(1.0, 0.05 / float(norm))
            dist.all_reduce(bucket.flat, group=self.group)

    patch.setattr(ReducedGradients, "before_micro_batch", lambda self, last: None)
    patch.setattr(ReducedGradients, "_hook", lambda self, index: lambda parameter: None)
    patch.setattr(ReducedGradients, "finish", finish)


def copies_in_bf16(patch: Patch, world: World) -> None:
    reduce_next = ReducedGradients._reduce_next

    def rounded(self: ReducedGradients) -> None:
        flat = self._buckets[self._next].flat
        flat.copy_(flat.bfloat16())
        reduce_next(self)

    patch.setattr(ReducedGradients, "_reduce_next", rounded)


def shards_in_bf16(patch: Patch, world: World) -> None:
    policy = fsdp.MixedPrecisionPolicy
    patch.setattr(fsdp, "MixedPrecisionPolicy", lambda **rest: policy(**{**rest, "reduce_dtype": torch.bfloat16}))


def bucket_left_out(patch: Patch, world: World) -> None:
    reduce_next = ReducedGradients._reduce_next

    def all_but_the_first(self: ReducedGradients) -> None:
        if self._next == 0:  # the first bucket is that of the last parameters
            self._buckets[0].work = dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)
            self._next += 1
        else:
            reduce_next(self)

    patch.setattr(ReducedGradients, "_reduce_next", all_but_the_first)


def last_micro_batch_not_synchronised(patch: Patch, world: World) -> None:
    def before(self: ShardedGradients, last: bool) -> None:
        self._model.set_requires_gradient_sync(not last)
        self._model.set_reshard_after_backward(not last)
        self._model.set_is_last_backward(last)

    patch.setattr(ShardedGradients, "before_micro_batch", before)


def whole_gradients_dropped(patch: Patch, world: World) -> None:
    """Whole gradients of earlier micro-batches go with the weights that are dropped after each."""
    before = ShardedGradients.before_micro_batch

    def drops(self: ShardedGradients, last: bool) -> None:
        for unit in self.units if last else ():
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for held in group.fsdp_params:
                    held.unsharded_accumulated_grad = held.unsharded_param.grad = None
        before(self, last)

    patch.setattr(ShardedGradients, "before_micro_batch", drops)


def hybrid_without_all_reduce(patch: Patch, world: World) -> None:
    """The shards are made over `dp_shard` alone, as if there were one copy."""
    shard = data.shard

    def one_copy(model: nn.Module, blocks: list[nn.Module], axes: Any, *rest: Any) -> None:
        shard(model, blocks, axes["fsdp"], *rest)

    patch.setattr(apply, "shard", one_copy)


def kept_from_the_last_step(patch: Patch, world: World) -> None:
    zero = ReducedGradients.zero
    first = itertools.count()
    patch.setattr(ReducedGradients, "zero", lambda self: None if next(first) else zero(self))


# ---- norm, clipping, update ------------------------------------------------------------------------------------------


def norm_of_own_shard(patch: Patch, world: World) -> None:
    add_up = World.add_up

    def own_norm(self: World, vector: torch.Tensor) -> None:
        own = vector[2].clone()
        add_up(self, vector)
        vector[2] = own * self.size

    patch.setattr(World, "add_up", own_norm)


def norm_once_per_copy(patch: Patch, world: World) -> None:
    squares = Stepper._local_squares
    patch.setattr(Stepper, "_local_squares", lambda self: squares(self) * self.plan.layout.dp_replicate)


def not_clipped(patch: Patch, world: World) -> None:
    init = Stepper.__post_init__

    def unclipped(self: Stepper) -> None:
        init(self)
        self.clip_norm = 0.0

    patch.setattr(Stepper, "__post_init__", unclipped)


def optimizer_of(change: Callable[[OptimizerSpec], OptimizerSpec]) -> Plant:
    def plant(patch: Patch, world: World) -> None:
        patch.setattr(
            assemble_module, "build_optimizer", lambda spec, *rest, **more: build_optimizer(change(spec), *rest, **more)
        )

    return plant


def decay_on_norms(patch: Patch, world: World) -> None:
    def everywhere(spec: OptimizerSpec, *rest: Any, **more: Any) -> Any:
        optimizer: Any = build_optimizer(spec, *rest, **more)
        for group in optimizer.param_groups:
            group["weight_decay"] = spec.weight_decay
        return optimizer

    patch.setattr(assemble_module, "build_optimizer", everywhere)


def one_rank_does_not_update(patch: Patch, world: World) -> None:
    def build(spec: OptimizerSpec, *rest: Any, **more: Any) -> Any:
        optimizer: Any = build_optimizer(spec, *rest, **more)
        if world.rank:
            optimizer.step = lambda: None
        return optimizer

    patch.setattr(assemble_module, "build_optimizer", build)


# ---- weights, random numbers ----------------------------------------------------------------------------------------


def untied(patch: Patch, world: World) -> None:
    build = initial.build_model

    def apart(*args: Any, **rest: Any) -> nn.Module:
        model: Any = build(*args, **rest)
        model.config = dataclasses.replace(model.config, tied=False)
        model.lm_head = nn.Linear(model.config.hidden, model.config.vocab, bias=False, device="meta")
        return model

    patch.setattr(initial, "build_model", apart)


def weights_per_rank(patch: Patch, world: World) -> None:
    fill = initial.fill_weights
    patch.setattr(initial, "fill_weights", lambda model, spec, seed: fill(model, spec, seed + world.rank))


def dropout_by_rank(patch: Patch, world: World) -> None:
    rows = passes.sample_rows
    patch.setattr(passes, "sample_rows", lambda micro, *rest: SampleRows(rows(micro).positions + world.rank, 1))


def masks_not_replayed(patch: Patch, world: World) -> None:
    original = recompute.checkpoint
    forgetful = lambda *args, **rest: original(*args, **{**rest, "preserve_rng_state": False})  # noqa: E731
    patch.setattr(recompute, "checkpoint", forgetful)


# ---- data ------------------------------------------------------------------------------------------------------------


def data_changed_by(patch: Patch, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    for road in ("pinned", "to_device"):  # of batches that are trained on, and of held-out ones
        patch.setattr(loader, road, lambda batch, device: change(batch))


def padding_lost(patch: Patch, world: World) -> None:
    data_changed_by(patch, lambda batch: {**batch, "labels": batch["labels"].clamp(min=0)})


def labels_over_the_boundary(patch: Patch, world: World) -> None:
    """The last label of each row is taken from the row after it."""

    def shifted(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        labels = batch["labels"].clone()
        labels[:, -1] = batch["tokens"].roll(-1, 0)[:, 0].where(labels[:, -1] >= 0, labels[:, -1])
        return {**batch, "labels": labels}

    data_changed_by(patch, shifted)


def rows_dropped(patch: Patch, world: World) -> None:
    def even(self: Plan, data_rank: int, samples: int = 0) -> range:
        each = (samples or self.batch_samples) // self.layout.data_degree
        return range(each * data_rank, each * (data_rank + 1))

    patch.setattr(Plan, "rows_of", even)


def same_data_everywhere(patch: Patch, world: World) -> None:
    patch.setattr(layout_module.Layout, "data_rank", lambda self, rank: 0)


def order_by_rank(patch: Patch, world: World) -> None:
    ids = many_steps.ids_at
    patch.setattr(many_steps, "ids_at", lambda source, seed, at: ids(source, seed + world.rank, at))


def stand_ins_count(patch: Patch, world: World) -> None:
    made = lambda data, ids, position, counts, step=0: MicroBatch(data, ids, position, True, step)  # noqa: E731
    patch.setattr(loader, "MicroBatch", made)


def nothing(patch: Patch, world: World) -> None:
    """A control: nothing is planted."""


PROOFS = [
    Planted("accumulation normalisation", "loss and gradient are a mean of the micro-batches' means", "copies",
            mean_of_means, "weight", "loss normalisation"),
    Planted("accumulation normalisation", "only the gradient is a mean of means; the logged loss is right", "copies",
            gradient_mean_of_means, "gradients", "gradient normalisation", "embed_tokens"),
    Planted("accumulation normalisation", "gradients are divided by the number of micro-batches once more",
            "copies", divided_by_accumulation, "gradients", "gradient scale", "embed_tokens",
            "accumulation degree 3"),
    Planted("data-parallel normalisation", "ranks with unequal token counts are averaged as equals", "copies",
            ranks_as_equals, "gradients", "gradient normalisation", "embed_tokens"),
    Planted("data-parallel normalisation", "gradients of copies are averaged where sums are meant", "copies",
            averaged_copies, "gradients", "gradient scale", "embed_tokens", "dp_replicate degree 2"),
    Planted("data-parallel normalisation", "gradients of shards are averaged where sums are meant", "zero 3",
            averaged_shards, "gradients", "gradient scale", "embed_tokens", "dp_shard degree 2"),
    Planted("gradient norm", "each rank clips by the norm of its own shard", "zero 3",
            norm_of_own_shard, "grad_norm", "gradient norm", "grad_norm", "own shard"),
    Planted("gradient norm", "the norm counts every copy", "copies",
            norm_once_per_copy, "grad_norm", "gradient norm", "grad_norm", "dp_replicate degree 2"),
    Planted("clip before reduce", "each rank clips its own gradients before they are summed", "copies",
            clip_before_reduce, "gradients", "gradient normalisation", "embed_tokens", "clipped"),
    Planted("clip before reduce", "gradients are not clipped at all", "copies",
            not_clipped, "weights", "optimizer", "", "clipping"),
    Planted("half-reduced precision", "copies sum their gradients in bf16", "copies",
            copies_in_bf16, "gradients", "half-reduced precision", "embed_tokens"),
    Planted("half-reduced precision", "shards reduce-scatter their gradients in bf16", "zero 3",
            shards_in_bf16, "gradients", "half-reduced precision", "embed_tokens"),
    Planted("gradient synchronisation", "one bucket of gradients is never reduced", "copies",
            bucket_left_out, "gradients", "gradients not summed", "down_proj", "norm.weight"),
    Planted("gradient synchronisation", "ZeRO-1 does not reduce the last micro-batch", "zero 1",
            last_micro_batch_not_synchronised, "gradients", "gradient normalisation", "embed_tokens", "left out"),
    Planted("gradient synchronisation", "ZeRO-3 drops whole gradients with the weights", "whole gradients",
            whole_gradients_dropped, "gradients", "gradient normalisation", "embed_tokens"),
    Planted("gradient synchronisation", "the all-reduce between copies of shards is skipped", "hybrid",
            hybrid_without_all_reduce, "gradients", "gradients not summed", "embed_tokens"),
    Planted("gradient synchronisation", "gradients are not set to zero between steps", "copies",
            kept_from_the_last_step, "gradients", "state between steps", "embed_tokens"),
    Planted("tied weights", "embedding and head become two weights", "tied",
            untied, "initial", "tied weights", "head.weight"),
    Planted("initialisation", "every rank draws weights of its own", "copies",
            weights_per_rank, "initial", "initial weights", "embed_tokens", "ranks start from different weights"),
    Planted("dropout", "masks are those of other samples, by rank", "dropout",
            dropout_by_rank, "loss", "dropout", "loss"),
    Planted("dropout", "recompute draws new masks in the backward pass", "dropout, recompute",
            masks_not_replayed, "error", "", "", "belong to no sample: the backward pass"),
    Planted("padding and label masks", "masked labels count as class 0", "copies",
            padding_lost, "weight", "padding and label masks", "weight"),
    Planted("padding and label masks", "the last label of a row is taken from the next row", "copies",
            labels_over_the_boundary, "loss", "labels", "loss"),
    Planted("uneven batches", "the last row of an uneven batch is dropped", "copies",
            rows_dropped, "samples", "batch not as asked", "position 8", "rows dropped"),
    Planted("uneven batches", "a stand-in row of a rank without any counts", "copies",
            stand_ins_count, "weight", "padding and label masks", "weight", "stand-in"),
    Planted("sample order", "all ranks read the same rows", "zero 3",
            same_data_everywhere, "samples", "sample order", "position 0", "same samples"),
    Planted("sample order", "each rank shuffles with a seed of its own", "copies",
            order_by_rank, "samples", "sample order", "position 4", "other samples"),
    Planted("optimizer", "weight decay is applied to norms", "zero 3",
            decay_on_norms, "weights", "optimizer groups", "norm.weight", "weight decay"),
    Planted("optimizer", "another eps", "copies",
            optimizer_of(lambda spec: dataclasses.replace(spec, eps=1e-3)), "weights", "optimizer"),
    Planted("optimizer", "another beta2", "copies",
            optimizer_of(lambda spec: dataclasses.replace(spec, beta2=0.999)), "weights", "optimizer"),
    Planted("optimizer", "one copy does not make the update", "copies",
            one_rank_does_not_update, "weights", "update", "", "copies drift apart"),
]  # fmt: skip
