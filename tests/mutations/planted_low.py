"""Mistakes of bf16 and fp16 alone: what is kept or sent in fewer bits, and decisions that ranks take for themselves.

Each leaves runs in fp64 alone, so that every part of the proof before the one in low precision says "equal".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from planted import Objective, Patch, Planted, objective_changed_by
from torch import nn

from paceline.run.loop.loader import MicroBatch
from paceline.run.loop.step import Stepper
from paceline.run.numerics import precision
from paceline.run.numerics.precision import LossScaler
from paceline.run.parallel.data import sharding as data
from paceline.run.process.world import World
from paceline.run.replicas.allreduce import ReducedGradients
from paceline.task.models.moe import Router

# ---- what travels ----------------------------------------------------------------------------------------------------


def shards_reduced_in_bf16(patch: Patch, world: World) -> None:
    policy = data.MixedPrecisionPolicy

    def coarse(**given: Any) -> Any:
        reduce = given["reduce_dtype"] if given["param_dtype"] is None else torch.bfloat16
        return policy(**{**given, "reduce_dtype": reduce})

    patch.setattr(data, "MixedPrecisionPolicy", coarse)


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


def weights_kept_in_bf16(patch: Patch, world: World) -> None:
    patch.setitem(precision.MASTER_DTYPES, "bf16", torch.bfloat16)


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


LOW = "low precision"
LOW_PROOFS = [
    Planted("half-reduced precision", "bf16: shards reduce-scatter their gradients in bf16", "zero 3, bf16",
            shards_reduced_in_bf16, "dtype", "half-reduced precision", "reduce_scatter", "", LOW, 1),
    Planted("half-reduced precision", "bf16: ZeRO-1 reduce-scatters its gradients in bf16", "zero 1, bf16",
            shards_reduced_in_bf16, "dtype", "half-reduced precision", "reduce_scatter", "", LOW, 1),
    Planted("half-reduced precision", "bf16: copies sum their gradients in bf16", "copies, bf16",
            copies_reduced_in_bf16, "dtype", "half-reduced precision", "allreduce", "", LOW, 1),
    Planted("half-reduced precision", "bf16: micro-batches add up in bf16", "copies, bf16",
            accumulated_in_bf16, "gradients", "half-reduced precision", "", "", LOW, 1),
    Planted("half-reduced precision", "bf16: weights are kept in bf16", "zero 3, bf16",
            weights_kept_in_bf16, "dtype", "half-reduced precision", "the weight of", "", LOW, 1),
    Planted("half-reduced precision", "bf16: weights are rounded after each update", "zero 3, bf16",
            weights_rounded_to_bf16, "weights", "half-reduced precision", "", "", LOW, 1),
    Planted("half-reduced precision", "bf16: first moments are rounded after each update", "copies, bf16",
            moments_rounded_to_bf16, "dtype", "half-reduced precision", "exp_avg in the optimizer", "", LOW, 1),
    Planted("half-reduced precision", "bf16: the loss is rounded before its backward pass", "zero 3, bf16",
            loss_in_bf16, "loss", "half-reduced precision", "loss", "", LOW, 1),
    Planted("router choice", "bf16: tensor ranks send a token to different experts", "experts, tensor, bf16",
            one_rank_chooses_otherwise, "decision", "update", "the experts that tokens go to", "", LOW, 1),
    Planted("loss scale", "fp16: one rank alone sees that gradients overflow", "copies, fp16",
            skipped_on_one_rank, "decision", "update", "loss scale", "ranks that must decide alike", LOW, 3),
]  # fmt: skip
