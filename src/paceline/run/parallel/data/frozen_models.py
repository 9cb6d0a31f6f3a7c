"""Frozen models that only go forward, spread over all ranks that read different samples, whatever the trained one does.

Each rank holds a shard of every block and gathers a block when it is called: nothing of it waits for a backward pass,
so that each block is let go of at once, and there are no gradients to reduce.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.run.parallel.data.sharding import sharding_units
from paceline.run.parallel.data.uncut_parameters import stays_whole
from paceline.task.adapt.teacher import teachers_of


def taught_blocks(model: nn.Module) -> set[nn.Module]:
    """Return all modules inside the frozen models of a model."""
    return {module for teacher in teachers_of(model) for module in teacher.modules()}


def kept_as_they_are(model: nn.Module, taught: Collection[nn.Module] | None) -> Sequence[nn.Parameter] | None:
    """Return the parameters that the model casts itself: all (None), or those that no gathering casts."""
    if taught is None:
        return None
    gathered = {id(p) for module in taught for p in module.parameters(recurse=False) if not stays_whole(p)}
    return [parameter for parameter in model.parameters() if id(parameter) not in gathered]


def spread_teachers(
    model: nn.Module, blocks: Sequence[nn.Module], axis: DeviceMesh, compute: torch.dtype, master: torch.dtype
) -> None:
    """Shard the frozen models of a model over `axis`; `blocks` are the repeated blocks of the whole model."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # never on one device

    policy = MixedPrecisionPolicy(param_dtype=None if compute == master else compute)
    for teacher in teachers_of(model):
        inside = set(teacher.modules())
        left = {parameter for parameter in teacher.parameters() if stays_whole(parameter)}
        for parameter in teacher.parameters():
            if parameter not in left:
                parameter.data = parameter.data.contiguous()
        for unit in sharding_units(teacher, [block for block in blocks if block in inside]):
            fully_shard(unit, mesh=axis, mp_policy=policy, reshard_after_forward=True, ignored_params=left)
