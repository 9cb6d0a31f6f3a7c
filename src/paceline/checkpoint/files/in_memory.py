"""Whether the system has a file in its memory: it comes from there, and what is not there faster past the caches."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from functools import cache
from typing import Any

import numpy as np

PLACES = 32  # of a file that are looked at: to ask for each page costs a tenth of reading it


def is_in_memory(descriptor: int, length: int) -> bool:
    """Return whether most of an open file is there (`mincore`), or nobody can say; it brings nothing of it there."""
    ask = _mincore()
    if ask is None or not length:
        return True
    try:
        mapped = mmap.mmap(descriptor, length, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # a file system that maps no files
        return True
    with mapped:
        content, told, found = np.frombuffer(mapped, dtype=np.uint8), ctypes.c_ubyte(), 0
        begin, pages = content.ctypes.data, -(-length // mmap.PAGESIZE)
        for place in range(PLACES):
            if ask(begin + place * pages // PLACES * mmap.PAGESIZE, 1, ctypes.byref(told)):
                found = PLACES
                break
            found += told.value & 1
        del content  # or the file stays mapped
    return 2 * found > PLACES


@cache
def _mincore() -> Any:
    """Return the system's call, None where there is none."""
    with contextlib.suppress(OSError, AttributeError):
        found = ctypes.CDLL(None).mincore
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        return found
    return None
