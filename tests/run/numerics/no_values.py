"""A device that holds no values: what a GPU would be asked for is found out on a machine that has none.

Tensors of torch's "meta" device have shapes and dtypes alone, so that code which reads a value of the device raises an
error, and so does most code that mixes tensors of the host with those of the device. Beside errors, `Crossings` notes
each copy from the host for which the host would wait on CUDA: torch waits for the stream wherever a copy is not
`non_blocking`, and `torch.tensor(numbers, device=...)` makes such a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import paceline.run.initial as initial
import paceline.task.models.layers.products as products
from paceline.run.numerics.host_numbers import NumbersOnTheWay

NO_VALUES = torch.device("meta")


class Crossings:
    """Notes where the host waits for a copy to the device while it is entered, by the line of ours that asks for it."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._entered = ExitStack()

    def __enter__(self) -> Crossings:
        self._entered.enter_context(_Made(self.seen))
        self._entered.enter_context(_Copied(self.seen))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._entered.close()


class _Made(TorchFunctionMode):
    """Sees tensors that are made of numbers of the host, which pass no dispatcher on this device."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor", "new_tensor") and out.device == NO_VALUES and out.numel():
            self._seen.append(f"{name} {_line()}")
        return out


class _Copied(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        if name in ("_to_copy", "copy_"):
            target, source = (out, args[0]) if name == "_to_copy" else args[:2]
            is_free = (kwargs or {}).get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
            if target.device == NO_VALUES and source.device.type == "cpu" and source.numel() and not is_free:
                self._seen.append(f"{name} {_line()}")
        return out


def _line() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and "/src/paceline/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/src/paceline/')[2]}:{frame.f_lineno}" if frame else "torch"


@pytest.fixture
def without_values(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let the runtime work on the device; return what tells how often the host has asked for numbers of steps.

    Of the runtime three things are others: initial weights are not drawn, the numbers of a step that arrive are ones,
    and the kernels that only CUDA has are taken.
    """
    asked: list[int] = []

    def arrived(coming: NumbersOnTheWay) -> list[float]:
        vector = coming._host
        assert vector.device == NO_VALUES
        asked.append(vector.numel())
        return [1.0] * vector.numel()

    monkeypatch.setattr(NumbersOnTheWay, "arrived", arrived)
    monkeypatch.setattr(initial, "fill_weights", lambda *given: None)
    monkeypatch.setattr(products, "has_grouped_products", lambda *given: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    # The fused kernels of Adam know the device; torch's own check of it does not.
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *given, **more: None)
    return lambda: len(asked)
