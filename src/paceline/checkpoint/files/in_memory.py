"""Which parts of a file the system has in its memory: they come from there, and all else faster past its caches."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from functools import cache
from typing import Any

import numpy as np

from paceline.checkpoint.files.past_caches import BLOCK_BYTES

ASKED_BYTES = 2**16


class PagesInMemory:
    """Asks the system about an open file (`mincore`), which brings nothing of it into memory."""

    def __init__(self, descriptor: int, length: int) -> None:
        self._map: mmap.mmap | None = None
        self._bytes = np.empty(0, dtype=np.uint8)
        if length and _mincore() is not None:
            with contextlib.suppress(OSError, ValueError):  # a file system that maps no files
                self._map = mmap.mmap(descriptor, length, access=mmap.ACCESS_READ)
                self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    def has(self, begin: int, end: int) -> bool:
        """Return whether a part of the file is there, or nobody can say. It begins with a whole page.

        What its first pages tell goes for all of it: to ask for each one costs a tenth of reading it.
        """
        ask, part = _mincore(), self._bytes[begin : min(end, begin + ASKED_BYTES)]
        if ask is None or not part.size:
            return True
        pages = np.zeros(-(-part.size // mmap.PAGESIZE), dtype=np.uint8)
        if begin % BLOCK_BYTES or ask(part.ctypes.data, part.size, pages.ctypes.data):
            return True
        return 2 * int((pages & 1).sum()) > pages.size

    def close(self) -> None:
        """Let go of the file."""
        self._bytes = np.empty(0, dtype=np.uint8)
        if self._map is not None:
            self._map.close()
            self._map = None


@cache
def _mincore() -> Any:
    """Return the system's call, None where there is none."""
    with contextlib.suppress(OSError, AttributeError):
        found = ctypes.CDLL(None).mincore
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        return found
    return None
