"""Entering a sharded model: what must happen around an objective, whatever it calls the model by.

FSDP2 acts when modules are called. An objective may also call `model.encode(x)`, a layer, or use a weight of the model
by itself; what lies outside of the blocks is therefore gathered before it begins, and reduced after the backward pass
of the loss whether the model itself was called or not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from paceline.errors import ConfigError, NeedsWholeWeights
from paceline.foreign_errors import is_of_inference_mode, is_of_memory_let_go, is_of_shards
from paceline.run.parallel.calls import WHOLE, Calls, let_go
from paceline.run.parallel.data.sharding import GatheredGradients, ShardedGradients
from paceline.run.parallel.data.unused_weights import fill_before_reduction
from paceline.task.models.held import is_sharded_unit, is_spread
from paceline.task.objective import Objective


def entry_of(
    model: nn.Module, gradients: Any, device: torch.device
) -> Callable[[Objective, nn.Module, object], object]:
    """Return what calls an objective on (model, batch), where gradients come together as `gradients` says."""
    while hasattr(gradients, "inner"):
        gradients = gradients.inner
    if not isinstance(gradients, ShardedGradients):
        return call
    _refuse_gradients_of_shards(model, gradients.sharded())
    calls = None
    if not isinstance(gradients, GatheredGradients) and max(group.size() for group in gradients.groups) > 1:
        names = {module: name for name, module in model.named_modules()}
        units: list[Any] = gradients.units
        calls = Calls([names[unit] for unit in units], gradients.groups, device)
        calls.watch(units)
    return _Entry(gradients, calls)


def call(objective: Objective, model: nn.Module, batch: Any, turn: int = 0) -> Any:
    """Return what the objective returns for a model that needs no more.

    Raises ConfigError where an objective takes logits that tensor ranks share for plain ones.
    """
    try:
        return objective(model, batch)
    except RuntimeError as error:
        if not is_of_shards(error) or not _has_met_spread_logits(error):
            raise
        name = getattr(objective, "__name__", type(objective).__name__)
        raise ConfigError(
            f"the objective {name} computes with logits that tensor ranks share",
            "under tp a head with the rule 'vocabulary' returns its logits as a DTensor, of which each rank has some"
            f" classes: {type(error).__name__}: {error}",
            "logits.full_tensor(), which gives every rank all of them, where they are a DTensor; or no rule for it",
        ) from error


def _has_met_spread_logits(error: RuntimeError) -> bool:
    """Return whether a frame of an error holds an activation whose last dimension is spread over tensor ranks."""
    held, trace = list[Any](), error.__traceback__
    while trace is not None:
        held += trace.tb_frame.f_locals.values()
        trace = trace.tb_next
    spread = (value for value in held if is_spread(value) and value.device_mesh.mesh_dim_names == ("tp",))
    return any(not isinstance(x, nn.Parameter) and x.placements[0].is_shard(x.dim() - 1) for x in spread)


def _refuse_gradients_of_shards(model: nn.Module, shards: Sequence[nn.Parameter]) -> None:
    """Have a backward pass raise NeedsWholeWeights where it comes to a shard itself.

    FSDP2 gives shards their gradients, from weights that it has gathered. autograd comes to one where a program took a
    weight while its block did not run, as a Function that is handed a block's weights does.
    """
    owners = {p: type(module).__name__ for module in model.modules() for p in module.parameters(recurse=False)}

    def refuse(owner: str) -> Callable[[torch.Tensor], None]:
        @unserializable_hook
        def came(gradient: torch.Tensor) -> None:
            raise _outside(owner, ", and the backward pass has a gradient for a shard")

        return came

    for shard in shards:
        if shard.requires_grad:
            shard.register_hook(refuse(owners[shard]))


def told_by(entry: object) -> AbstractContextManager[None]:
    """Return what errors of a backward pass are told by, where `entry` is what its objective was called by."""
    return entry.told() if isinstance(entry, _Entry) else contextlib.nullcontext()


@dataclass
class _Entry:
    gradients: ShardedGradients
    calls: Calls | None

    def __call__(self, objective: Objective, model: nn.Module, batch: object, turn: int = 0) -> object:
        """Return what the objective of a turn returns."""
        assert is_sharded_unit(model)
        state = model._get_fsdp_state()
        state._lazy_init()  # a block that is called first would take itself for the root
        if self.calls is not None:
            self.calls.begin(turn)
        self.gradients.gather()
        with self.told(), self.calls.in_objective() if self.calls is not None else contextlib.nullcontext():
            loss_sum, weight = call(objective, model, batch)
        if self.calls is not None:
            self.calls.finish()
        if is_spread(loss_sum):
            raise _outside("model", ", and made the loss a sharded tensor")
        if torch.is_grad_enabled() and loss_sum.requires_grad:
            fill_before_reduction(model, loss_sum)
            state._register_pre_backward_hook(loss_sum)
        return loss_sum, weight

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Within it an error of torch that comes of computing with shards says so, and what to do."""
        try:
            yield
        except RuntimeError as error:
            if is_of_inference_mode(error):
                raise ConfigError(
                    "a block is called under torch.inference_mode, and again where it is trained",
                    "under dp_shard its weights are gathered when it is called, and what is made in that mode cannot be"
                    f" trained or changed outside of it: {error}",
                    "torch.no_grad() in the place of torch.inference_mode(); or dp_replicate",
                ) from error
            if is_of_memory_let_go(error):
                raise let_go(f": {error}") from error
            owner = _sharded_in(error)
            if owner is None:
                raise
            raise _outside(owner, f": {type(error).__name__}: {error}") from error


def _outside(owner: str, told: str) -> NeedsWholeWeights:
    return NeedsWholeWeights(
        f"a weight of a {owner} was used outside of the block that it belongs to",
        f"under dp_shard a block's weights are whole while the block runs, and shards else{told}",
        WHOLE,
    )


def _sharded_in(error: RuntimeError) -> str | None:
    """Return the class of a module that computed with shards when the error came, or "model"; None where none did."""
    found = "model" if is_of_shards(error) else None
    trace = error.__traceback__
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            own = [] if is_sharded_unit(value) or not isinstance(value, nn.Module) else value.parameters(False)
            if any(is_spread(parameter) for parameter in own):
                found = type(value).__name__
        trace = trace.tb_next
    return found
