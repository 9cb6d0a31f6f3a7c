"""Which formats gradients travel and rest in: collectives seen while a step runs, and what is held after it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MANY_VALUES = 64  # of 2^16 values one is a bf16 value by chance
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # averages over time
REDUCTIONS = ("reduce", "reduce_scatter", "allreduce", "all_reduce")


@dataclass(frozen=True)
class Seen:
    """A tensor of a format that it must not have."""

    what: str
    dtype: torch.dtype


class ReductionsSeen(TorchDispatchMode):
    """Records the formats of all tensors that ranks add up while it is active, but for those that ranks `apart` share.

    What tensor ranks add up inside of a layer are activations and their gradients, in the compute format by intent.
    """

    def __init__(self, wanted: torch.dtype, apart: Collection[int]) -> None:
        super().__init__()
        self.wanted, self.wrong = wanted, set[Seen]()
        self._apart = sorted(apart)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an operator's tensors where it is a collective that adds up, and run it."""
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its own collectives come by here next
        packet = func._overloadpacket.__name__.strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and packet.startswith(REDUCTIONS):
            leaves = tree_leaves((args, kwargs or {}))
            if not any(_ranks_of(leaf) == self._apart for leaf in leaves):
                for leaf in leaves:
                    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 1:
                        self._look(packet, leaf.dtype)
        return func(*args, **(kwargs or {}))

    def _look(self, operator: str, dtype: torch.dtype) -> None:
        if torch.finfo(dtype).bits < torch.finfo(self.wanted).bits:
            self.wrong.add(Seen(f"what {operator} adds up over the ranks", dtype))


def _ranks_of(leaf: Any) -> list[int] | None:
    """Return the ranks of a group, if an operator's argument is one or names one."""
    if isinstance(leaf, str):
        try:
            return sorted(dist.get_process_group_ranks(_resolve_process_group(GroupName(leaf))))
        except (LookupError, RuntimeError, ValueError):  # the name of something else, such as of the operation
            return None
    if not isinstance(leaf, torch.ScriptObject):
        return None
    try:
        return sorted(dist.get_process_group_ranks(dist.ProcessGroup.unbox(leaf)))
    except (RuntimeError, TypeError):  # another kind of object, such as the operation
        return None


def held_in_less(
    model: nn.Module, optimizer: torch.optim.Optimizer, wanted: torch.dtype, state_bits: Mapping[str, int]
) -> Iterator[Seen]:
    """Yield what of weights and gradients has fewer bits than `wanted`, and of optimizer state than one device's has.

    `state_bits` are those, by the key of the state; an optimizer of one's own may mean to keep few.
    """
    least = torch.finfo(wanted).bits
    for name, parameter in model.named_parameters():
        for what, tensor in (("the weight", parameter), ("the gradient", parameter.grad)):
            if tensor is not None and tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < least:
                yield Seen(f"{what} of {name}", tensor.dtype)
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            if torch.finfo(value.dtype).bits < min(least, state_bits.get(key, least)):
                yield Seen(f"{key} in the optimizer of {name}", value.dtype)
            # A moment of gradients that are few bits long themselves may be so too.
            elif key in MOMENTS and _is_rounded(value) and not _is_rounded(parameter.grad):
                yield Seen(f"{key} in the optimizer of {name}, by its values,", torch.bfloat16)


def _is_rounded(tensor: torch.Tensor | None) -> bool:
    """Return whether all of many values are such as bf16 has: averages over time are not, unless they were rounded."""
    if tensor is None:
        return False
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    values = local[local != 0]
    return values.numel() >= MANY_VALUES and torch.equal(values, values.bfloat16().to(values.dtype))
