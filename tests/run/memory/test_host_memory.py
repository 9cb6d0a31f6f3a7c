"""What a step frees is there for the next one: the kernel need not map it again. What a process holds is its own."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.run.memory.allocator import keep_freed_memory
from paceline.run.memory.spent import MemoryMeter, process_bytes

CYCLES = """
import resource
from paceline.run.memory.allocator import keep_freed_memory
{first}
def cycle():
    held = [b"x" * 200_000 for _ in range(40)]  # 8 MB
for _ in range(3):
    cycle()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    cycle()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


def faults_per_cycle(first: str) -> float:
    """Return how many pages the kernel maps in a cycle of 8 MB, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CYCLES.format(first=first)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_kept() -> None:
    assert faults_per_cycle("") > 1000, "what glibc does by itself: nothing to mend otherwise"
    assert faults_per_cycle("assert keep_freed_memory()") < 10


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()


@pytest.mark.skipif("RssFile" not in process_bytes(), reason="reads what Linux says of a process")
def test_pages_of_files_are_not_of_the_memory_that_a_rank_holds(tmp_path: Path) -> None:
    size = 1 << 25
    (tmp_path / "corpus").write_bytes(b"x" * size)
    meter, resident = MemoryMeter(torch.device("cpu")), process_bytes()["VmRSS"]
    before = meter.now_bytes()
    with (tmp_path / "corpus").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(mapped[:: mmap.PAGESIZE]) == size // mmap.PAGESIZE, "every page is read"
        assert process_bytes()["VmRSS"] - resident > 0.9 * size and meter.now_bytes() - before < 0.1 * size
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        kept.write(b"y" * size)  # pages of its own: the allocator may have a place that was filled before
        assert meter.now_bytes() - before > 0.9 * size and meter.peak_bytes() >= meter.now_bytes() - 0.1 * size
