"""The C library's memory on a CPU: what a step frees is kept for the next step."""

from __future__ import annotations

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD, LARGEST_FAST = -1, -3, 1  # parameters of glibc's mallopt, from malloc.h
NEVER = -1
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # bytes; glibc's own limit on 64-bit systems


def keep_freed_memory() -> bool:
    """Have this process keep memory that it frees, and return whether its C library can.

    A step frees its activations and gradients and allocates as much again. glibc gives back what is free at the end of
    its heap, and the kernel then clears and maps every page anew: a few MB and 1 to 3 % of a step of 100 ms for a model
    of 1 M parameters, or nothing, as chance puts something long-lived at the heap's end. Now memory stays at its peak.
    What is freed is joined to what is free beside it, however small: glibc's fast bins keep pieces apart as its cache
    does (`cluster/here/heap.py`).
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    mallopt(LARGEST_FAST, 0)
    # Setting one stops glibc from raising the other by itself, so both are set to where that would end.
    return bool(mallopt(TRIM_THRESHOLD, NEVER)) and bool(mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD))
