"""Zeros are reduced for weights that a rank's backward pass did not reach, so that ranks which reach others agree.

FSDP2 puts the gradients of a unit into one buffer and leaves out weights without one. Buffers of ranks that reached
other weights would differ in length, or, where the lengths happen to be equal, in what lies where: the sum would be
wrong and nothing would say so. torch 2.13 has a switch for zeros. Before, they are put here at the last moment, when
the gradients of a unit are complete and FSDP2 is about to reduce them. FSDP2 does that in a node of the graph behind
the unit's inputs, and for units whose inputs need no gradient in a callback at the end of the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from paceline.task.models.held import is_sharded_unit

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_REDUCES = "RegisterPostBackwardFunctionBackward"  # the node in which FSDP2 reduces a unit


def shard_unit(unit: nn.Module, **options: Any) -> None:
    """Call `fully_shard` on a unit, and have zeros reduced for its weights that a backward pass did not reach."""
    from torch.distributed.fsdp import fully_shard  # never on one device

    if not has_switch():  # behind FSDP2's first hook, and before its last: it puts its own in front, and at the end
        unit.register_forward_pre_hook(_at_inputs, prepend=True, with_kwargs=True)
        unit.register_forward_hook(_at_outputs, prepend=True)
    fully_shard(unit, **options)
    if has_switch():
        assert is_sharded_unit(unit)
        unit.set_reduce_scatter_unused_params(True, recurse=False)


@functools.cache
def has_switch() -> bool:
    """Return whether FSDP2 reduces zeros by itself: torch 2.13."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def param_groups(unit: FSDPModule) -> list[Any]:
    """Return what FSDP2 holds of a unit: the groups of weights that are reduced together."""
    return _groups_of(unit._get_fsdp_state())


def fill_unused(units: Iterable[FSDPModule]) -> None:
    """Put zeros where gradients are missing in units that FSDP2 is going to reduce."""
    if not has_switch():
        for unit in units:
            _fill(unit._get_fsdp_state())


def fill_before_reduction(unit: FSDPModule, found: Any) -> None:
    """Have the backward pass of tensors end with zeros in all units, before FSDP2 reduces those that are left.

    To be called before FSDP2 watches the tensors: callbacks run in the order in which they were asked for.
    """
    if has_switch() or not torch.is_grad_enabled():
        return
    context = unit._get_fsdp_state()._state_ctx

    def ask(_: torch.Tensor) -> None:
        if not context.post_backward_final_callback_queued:  # FSDP2 asks next
            Variable._execution_engine.queue_callback(fill_all)

    def fill_all() -> None:
        for state in context.all_states:
            _fill(state)

    for tensor in tree_leaves(found):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(ask)


def _at_inputs(unit: nn.Module, args: Any, kwargs: Any) -> None:
    assert is_sharded_unit(unit)
    state: Any = unit._get_fsdp_state()
    for tensor in tree_leaves((args, kwargs)):
        node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
        if node is not None and node.name() == _REDUCES:
            node.register_prehook(lambda _: _fill(state))  # one node for all inputs
            return


def _at_outputs(unit: nn.Module, _: Any, found: Any) -> None:
    assert is_sharded_unit(unit)
    fill_before_reduction(unit, found)


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.12
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _fill(state: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for group in _groups_of(state):
        if not group.reduce_grads or group._training_state == TrainingState.POST_BACKWARD:  # reduced already
            continue
        for held in group.fsdp_params:
            weight = getattr(held, "_unsharded_param", None)  # none where it was never gathered
            if weight is None or not weight.requires_grad or held.unsharded_accumulated_grad is not None:
                continue
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
