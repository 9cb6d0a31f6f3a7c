"""Thresholds of the user's own code, and on which of their sides a proof has seen numbers.

What a program does beyond a threshold that no number reaches, such as keeping at least eight rows where few losses are
large, shows in no comparison. A proof looks for weights that reach it, and says what none did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.task.own_code import OURS, is_installed

COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
BOUNDS = ("clamp", "clamp_min", "clamp_max", "maximum", "minimum")  # they act where a number is not the first operand's
NUMBER = "_local_scalar_dense"  # what item(), float(), int() and bool() of a tensor ask for
ARRAYS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)  # which ask for no operator
AskedAt = tuple[str, int, int]  # file, line, place of the call in its code (a line may have several)


class ThresholdsSeen(TorchDispatchMode):
    """Keeps, by its place in code that is neither ours nor installed, whether a threshold acted and whether it did not.

    Thresholds that torch is asked for are seen. Of a comparison of Python's own numbers nothing is seen but where they
    come from: `loss.item()`, `float(x.max())`, `x.tolist()`. What is asked within a function that is `aside`, such as
    that which reads data, is no threshold: it knows no weights.
    """

    def __init__(self, *aside: Callable[..., object]) -> None:
        super().__init__()
        self._aside = {getattr(function, "__code__", None) for function in aside}
        self._sides: dict[tuple[AskedAt, str], set[bool]] = {}  # by place and operator
        self._known: dict[str, bool] = {}  # whether a file is the user's own
        self._gives_numbers = False  # whether the user's code has had numbers of Python's
        self._to_python = _ToPython(self)

    @property
    def has_any(self) -> bool:
        """Whether there is a threshold in code of the user's own, or numbers that Python may compare."""
        return bool(self._sides) or self._gives_numbers

    def one_sided(self) -> list[str]:
        """Return the thresholds that have one side alone, such as `losses.py:12 (> always true)`, alike ones once."""
        told = [
            f"{Path(file).name}:{line} ({_said(operator, True in sides)})"
            for ((file, line, _), operator), sides in self._sides.items()
            if len(sides) == 1
        ]
        return list(dict.fromkeys(told))  # a line may have several

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        if name == NUMBER:
            self.look_at_number()
        is_threshold = name in COMPARISONS or name in BOUNDS
        if is_threshold and isinstance(found, torch.Tensor) and found.numel() and (asked := self._asked_at()):
            acted = found if name in COMPARISONS else found != args[0]
            sides = self._sides.setdefault((asked, name), set())
            sides.update(side for side, there in ((True, acted.any()), (False, ~acted.all())) if there)
        return found

    def look_at_number(self) -> None:
        """Note that a number, or several, go to Python, where code of the user's own asks for them."""
        self._gives_numbers = self._gives_numbers or self._asked_at() is not None

    def __enter__(self) -> Self:
        self._entered = sys._getframe(1)
        self._to_python.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._to_python.__exit__(*error)

    def _asked_at(self) -> AskedAt | None:
        """Return the innermost place in code of the user's own that runs in the block; None of what is aside."""
        found: AskedAt | None = None
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame is not self._entered and frame.f_code not in self._aside:
            if found is None and self._is_users(frame.f_code.co_filename):
                found = frame.f_code.co_filename, frame.f_lineno, frame.f_lasti
            frame = frame.f_back
        return None if frame is not None and frame.f_code in self._aside else found

    def _is_users(self, file: str) -> bool:
        if file not in self._known:
            path = Path(file).resolve()
            self._known[file] = path.is_file() and not (is_installed(path) or path.is_relative_to(OURS))
        return self._known[file]


class _ToPython(TorchFunctionMode):
    """Tells of tensors whose numbers are handed to Python or numpy all at once."""

    def __init__(self, seen: ThresholdsSeen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func in ARRAYS:
            self._seen.look_at_number()
        return func(*args, **(kwargs or {}))


def _said(operator: str, acted: bool) -> str:
    """Return what an operator did each time: `> always true`, `clamp never acted`."""
    how = "always" if acted else "never"
    return f"{COMPARISONS[operator]} {how} true" if operator in COMPARISONS else f"{operator} {how} acted"
