"""The data axes: copies (`dp_replicate`), shards (`dp_shard`, FSDP2) and their product (HSDP).

Gradients are summed over ranks, never averaged: the step divides once, by the global weight.

| class  | kept between micro-batches | gathered weights | gradients are reduce-scattered |
|--------|----------------------------|------------------|--------------------------------|
| ZeRO-1 | whole gradients            | once a step      | once a step                    |
| ZeRO-2 | gradient shards            | once a step      | every micro-batch              |
| ZeRO-3 | gradient shards            | every forward and backward | every micro-batch    |
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from paceline.plan.layout import Layout


def shard(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: DeviceMesh,
    layout: Layout,
    zero: int,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype,
) -> None:
    """Shard the blocks and then the rest of the model over `fsdp` (dp_shard x cp), with copies over `dp_replicate`.

    Ranks of one `cp` group hold parts of the same sequences: their gradients are summed like those of other samples.
    """
    axes = mesh["dp_replicate", "fsdp"] if layout.dp_replicate > 1 else mesh["fsdp"]
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == master_dtype else compute_dtype, reduce_dtype=master_dtype
    )
    for unit in [*blocks, model]:
        # The root's weights are used last in forward and first in backward: dropping them between gains nothing.
        drop = zero == 3 and unit is not model
        fully_shard(unit, mesh=axes, mp_policy=policy, reshard_after_forward=drop)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has neither AVG nor PREMUL_SUM


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
