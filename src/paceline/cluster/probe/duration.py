"""The duration of a probe, told to whoever is asked to wait."""

from __future__ import annotations

import math

from paceline.cluster.probe.passes import PASSES

BUDGET_SECONDS = 15.0  # that what a device does by itself is given on an idle machine
# What a GPU takes beyond its budget, for its libraries, CUDA's context, kernels that are loaded at their first call,
# and calls that are longer than their slot. One H200 took 32.8 s for a budget of 15 (2026-11-27, torch 2.11),
# attention in fp64 over 8,192 positions included, which is left out since.
BEYOND_BUDGET = {"cuda": 15.0}
# What collectives and the steps with them take in each pass, for every doubling of ranks on CPUs: they are so many
# calls, however long. Two ranks took 29.8 s where one took 17.2, and 25 to 28 s on another machine (2026-11-29).
TOGETHER_SECONDS = 6.5


def probe_seconds(kind: str, budget_seconds: float = BUDGET_SECONDS, devices: int = 1, passes: int = PASSES) -> float:
    """Return about how many seconds a probe of so many devices of a kind takes by the clock.

    Example: of two processes on a CPU 28 s: 15 by themselves, and twice 6.5 together.
    """
    together = TOGETHER_SECONDS * passes * math.log2(devices) if kind == "cpu" and devices > 1 else 0.0
    return budget_seconds + BEYOND_BUDGET.get(kind, 0.0) + together
