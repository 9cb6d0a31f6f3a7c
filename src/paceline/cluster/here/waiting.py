"""How long the threads of one rank wait for each other awake, on a CPU.

A product of two matrices is cut over threads, and a thread that is done waits for the others. libgomp, the OpenMP of
PyTorch's wheels, has it turn in a loop 300,000 times by default (the documentation of GOMP_SPINCOUNT), so that it
holds its core while the one it waits for may have none: beside a single other program that computes, a step takes many
times as long. A short loop finds the other threads nearly always where cores are free, and gives its core away where
they are not (`benchmarks/costs/waiting.py` measures both).
"""

from __future__ import annotations

from collections.abc import Mapping

SPIN_VARIABLE = "GOMP_SPINCOUNT"
CHOSEN_BY_USER = ("OMP_WAIT_POLICY", SPIN_VARIABLE)
SPIN_TURNS = 3_000  # 30 to 150 µs by processor: longer than the gap between two operators, and than a waking takes


def waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a process that computes with several threads needs in its environment before it loads torch.

    Nothing where the user has said how threads wait.
    """
    return {} if any(name in environ for name in CHOSEN_BY_USER) else {SPIN_VARIABLE: str(SPIN_TURNS)}
