"""Entering a sharded model: what must happen around an objective, whatever it calls the model by.

FSDP2 acts when modules are called. An objective may also call `model.encode(x)`, a layer, or use a weight of the model
by itself; what lies outside of the blocks is therefore gathered before it begins, and reduced after the backward pass
of the loss whether the model itself was called or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.errors import ConfigError
from paceline.run.parallel.calls import Calls
from paceline.run.parallel.data.sharding import GatheredGradients, ShardedGradients
from paceline.task.objective import Objective


def entry_of(
    model: nn.Module, gradients: Any, device: torch.device
) -> Callable[[Objective, nn.Module, object], object]:
    """Return what calls an objective on (model, batch), where gradients come together as `gradients` says."""
    while hasattr(gradients, "inner"):
        gradients = gradients.inner
    if not isinstance(gradients, ShardedGradients):
        return call
    calls = None
    if not isinstance(gradients, GatheredGradients) and max(group.size() for group in gradients.groups) > 1:
        names = {module: name for name, module in model.named_modules()}
        units: list[Any] = gradients.units
        calls = Calls([names[unit] for unit in units], gradients.groups, device)
        calls.watch(units)
    return _Entry(gradients, calls)


def call(objective: Objective, model: nn.Module, batch: Any, turn: int = 0) -> Any:
    """Return what the objective returns for a model that needs no more."""
    return objective(model, batch)


@dataclass
class _Entry:
    gradients: ShardedGradients
    calls: Calls | None

    def __call__(self, objective: Objective, model: nn.Module, batch: object, turn: int = 0) -> object:
        """Return what the objective of a turn returns."""
        assert isinstance(model, FSDPModule)
        state = model._get_fsdp_state()
        state._lazy_init()  # a block that is called first would take itself for the root
        if self.calls is not None:
            self.calls.begin(turn)
        self.gradients.gather()
        try:
            loss_sum, weight = objective(model, batch)
        except RuntimeError as error:
            owner = _sharded_in(error)
            if owner is None:
                raise
            raise _outside(owner, f": {type(error).__name__}: {error}") from error
        if isinstance(loss_sum, DTensor):
            raise _outside("model", ", and made the loss a sharded tensor")
        if torch.is_grad_enabled() and loss_sum.requires_grad:
            state._register_pre_backward_hook(loss_sum)
        return loss_sum, weight


def _outside(owner: str, told: str) -> ConfigError:
    return ConfigError(
        f"a weight of a {owner} was used outside of the block that it belongs to",
        f"under dp_shard a block's weights are whole while the block runs, and shards else{told}",
        "an attribute `needs_whole_weights = True` on the model, which gathers all weights before each pass and keeps "
        "them to its end; or dp_replicate",
    )


def _sharded_in(error: RuntimeError) -> str | None:
    """Return the class of a module that computed with shards when the error came, or "model"; None where none did."""
    found = "model" if DTensor.__name__ in str(error) else None
    trace = error.__traceback__
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            own = [] if isinstance(value, FSDPModule) or not isinstance(value, nn.Module) else value.parameters(False)
            if any(isinstance(parameter, DTensor) for parameter in own):
                found = type(value).__name__
        trace = trace.tb_next
    return found
