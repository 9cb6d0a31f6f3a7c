"""Counts where the host would wait for the device, while everything runs on a CPU.

On CUDA the host waits where a tensor's values become Python's (`item`, `tolist`, `float`, an `if`) and where an
operator cannot know the shape of its result without them. A CPU computes the same calls, so they can be counted without
a GPU.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

# What reads values without passing torch's dispatcher.
READS = {f"torch.Tensor.{name}" for name in ("tolist", "numpy", "__array__", "cpu")}
# Operators that copy to the host, or whose result has a shape that only the device knows.
OPERATORS = {
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "bincount", "masked_select", "unique_dim", "_unique2",
    "unique_consecutive", "equal", "is_nonzero", "histc", "argwhere",
}  # fmt: skip


class HostWaits:
    """Notes every wait, in the forward pass and in the backward pass, while it is entered."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._entered = ExitStack()

    def __enter__(self) -> HostWaits:
        self._entered.enter_context(_Calls(self.seen))
        self._entered.enter_context(_Operators(self.seen))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._entered.close()


class _Calls(TorchFunctionMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = resolve_name(func) or ""
        if name in READS:
            self._seen.append(name)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        indexed = name in ("index", "index_put", "index_put_") and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in args[1]
        )
        # States of random generators are bytes, on the host for every device.
        on_host = any(isinstance(one, torch.Tensor) and one.dtype == torch.uint8 for one in args)
        if (
            (name in OPERATORS and not on_host)
            or indexed
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        ):
            self._seen.append(name)
        return func(*args, **kwargs)
