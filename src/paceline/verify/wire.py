"""Which formats gradients travel and rest in: collectives seen while a step runs, and what is held after it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MANY_VALUES = 64  # of 2^16 values one is a bf16 value by chance
REDUCTIONS = ("reduce", "reduce_scatter", "allreduce", "all_reduce")


@dataclass(frozen=True)
class Seen:
    """A tensor of a format that it must not have."""

    what: str
    dtype: torch.dtype


class ReductionsSeen(TorchDispatchMode):
    """Records the formats of all tensors that ranks add up while it is active, but for those added over `apart`.

    What tensor ranks add up inside of a layer are activations and their gradients, in the compute format by intent.
    """

    def __init__(self, wanted: torch.dtype, apart: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.wanted, self.wrong = wanted, set[Seen]()
        self._apart = apart.group_name if apart is not None else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an operator's tensors where it is a collective that adds up, and run it."""
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its own collectives come by here next
        packet = func._overloadpacket.__name__.strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and packet.startswith(REDUCTIONS):
            leaves = tree_leaves((args, kwargs or {}))
            if not any(_is_group(leaf, self._apart) for leaf in leaves):
                for leaf in leaves:
                    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 1:
                        self._look(packet, leaf.dtype)
        return func(*args, **(kwargs or {}))

    def _look(self, operator: str, dtype: torch.dtype) -> None:
        if torch.finfo(dtype).bits < torch.finfo(self.wanted).bits:
            self.wrong.add(Seen(f"what {operator} adds up over the ranks", dtype))


def _is_group(leaf: Any, name: str) -> bool:
    """Return whether an operator's argument is the group of this name."""
    if not name:
        return False
    if isinstance(leaf, torch.ScriptObject) and hasattr(dist.ProcessGroup, "unbox"):
        try:
            return dist.ProcessGroup.unbox(leaf).group_name == name
        except (RuntimeError, TypeError):  # another kind of object, such as the operation to reduce by
            return False
    return isinstance(leaf, str) and leaf == name


def held_in_less(model: nn.Module, optimizer: torch.optim.Optimizer, wanted: torch.dtype) -> Iterator[Seen]:
    """Yield what of weights, gradients and optimizer state has fewer bits than `wanted`."""
    for name, parameter in model.named_parameters():
        held = {"the weight": parameter, "the gradient": parameter.grad}
        state = optimizer.state.get(parameter, {})
        held |= {f"{key} in the optimizer": value for key, value in state.items() if isinstance(value, torch.Tensor)}
        for what, tensor in held.items():
            if tensor is not None and tensor.is_floating_point() and _bits(tensor) < torch.finfo(wanted).bits:
                yield Seen(f"{what} of {name}", tensor.dtype)
            elif tensor is not None and what.startswith("exp_avg") and _is_rounded(tensor):
                yield Seen(f"{what} of {name}, rounded", torch.bfloat16)


def _is_rounded(tensor: torch.Tensor) -> bool:
    """Return whether all of many values are such as bf16 has: averages over time are not, unless they were rounded."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    values = local[local != 0]
    return values.numel() >= MANY_VALUES and torch.equal(values, values.bfloat16().to(values.dtype))


def _bits(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).bits if tensor.is_floating_point() else math.inf
