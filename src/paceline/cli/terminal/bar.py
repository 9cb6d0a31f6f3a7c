"""A progress bar: one line that is written anew on a terminal, and a line for each tenth elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

from paceline.units import format_seconds

WIDTH = 30
BETWEEN_SECONDS = 0.1  # two pictures on a terminal


class Bar:
    """Shows how much of something is done. Use as a context manager; what it has shown on a terminal ends with it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_terminal = stream, stream.isatty()
        self._what, self._began, self._drawn, self._tenth = "", 0.0, 0.0, -1

    def show(self, what: str, share: float) -> None:
        """Say that a share of `what`, 0..1, is done."""
        now = time.monotonic()
        if what != self._what:
            self._what, self._began, self._tenth = what, now, -1
        left = (now - self._began) * (1 - share) / share if share > 0 else 0.0
        line = f"{what} {share:4.0%}" + (f", {format_seconds(left)} left" if 0 < share < 1 else "")
        if self._is_terminal:
            if now - self._drawn >= BETWEEN_SECONDS or share >= 1:
                filled = round(WIDTH * share)
                self._write(f"\r\x1b[K{'█' * filled}{'░' * (WIDTH - filled)} {line}")
                self._drawn = now
        elif int(share * 10) > self._tenth:
            self._tenth = int(share * 10)
            self._write(f"{line}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_terminal and self._what:
            self._write("\r\x1b[K")
