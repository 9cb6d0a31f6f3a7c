"""The heap of a process that trains on a CPU joins what is freed, so that a tensor fits where one of its size was."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

from paceline.cluster.here import heap
from paceline.cluster.here.heap import HEAP_VARIABLE, NO_THREAD_CACHE, joined_heap

# Steps that align blocks as torch does its tensors, with a few small ones between them, as autograd's nodes are.
# Prints by how many bytes the heap has grown after one step and after 30; a step holds 10.2 MB at its peak.
STEPS = """
import ctypes, itertools
from paceline.run.memory.allocator import keep_freed_memory
assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
libc.mallinfo2.restype = type("Told", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in FIELDS]})
sizes = itertools.cycle((24, 100, 56, 40, 72, 56, 24))

def aligned(size):
    pointer = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(pointer), 64, size) == 0
    return pointer.value

def step():
    kept, nodes = [], []
    for size in (100_000, 300_000, 100_000) * 20:
        kept.append(aligned(size))
        passing = aligned(200_000)
        nodes += [libc.malloc(next(sizes)) for _ in range(3)]
        libc.free(passing)
    while kept:
        passing = aligned(200_000)
        for pointer in (kept.pop(), *(nodes.pop() for _ in range(3)), passing):
            libc.free(pointer)

before, found = libc.mallinfo2().arena, []
for number in range(30):
    step()
    found.append(libc.mallinfo2().arena - before)
print(found[0], found[-1])
"""


@pytest.fixture(autouse=True)
def no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "ACCELERATORS", ())


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is no glibc of 2.33 or later")
def test_without_its_cache_the_heap_grows_no_further_than_a_step_needs() -> None:
    def grown(**chosen: str) -> list[int]:
        environ = {name: value for name, value in environment().items() if name != HEAP_VARIABLE}
        command = [sys.executable, "-c", STEPS]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**environ, **chosen})
        return [int(word) for word in done.stdout.split()]

    first, last = grown()
    # How far it is after one step depends on what lies on the heap before, such as a longer environment.
    assert first + 1e6 < last > 12.2e6, "what glibc does by itself: nothing to mend otherwise"
    first, last = grown(**joined_heap({}))
    assert first == last < 10.5e6


def test_what_the_user_has_chosen_stays() -> None:
    assert joined_heap({HEAP_VARIABLE: "glibc.malloc.tcache_count=3"}) == {}
    others = joined_heap({HEAP_VARIABLE: "glibc.malloc.arena_max=1"})
    assert others == {HEAP_VARIABLE: f"glibc.malloc.arena_max=1:{NO_THREAD_CACHE}"}
    assert joined_heap(joined_heap({})) == {}, "a process that is started by one that has it"


def test_where_an_accelerator_waits_for_the_host_the_heap_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(heap, "ACCELERATORS", (tmp_path,))
    assert joined_heap(os.environ) == {}
