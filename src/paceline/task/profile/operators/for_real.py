"""A small program followed for real, where it never looks at values: the operators that fake tensors would show.

`FakeTensorMode` imports torch's compiler and sympy, which a small program's own kernels do not. A CPU chooses the same
operators for tensors with values. What would end a pass on fake tensors ends one here (`LooksAtValues`): whoever asks
for values may go another way by them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

MOST_BYTES = 64 << 20  # of a copy with values, in fp32
MOST_PAIRS = 1 << 24  # of places in samples, over all rows: scores of 2 rows of 2,896 tokens, for one head
MOST_SECONDS = 0.5  # of the processor, for each pass
FILLING = 0.01  # of weights that have no values yet
_SHOWS = frozenset({Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__int__,
                    Tensor.__float__, Tensor.__index__, Tensor.__contains__, Tensor.data_ptr})  # fmt: skip
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def is_short(batch: object) -> bool:
    """Return whether there is room for what grows with the square of a sample's length, such as scores of attention."""
    shapes = [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return all(shape[0] * max(shape[1:], default=1) ** 2 <= MOST_PAIRS for shape in shapes)


class LooksAtValues(Exception):
    """A program asks for values, changes what is not its copy's, or takes long: it is not to be followed for real."""


class WithoutLooking(TorchFunctionMode):
    """Ends a pass that asks for values in a way that no operator shows."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:  # fmt: skip
        if func in _SHOWS:
            raise LooksAtValues(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class PassLimits:
    """Ends a pass whose operators show values, or change what lies outside of the copy, or that takes long.

    `held` are the storages of the copy. An objective may keep tensors of its own: training is to find them as they are.
    """

    def __init__(self, held: Iterable[int]) -> None:
        self._began, self._own = time.thread_time(), set(held)

    def check(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Raise LooksAtValues before an operator that is not to run."""
        if any(tag in func.tags for tag in _TAGS):
            raise LooksAtValues(str(func))
        if func is torch.ops.aten.index.Tensor and any(map(_is_mask, tree_leaves(args[1]))):
            raise LooksAtValues("a mask as an index")
        if func._schema.is_mutable:
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
            for argument in func._schema.arguments:
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                for each in tree_leaves(given.get(argument.name)) if is_written else ():
                    if isinstance(each, Tensor) and each.untyped_storage()._cdata not in self._own:
                        raise LooksAtValues(f"{func} changes a tensor that is not the copy's")
        if time.thread_time() - self._began > MOST_SECONDS:
            raise LooksAtValues("it takes long")

    def made(self, outputs: Iterable[Tensor]) -> None:
        """Note what an operator has given: it may be changed."""
        self._own.update(output.untyped_storage()._cdata for output in outputs if output.layout is torch.strided)


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def with_values(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a tensor on the CPU in a dtype; of one that has no values yet, one that is filled."""
    if not tensor.is_meta:
        return tensor.detach().to("cpu", dtype, copy=True)
    return torch.full(tensor.shape, FILLING if dtype.is_floating_point else 0, dtype=dtype, device="cpu")
