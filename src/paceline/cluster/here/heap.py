"""How glibc keeps small pieces of its heap, in processes that train on a CPU.

Torch aligns every tensor of a CPU to 64 bytes, and glibc cuts an aligned block out of a larger one: it asks for 96
bytes more (`_int_memalign` of its malloc/malloc.c), and frees the 32 to 80 that are left before and behind the block.
Pieces as small go to a cache of the thread, and what lies there is not joined to what is freed beside it. So when the
tensor is freed, a hole is left that the next tensor of the same size does not fit, and the heap grows. Without the
cache, and without glibc's second one (`run/memory/allocator.py`), it grows less. What that spared and cost in four runs
on one machine is in `docs/log.md`, 2026-11-29; no benchmark repeats them.
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
