"""SquaresInMemory: decoded squares that a process keeps, so that later epochs decode nothing."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

Square = npt.NDArray[np.uint8]  # [side, side, 3]


class SquaresInMemory:
    """Squares by the number of their image and their side, of at most `most_bytes` together.

    Those that came first stay: every epoch reads each image once, so that none is worth more than another, and one
    that made room for the next would always go just before it is read again.
    """

    def __init__(self, most_bytes: int) -> None:
        """Nothing is kept with `most_bytes` of zero."""
        self.most_bytes = most_bytes
        self._squares: dict[tuple[int, int], Square] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def holds(self, number: int, side: int) -> bool:
        """Say whether an image's square is kept."""
        return (number, side) in self._squares

    def fill(self, number: int, into: Square) -> bool:
        """Copy an image's square to where it is wanted, and say whether it was there."""
        if (square := self._squares.get((number, len(into)))) is None:
            return False
        into[:] = square
        return True

    def keep(self, number: int, square: Square) -> None:
        """Keep a copy of an image's square while there is room. Any thread may call this."""
        with self._lock:
            if self.holds(number, len(square)) or self._bytes + square.nbytes > self.most_bytes:
                return
            self._bytes += square.nbytes
        self._squares[number, len(square)] = square.copy()

    def __reduce__(self) -> tuple[object, ...]:
        return SquaresInMemory, (self.most_bytes,)
