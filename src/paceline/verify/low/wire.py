"""Which formats gradients travel and rest in: collectives seen while a step runs, and what is held after it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.run.parallel.context.sequence_attention import INSIDE
from paceline.run.parallel.gradients import Gradients
from paceline.task.models.held import local_of

MANY_VALUES = 64  # of 2^16 values one is a bf16 value by chance
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # averages over time
LOW = (torch.bfloat16, torch.float16)
EXCHANGES = ("alltoall", "all_to_all")
REDUCTIONS = ("reduce", "reduce_scatter", "allreduce", "all_reduce")


@dataclass(frozen=True)
class Seen:
    """A tensor of a format that it must not have."""

    what: str
    dtype: torch.dtype
    wanted: torch.dtype = torch.float32
    is_exchanged: bool = False  # whether ranks send it to each other, all to all


class CollectivesSeen(TorchDispatchMode):
    """Records the formats of what ranks add up and exchange while it is active that are not as they must be.

    What is added up is in `wanted` at least. What tensor ranks (`apart`) add up inside of a layer are activations and
    their gradients, in the compute format by intent; once backward passes are over (`at_the_end`), gradients. Rows that
    ranks exchange all to all are activations, in `compute` and no other format: more would be twice the bytes.
    """

    def __init__(self, wanted: torch.dtype, compute: torch.dtype, apart: Collection[int]) -> None:
        super().__init__()
        self.wanted, self.compute, self.wrong = wanted, compute, set[Seen]()
        self.at_the_end = False
        self._apart = sorted(apart)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        """Look at an operator's tensors where it is a collective, and run it."""
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its own collectives come by here next
        if func.namespace in ("c10d", "_c10d_functional"):
            self._look(func._overloadpacket.__name__.strip("_"), tree_leaves((args, kwargs or {})))
        inside = INSIDE.get(func._overloadpacket.__name__) if func.namespace == "paceline" else None
        if inside is not None:
            with self:
                return inside(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _look(self, operator: str, leaves: Sequence[object]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.numel() > 1}
        if operator.startswith(EXCHANGES):
            what = f"what {operator} sends to other ranks"
            self.wrong |= {Seen(what, dtype, self.compute, True) for dtype in dtypes if dtype != self.compute}
        if operator.startswith(REDUCTIONS):
            inside = not self.at_the_end and any(_ranks_of(leaf) == self._apart for leaf in leaves)
            few = {dtype for dtype in dtypes if torch.finfo(dtype).bits < torch.finfo(self.wanted).bits}
            if not inside:
                self.wrong |= {Seen(f"what {operator} adds up over the ranks", dtype, self.wanted) for dtype in few}


@dataclass(frozen=True)
class Finishing:
    """Gradients that come together as `inner` says, and tell those who look at the wire that passes are over."""

    inner: Gradients
    wire: CollectivesSeen

    def zero(self) -> None:
        """Forget the last step's gradients."""
        self.inner.zero()

    def before_micro_batch(self, last: bool) -> None:
        """Prepare the coming backward pass."""
        self.inner.before_micro_batch(last)

    def finish(self) -> None:
        """Return once the sums are complete."""
        self.wire.at_the_end = True
        try:
            self.inner.finish()
        finally:
            self.wire.at_the_end = False

    def unreached(self) -> int:
        """Return how many parameters this rank's backward passes did not reach."""
        return int(self.inner.unreached())

    def settle(self) -> None:
        """Take the gradients from parameters that no rank reached."""
        self.inner.settle()


def _ranks_of(leaf: object) -> list[int] | None:
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


def bits_of_values(tensor: torch.Tensor) -> int:
    """Return the bits of a tensor's format, or 16 where all of many values are such as bf16 or fp16 has.

    Averages, sums and quotients are not, unless they were rounded.
    """
    local = local_of(tensor)
    values = local.detach()[local.detach() != 0]
    many = values.numel() >= MANY_VALUES
    rounded = many and any(torch.equal(values, values.to(low).to(values.dtype)) for low in LOW)
    return min(16, torch.finfo(tensor.dtype).bits) if rounded else torch.finfo(tensor.dtype).bits


def _is_rounded(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and bits_of_values(tensor) <= 16
