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
# calls, however long. Two ranks took 39 s where one took 20 (2026-11-30); with fewer calls, 25 to 30 on other machines.
TOGETHER_SECONDS = 9.0


def probe_seconds(kind: str, budget_seconds: float = BUDGET_SECONDS, devices: int = 1, passes: int = PASSES) -> float:
    """Return about how many seconds a probe of so many devices of a kind takes by the clock.

    Example: of two processes on a CPU 33 s: 15 by themselves, and twice 9 together.
    """
    together = TOGETHER_SECONDS * passes * math.log2(devices) if kind == "cpu" and devices > 1 else 0.0
    return budget_seconds + BEYOND_BUDGET.get(kind, 0.0) + together
