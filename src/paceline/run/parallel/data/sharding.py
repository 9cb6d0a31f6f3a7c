"""The data axes: copies (`dp_replicate`), shards (`dp_shard`, FSDP2) and their product (HSDP).

Gradients are summed over ranks, never averaged: the step divides once, by the global weight.

| class  | kept between micro-batches | gathered weights | gradients are reduce-scattered |
|--------|----------------------------|------------------|--------------------------------|
| ZeRO-1 | whole gradients            | once a step      | once a step                    |
| ZeRO-2 | gradient shards            | once a step      | every micro-batch              |
| ZeRO-3 | gradient shards            | every forward and backward | every micro-batch    |
| ZeRO-3 | whole gradients            | every forward and backward | once a step          |

A plan says which of the last two (`Plan.whole_gradients`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ConfigError
from paceline.run.parallel.data.reached_weights import ReachedWeights
from paceline.run.parallel.data.unused_weights import fill_unused, param_groups, shard_unit
from paceline.run.process.groups import Mesh
from paceline.spec.plan import Plan
from paceline.task.models.held import is_sharded_unit, is_spread

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Shard


def sharding_units(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the modules whose weights are gathered together: blocks that share no weight with the rest; the model.

    A weight that two blocks share belongs to what holds both. FSDP2 would make two weights of it.
    """
    within = [{id(p) for p in block.parameters()} for block in blocks]
    holders = Counter(key for keys in within for key in keys)
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = {id(p) for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)}
    alone = [all(holders[key] == 1 and key not in outside for key in keys) for keys in within]
    return [*(block for block, is_alone in zip(blocks, alone, strict=True) if is_alone), model]


def shard(
    model: nn.Module,
    units: list[nn.Module],
    mesh: DeviceMesh,
    zero: int,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype,
    placed: Mapping[nn.Parameter, object] | None = None,
    whole: Collection[nn.Parameter] = (),
) -> None:
    """Shard the units, of which the last is the model, over `fsdp` (dp_shard x cp), with copies over `dp_replicate`.

    `mesh` is what `data_mesh` returns: without the second axis FSDP2 knows of one copy alone.

    Ranks of one `cp` group hold parts of the same sequences: their gradients are summed like those of other samples.
    Parameters in `placed` go where their entry says instead: a result of fully_shard's `shard_placement_fn`, or None
    for those that stay as they are, as do those in `whole`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy  # never on one device

    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == master_dtype else compute_dtype,
        reduce_dtype=None if compute_dtype == master_dtype else master_dtype,
    )
    # Of what an in-place change of a view would do: that is an error in words here (calls.py), and views are common.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    elsewhere = placed or {}
    left = {parameter for parameter, place in elsewhere.items() if place is None} | set(whole)
    _make_contiguous(model, left)

    def placement(parameter: nn.Parameter) -> Any:
        return elsewhere[parameter] if parameter in elsewhere else _dimension(parameter)

    for unit in units:
        # The root's weights are used last in forward and first in backward: dropping them between gains nothing.
        drop = zero == 3 and unit is not model
        shard_unit(
            unit,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=drop,
            shard_placement_fn=placement,
            ignored_params=left,
        )
    for module in model.modules():
        if is_sharded_unit(module):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has neither AVG nor PREMUL_SUM


def data_mesh(mesh: Mesh, plan: Plan) -> DeviceMesh:
    """Return the axes that weights are sharded over and, where FSDP2 is to sum over copies exactly, copied over."""
    return mesh["dp_replicate", "fsdp"] if plan.layout.dp_replicate > 1 and plan.sync.is_plain else mesh["fsdp"]


def _make_contiguous(model: nn.Module, left: Collection[nn.Parameter]) -> None:
    """Store every weight that is to be sharded row after row, as FSDP2 wants it. Its values stay.

    Raises ConfigError where two weights are views of the same memory: sharded, they would be two.
    """
    sharded = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter not in left and not is_spread(parameter)
    ]
    stored = [(parameter.data_ptr(), name, parameter) for name, parameter in sharded if not parameter.is_meta]
    end, owner = 0, ""
    for start, name, parameter in sorted(stored, key=lambda item: item[0]):
        if start < end:
            raise ConfigError(
                f"'{name}' is a view of the memory of '{owner}'",
                "they are two parameters, of which each changes the other; shards of them would not",
                "one nn.Parameter that both modules hold, or dp_replicate",
            )
        reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        end, owner = start + (reach + 1) * parameter.element_size(), name
    for _, parameter in sharded:
        parameter.data = parameter.data.contiguous()


def _dimension(parameter: nn.Parameter) -> Shard | None:
    """Return the dimension to shard, None for the first.

    A matrix whose rows are split over another axis is sharded by columns: torch cuts rows twice for even parts only and
    makes DTensors of it whose full tensor takes one collective after the other.
    """
    from torch.distributed.tensor import Shard

    rows_split = is_spread(parameter) and any(place.is_shard(0) for place in parameter.placements)
    return Shard(1) if rows_split and parameter.dim() > 1 else None


class ShardedGradients:
    """Tells FSDP2 when to communicate in a step of several micro-batches.

    FSDP2 reduces zeros for a weight that a rank's backward pass did not reach (unused_weights.py), so that ranks which
    reach other weights of a unit stay together. A weight that no rank reached must not have a gradient, as on one
    device, where an optimizer would leave it alone: ranks therefore count, in steps in which any of them missed a
    weight.
    """

    def __init__(
        self,
        model: nn.Module,
        zero: int,
        once: bool,
        axes: DeviceMesh,
        left: Collection[nn.Parameter] = (),
        also: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        """`once` is whether gradients are reduced once a step, and `axes` are those of `shard`.

        Over the groups in `also` gradients are summed by somebody else.
        """
        assert is_sharded_unit(model)
        self._model = model
        self._zero, self._once = zero, once
        self._replicated = axes.ndim > 1
        self.groups = [*(axes.get_group(axis) for axis in range(axes.ndim)), *also]
        self._reached = ReachedWeights(model, self.groups, left)
        self._gathered = False
        self._passes = 0  # of the step, so far
        self._told: dict[str, bool] = {}  # to FSDP2, which walks over all modules to take it

    def _fill_accumulated(self) -> None:
        """Put zeros where whole gradients of other passes would be, of weights that those did not reach.

        FSDP2 sums up whole gradients in the dtype in which it reduces them, and reduces gradients of one dtype alone.
        """
        for unit in self.units:
            for group in param_groups(unit):
                for held in group.fsdp_params:
                    weight = held.unsharded_param
                    missing = held.unsharded_accumulated_grad is None and weight.grad is None
                    if missing and weight.requires_grad and held.reduce_dtype is not None:
                        held.unsharded_accumulated_grad = torch.zeros_like(weight, dtype=held.reduce_dtype)

    def gather(self) -> None:
        """Gather what must be whole before a pass begins: all weights that lie outside of the blocks."""
        units = self.units
        if self._once and not self._gathered:
            for unit in units[1:]:  # torch 2.13 keeps whole gradients of units that were gathered before alone
                unit.unshard()
                unit.reshard()
            self._gathered = True
        self._unshard(units[:1])

    def _unshard(self, units: list[FSDPModule]) -> None:
        for unit in units:
            unit.unshard()
            assert isinstance(unit, nn.Module)
            self._reached.look(unit)

    def zero(self) -> None:
        """Forget the last step's gradients."""
        # An evaluation leaves weights gathered: the model's parameters are then not the shards that have gradients.
        for unit in self.units:
            unit.reshard()
        self._model.zero_grad(set_to_none=True)
        self._reached.forget()
        self._passes = 0

    def sharded(self) -> list[nn.Parameter]:
        """Return the weights that FSDP2 holds in shards, in the order in which a backward pass completes units."""
        first, *others = self.units
        held = {p: None for unit in [*reversed(others), first] for p in _parameters(unit) if is_spread(p)}
        return list(held)

    @cached_property
    def units(self) -> list[FSDPModule]:
        """The modules whose weights are gathered together, the model first."""
        return [module for module in self._model.modules() if is_sharded_unit(module)]

    def _tell(self, **switches: bool) -> None:
        """Set switches of all units, by the names of FSDP2's own methods, that do not stand so already."""
        for name, value in switches.items():
            if self._told.get(name) is not value:
                getattr(self._model, f"set_{name}")(value)
                self._told[name] = value

    def before_micro_batch(self, last: bool) -> None:
        """Set what the coming backward pass communicates; `last` is the step's last micro-batch."""
        if self._once:
            self._tell(requires_gradient_sync=last)
            if last and self._passes:
                self._fill_accumulated()
        self._passes += 1
        if self._zero < 3:
            self._tell(reshard_after_backward=last)
        if self._replicated:
            self._tell(requires_all_reduce=last)
        self._model.set_is_last_backward(last)

    def finish(self) -> None:
        """Return once gradients are complete: FSDP2 waits at the end of the last backward pass itself."""

    def unreached(self) -> int:
        """Return how many weights this rank's backward passes did not reach."""
        return self._reached.missed()

    def settle(self) -> None:
        """Take the gradients from weights that no rank reached; called on all ranks where any rank missed one."""
        self._reached.drop_unreached(self._model)


def _parameters(unit: FSDPModule) -> list[nn.Parameter]:
    assert isinstance(unit, nn.Module)
    return list(unit.parameters())


class GatheredGradients(ShardedGradients):
    """Gradients of a model of which all weights are gathered before each pass, in one order, and stay to its end.

    Its ranks may call other blocks, in another order, or use weights outside of their blocks. Gradients stay whole
    until the step's last pass is over, as in ZeRO-1, and are then reduced in one order.
    """

    def gather(self) -> None:
        """Gather all weights."""
        self._unshard(self.units)

    def before_micro_batch(self, last: bool) -> None:
        """Have the coming backward pass communicate nothing."""
        self._tell(requires_gradient_sync=False, reshard_after_backward=False)
        self._model.set_is_last_backward(last)

    def finish(self) -> None:
        """Reduce the gradients of all units, one after the other."""
        self._tell(requires_gradient_sync=True, reshard_after_backward=True)
        self._fill_accumulated()
        fill_unused(self.units)
        self._model._get_fsdp_state()._root_post_backward_final_callback()
