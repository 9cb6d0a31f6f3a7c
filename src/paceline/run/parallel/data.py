"""The data axes: copies (`dp_replicate`), shards (`dp_shard`, FSDP2) and their product (HSDP).

Gradients are summed over ranks, never averaged: the step divides once, by the global weight.

| class  | kept between micro-batches | gathered weights | gradients are reduce-scattered |
|--------|----------------------------|------------------|--------------------------------|
| ZeRO-1 | whole gradients            | once a step      | once a step                    |
| ZeRO-2 | gradient shards            | once a step      | every micro-batch              |
| ZeRO-3 | gradient shards            | every forward and backward | every micro-batch    |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from paceline.plan.layout import Layout


def shard(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: DeviceMesh,
    layout: Layout,
    zero: int,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype,
    placed: Mapping[nn.Parameter, Any] | None = None,
) -> None:
    """Shard the blocks and then the rest of the model over `fsdp` (dp_shard x cp), with copies over `dp_replicate`.

    Ranks of one `cp` group hold parts of the same sequences: their gradients are summed like those of other samples.
    Parameters in `placed` go where their entry says instead: a result of fully_shard's `shard_placement_fn`, or None
    for those that stay as they are.
    """
    axes = mesh["dp_replicate", "fsdp"] if layout.dp_replicate > 1 else mesh["fsdp"]
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == master_dtype else compute_dtype, reduce_dtype=master_dtype
    )
    elsewhere = placed or {}
    left = {parameter for parameter, place in elsewhere.items() if place is None}

    def placement(parameter: nn.Parameter) -> Any:
        return elsewhere[parameter] if parameter in elsewhere else _dimension(parameter)

    for unit in [*blocks, model]:
        # The root's weights are used last in forward and first in backward: dropping them between gains nothing.
        drop = zero == 3 and unit is not model
        fully_shard(
            unit,
            mesh=axes,
            mp_policy=policy,
            reshard_after_forward=drop,
            shard_placement_fn=placement,
            ignored_params=left,
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has neither AVG nor PREMUL_SUM


def _dimension(parameter: nn.Parameter) -> Shard | None:
    """Return the dimension to shard, None for the first.

    A matrix whose rows are split over another axis is sharded by columns: torch cuts rows twice for even parts only and
    makes DTensors of it whose full tensor takes one collective after the other.
    """
    rows_split = isinstance(parameter, DTensor) and any(place.is_shard(0) for place in parameter.placements)
    return Shard(1) if rows_split and parameter.dim() > 1 else None


class ShardedGradients:
    """Tells FSDP2 when to communicate in a step of several micro-batches."""

    def __init__(self, model: nn.Module, zero: int, replicated: bool) -> None:
        assert isinstance(model, FSDPModule)
        self._model = model
        self._zero = zero
        self._replicated = replicated

    def zero(self) -> None:
        """Forget the last step's gradients."""
        # An evaluation leaves weights gathered: the model's parameters are then not the shards that have gradients.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._model.zero_grad(set_to_none=True)

    def before_micro_batch(self, last: bool) -> None:
        """Set what the coming backward pass communicates; `last` is the step's last micro-batch."""
        if self._zero == 1:
            self._model.set_requires_gradient_sync(last)
        if self._zero < 3:
            self._model.set_reshard_after_backward(last)
        if self._replicated:
            self._model.set_requires_all_reduce(last)
        self._model.set_is_last_backward(last)

    def finish(self) -> None:
        """Return once gradients are complete: FSDP2 waits at the end of the last backward pass itself."""
