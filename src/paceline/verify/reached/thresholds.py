"""Thresholds of the user's own code, and on which of their sides a proof has seen numbers.

What a program does beyond a threshold that no number reaches, such as keeping at least eight rows where few losses are
large, shows in no comparison. A proof looks for weights that reach it, and says what none did.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.task.own_code import OURS, is_installed

COMPARISONS = ("lt", "le", "gt", "ge")
BOUNDS = ("clamp", "clamp_min", "clamp_max", "maximum", "minimum")  # they act where a number is not the first operand's
Place = tuple[str, int, str]  # file, line, operator


class ThresholdsSeen(TorchDispatchMode):
    """Keeps, by its place in code that is neither ours nor installed, whether a threshold acted and whether it did not.

    Thresholds that torch is asked for are seen; a comparison of Python's own numbers is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sides: dict[Place, set[bool]] = {}
        self._known: dict[str, bool] = {}  # whether a file is the user's own

    def one_sided(self) -> list[str]:
        """Return the thresholds that have one side alone, such as `losses.py:12 (gt always)`."""
        return [
            f"{Path(file).name}:{line} ({operator} {'always' if True in sides else 'never'})"
            for (file, line, operator), sides in self._sides.items()
            if len(sides) == 1
        ]

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        if (name in COMPARISONS or name in BOUNDS) and isinstance(found, torch.Tensor) and found.numel():
            file, line = self._place()
            if file:
                acted = found if name in COMPARISONS else found != args[0]
                sides = self._sides.setdefault((file, line, name), set())
                sides.update(side for side, there in ((True, acted.any()), (False, ~acted.all())) if there)
        return found

    def __enter__(self) -> Self:
        self._entered = sys._getframe(1)
        return super().__enter__()

    def _place(self) -> tuple[str, int]:
        """Return the innermost file and line of the user's own that runs in the block, "" where none does."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame is not self._entered:
            if self._is_users(frame.f_code.co_filename):
                return frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        return "", 0

    def _is_users(self, file: str) -> bool:
        if file not in self._known:
            path = Path(file).resolve()
            self._known[file] = path.is_file() and not (is_installed(path) or path.is_relative_to(OURS))
        return self._known[file]
