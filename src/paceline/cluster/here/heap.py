"""How glibc keeps small pieces of its heap, in processes that train on a CPU.

Torch aligns every tensor of a CPU to 64 bytes, and glibc cuts an aligned block out of a larger one: it asks for 96
bytes more (`_int_memalign` of its malloc/malloc.c), and frees the 32 to 80 that are left before and behind the block.
Pieces as small go to a cache of the thread, and what lies there is not joined to what is freed beside it. So when the
tensor is freed, a hole is left that the next tensor of the same size does not fit, and the heap grows: a decoder of 3 M
parameters, whose tensors need 412 MiB at their peak, held 553 to 561. Without the cache, and without glibc's second one
(`run/memory/allocator.py`), it held 436 to 451 and its steps took 3 % less (glibc 2.36, two cores of a Xeon,
2026-11-29; four runs of 12 and 16 steps). What it costs is 4 % of a step that does nothing but call operators.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

HEAP_VARIABLE = "GLIBC_TUNABLES"
THREAD_CACHE = "glibc.malloc.tcache"  # what the names of all settings of that cache begin with
NO_THREAD_CACHE = f"{THREAD_CACHE}_count=0"
ACCELERATORS = (Path("/proc/driver/nvidia/gpus"), Path("/dev/kfd"))  # where steps wait for what the host calls


def joined_heap(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a process that trains on a CPU needs in its environment, so that its heap joins what it frees.

    glibc reads it when a process begins, so it is of processes that are started, not of this one. Nothing where the
    user has chosen how the cache is, on another system, and on a machine with accelerators. Other C libraries know no
    such variable.
    """
    chosen = environ.get(HEAP_VARIABLE, "")
    if sys.platform != "linux" or THREAD_CACHE in chosen or any(path.exists() for path in ACCELERATORS):
        return {}
    return {HEAP_VARIABLE: f"{chosen}:{NO_THREAD_CACHE}" if chosen else NO_THREAD_CACHE}
