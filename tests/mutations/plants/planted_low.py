"""Mistakes of bf16 and fp16 alone: what is kept or sent in fewer bits, and decisions that ranks take for themselves.

Each leaves runs in fp64 alone, so that every part of the proof before the one in low precision says "equal".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from planted import Objective, Patch, Planted, objective_changed_by
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from paceline.run import assemble
from paceline.run.loop.loader import MicroBatch
from paceline.run.loop.step import Stepper
from paceline.run.numerics import precision
from paceline.run.numerics.precision import LossScaler
from paceline.run.parallel import apply
from paceline.run.parallel.context import exchange
from paceline.run.parallel.data.sharding import ShardedGradients
from paceline.run.parallel.expert import experts as expert
from paceline.run.parallel.tensor import SummedGradients
from paceline.run.process.world import World
from paceline.run.replicas.allreduce import ReducedGradients
from paceline.task.models.moe import MoE, MoEDecoder, Router, routers

# ---- what travels ----------------------------------------------------------------------------------------------------


def shards_reduced_in_bf16(patch: Patch, world: World) -> None:
    policy = fsdp.MixedPrecisionPolicy

    def coarse(**given: Any) -> Any:
        reduce = given["reduce_dtype"] if given["param_dtype"] is None else torch.bfloat16
        return policy(**{**given, "reduce_dtype": reduce})

    patch.setattr(fsdp, "MixedPrecisionPolicy", coarse)


def copies_reduced_in_bf16(patch: Patch, world: World) -> None:
    reduce_next = ReducedGradients._reduce_next

    def coarse(self: ReducedGradients) -> None:
        bucket = self._buckets[self._next]
        flat = bucket.flat
        if flat.dtype == torch.float32:
            bucket.flat = flat.bfloat16()
        reduce_next(self)
        if bucket.flat is not flat and bucket.work is not None:
            bucket.work.wait()
            flat.copy_(bucket.flat)
            bucket.flat = flat

    patch.setattr(ReducedGradients, "_reduce_next", coarse)


def parts_summed_in_bf16(patch: Patch, world: World) -> None:
    """Gradients of weights that tensor ranks hold whole are parts of a sum; `finish` adds these up."""
    finish = SummedGradients.finish

    def coarse(self: SummedGradients) -> None:
        reduce = dist.all_reduce

        def in_bf16(flat: torch.Tensor, **rest: Any) -> None:
            low = flat.bfloat16() if flat.dtype == torch.float32 else flat
            reduce(low, **rest)
            flat.copy_(low)

        with Patch.context() as inside:
            inside.setattr(dist, "all_reduce", in_bf16)
            finish(self)

    patch.setattr(SummedGradients, "finish", coarse)


def keys_reduced_in_bf16(patch: Patch, world: World) -> None:
    """Ranks that share sequences add up the gradients of all keys, each those of its own queries."""
    reduce = exchange.reduce_scatter

    def coarse(own: torch.Tensor, everything: torch.Tensor, **rest: Any) -> None:
        low = own.bfloat16()
        reduce(low, everything.bfloat16(), **rest)
        own.copy_(low)

    patch.setattr(exchange, "reduce_scatter", lambda own, *rest, **more: (
        reduce(own, *rest, **more) if own.dtype == torch.float64 else coarse(own, *rest, **more)
    ))  # fmt: skip


def rows_sent_in_fp32(patch: Patch, world: World) -> None:
    send = expert._all_to_all

    def wide(rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        return send(rows.float() if rows.dtype == torch.bfloat16 else rows, *rest).to(rows.dtype)

    patch.setattr(expert, "_all_to_all", wide)


def loads_summed_in_bf16(patch: Patch, world: World) -> None:
    """The balance loss takes the load of experts from all ranks that share a sequence."""
    balance = apply.balance_shared_sequences

    def coarse(model: nn.Module, group: dist.ProcessGroup) -> None:
        balance(model, group)

        def over_sequence(counts: torch.Tensor) -> torch.Tensor:
            total = counts.detach().bfloat16()
            dist.all_reduce(total, group=group)
            return total.to(counts.dtype)

        for module in model.modules():
            if isinstance(module, MoE | MoEDecoder):
                module.over_sequence = over_sequence

    patch.setattr(apply, "balance_shared_sequences", coarse)


# ---- what rests ------------------------------------------------------------------------------------------------------


def rounded(tensor: torch.Tensor) -> None:
    """Round a tensor of fp32 to bf16, in place."""
    if tensor.dtype == torch.float32:
        tensor.copy_(tensor.bfloat16())


def accumulated_in_bf16(patch: Patch, world: World) -> None:
    before = ReducedGradients.before_micro_batch

    def rounding(self: ReducedGradients, last: bool) -> None:
        for bucket in self._buckets:
            rounded(bucket.flat)
        before(self, last)

    patch.setattr(ReducedGradients, "before_micro_batch", rounding)


def experts_accumulated_in_bf16(patch: Patch, world: World) -> None:
    before, finish = ShardedGradients.before_micro_batch, ShardedGradients.finish

    def round_experts(self: ShardedGradients) -> None:
        for name, weight in self._model.named_parameters():
            if ".experts." in name and isinstance(weight.grad, DTensor):
                rounded(weight.grad.to_local())

    def rounding(self: ShardedGradients, last: bool) -> None:
        round_experts(self)
        before(self, last)

    def rounding_at_last(self: ShardedGradients) -> None:
        finish(self)
        round_experts(self)

    patch.setattr(ShardedGradients, "before_micro_batch", rounding)
    patch.setattr(ShardedGradients, "finish", rounding_at_last)


def weights_kept_in_bf16(patch: Patch, world: World) -> None:
    patch.setitem(precision.MASTER_DTYPES, "bf16", torch.bfloat16)


weights_kept_in_bf16.is_source = True  # type: ignore[attr-defined]  # a table that is wrong is so in every process


def after_updates(patch: Patch, change: Callable[[Stepper], None]) -> None:
    """Have something done after every update."""
    update = Stepper._update

    def changed(self: Stepper, *args: Any) -> bool:
        updated = update(self, *args)
        with torch.no_grad():
            change(self)
        return updated

    patch.setattr(Stepper, "_update", changed)


def weights_rounded_to_bf16(patch: Patch, world: World) -> None:
    after_updates(patch, lambda stepper: [rounded(weight) for weight in stepper.model.parameters()] and None)


def moments_rounded_to_bf16(patch: Patch, world: World) -> None:
    after_updates(patch, lambda s: [rounded(state["exp_avg"]) for state in s.optimizer.state.values()] and None)


def loss_in_bf16(patch: Patch, world: World) -> None:
    def change(objective: Objective, micros: list[MicroBatch]) -> Objective:
        def coarse(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
            loss, weight = objective(model, batch)
            return loss.bfloat16().to(loss.dtype) if loss.dtype == torch.float32 else loss, weight

        return coarse

    objective_changed_by(patch, change)


# ---- what ranks decide -----------------------------------------------------------------------------------------------


def skipped_on_one_rank(patch: Patch, world: World) -> None:
    update = LossScaler.update
    patch.setattr(LossScaler, "update", lambda self, overflowed: update(self, overflowed and world.is_first))


def one_rank_chooses_otherwise(patch: Patch, world: World) -> None:
    """The last rank's arithmetic decides a tie in the first token's scores otherwise."""
    forward = Router.forward

    def other(self: Router, x: torch.Tensor) -> Any:
        probabilities, weights, chosen = forward(self, x)
        if world.rank and x.dtype == torch.bfloat16:
            chosen = chosen.clone()
            chosen[0, 0] = (chosen[0, 0] + 1) % len(self.weight)
        return probabilities, weights, chosen

    patch.setattr(Router, "forward", other)


Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # scores, weights and indices of the chosen


def routers_changed_by(patch: Patch, change: Callable[[Callable[..., Routed], torch.Tensor], Routed]) -> None:
    """Have the routers of the layout, and not those of the reference, run as `change(forward, x)` in bf16."""
    lay_out = assemble.apply_plan

    def changed(forward: Callable[..., Routed], x: torch.Tensor) -> Routed:
        return change(forward, x) if x.dtype == torch.bfloat16 else forward(x)

    def applied(model: nn.Module, *rest: Any, **more: Any) -> Any:
        gradients = lay_out(model, *rest, **more)
        for router in routers(model).values():
            router.forward = functools.partial(changed, router.forward)  # type: ignore[method-assign]
        return gradients

    patch.setattr(assemble, "apply_plan", applied)


def routed_by_other_rounding(patch: Patch, world: World) -> None:
    """One rank chooses by scores that it has rounded to bf16, in which more of them are tied."""

    def other(forward: Callable[..., Routed], x: torch.Tensor) -> Routed:
        scores, weights, chosen = forward(x)
        return scores, weights, scores.bfloat16().topk(chosen.shape[-1]).indices if world.rank else chosen

    routers_changed_by(patch, other)


def scores_in_bf16(patch: Patch, world: World) -> None:
    def coarse(forward: Callable[..., Routed], x: torch.Tensor) -> Routed:
        scores, weights, chosen = forward(x)
        return scores.bfloat16().float(), weights, chosen

    routers_changed_by(patch, coarse)


def sent_to_the_third_best(patch: Patch, world: World) -> None:
    """The first token of each row goes to the third best of its experts instead of the best, on all ranks alike."""

    def other(forward: Callable[..., Routed], x: torch.Tensor) -> Routed:
        scores, weights, chosen = forward(x)
        chosen = chosen.clone()
        chosen[:, 0, 0] = scores[:, 0].topk(3).indices[:, 2]
        return scores, weights, chosen

    routers_changed_by(patch, other)


def low(
    family: str, what: str, case: str, plant: Any, quantity: str, tensor: str, diagnosed: str = "", step: int = 1
) -> Planted:
    """Return a mistake that the part in low precision names, and none before it."""
    says = "ranks that must decide alike" if diagnosed == "update" else ""
    return Planted(family, what, case, plant, quantity, diagnosed or HALF, tensor, says, "low precision", step)


HALF, OTHER = "half-reduced precision", "other numbers"
LOW_PROOFS = [
    low(HALF, "bf16: shards reduce-scatter their gradients in bf16", "zero 3, bf16",
        shards_reduced_in_bf16, "dtype", "reduce_scatter"),
    low(HALF, "bf16: ZeRO-1 reduce-scatters its gradients in bf16", "zero 1, bf16",
        shards_reduced_in_bf16, "dtype", "reduce_scatter"),
    low(HALF, "bf16: copies sum their gradients in bf16", "copies, bf16", copies_reduced_in_bf16, "dtype", "allreduce"),
    low(HALF, "bf16: tensor ranks sum parts of gradients in bf16", "experts, tensor, bf16",
        parts_summed_in_bf16, "dtype", "allreduce"),
    low(HALF, "bf16: micro-batches add up in bf16", "copies, bf16", accumulated_in_bf16, "gradients", "", OTHER),
    low(HALF, "bf16: gradients of experts add up in bf16", "experts, bf16",
        experts_accumulated_in_bf16, "dtype", "the gradient of layers.0.mlp.experts"),
    low(HALF, "bf16: weights are kept in bf16", "zero 3, bf16", weights_kept_in_bf16, "dtype", "the weight of"),
    low(HALF, "bf16: weights are rounded after each update", "zero 3, bf16", weights_rounded_to_bf16,
        "weights", "", OTHER),
    low(HALF, "bf16: first moments are rounded after each update", "copies, bf16",
        moments_rounded_to_bf16, "dtype", "exp_avg in the optimizer"),
    low(HALF, "bf16: the loss is rounded before its backward pass", "zero 3, bf16", loss_in_bf16,
        "loss", "loss", OTHER),
    low(HALF, "bf16: gradients of keys add up in bf16", "shared sequences, bf16",
        keys_reduced_in_bf16, "dtype", "reduce_scatter"),
    low("token dispatch", "bf16: rows travel to their experts in fp32", "experts, bf16",
        rows_sent_in_fp32, "dtype", "sends to other ranks is in torch.float32, not torch.bfloat16", "other format"),
    low("auxiliary loss", "bf16: ranks that share a sequence sum its load in bf16", "experts, shared sequences, bf16",
        loads_summed_in_bf16, "dtype", "allreduce"),
    low("router choice", "bf16: tensor ranks send a token to different experts", "experts, tensor, bf16",
        one_rank_chooses_otherwise, "decision", "the experts that tokens go to", "update"),
    low("router choice", "bf16: tensor ranks route on different rounding", "experts, tensor, bf16",
        routed_by_other_rounding, "decision", "the experts that tokens go to", "update"),
    low("router choice", "bf16: tokens go to the third best of their experts", "experts, bf16",
        sent_to_the_third_best, "decision", "went to others than the best", "router choice"),
    low("router choice", "bf16: the scores of experts are rounded", "experts, bf16",
        scores_in_bf16, "dtype", "the scores of layers.0.mlp"),
    low("loss scale", "fp16: one rank alone sees that gradients overflow", "copies, fp16",
        skipped_on_one_rank, "decision", "loss scale", "update", 3),
    low("loss scale", "fp16: one rank of shared experts alone sees that gradients overflow", "experts, fp16",
        skipped_on_one_rank, "decision", "loss scale", "update", 3),
]  # fmt: skip
