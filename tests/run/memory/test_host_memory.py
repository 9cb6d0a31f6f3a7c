"""What a step frees is there for the next one: the kernel need not map it again."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from paceline.run.memory.allocator import keep_freed_memory

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
