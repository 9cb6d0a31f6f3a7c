"""The duration of a probe, told to whoever is asked to wait."""

from __future__ import annotations

BUDGET_SECONDS = 15.0  # that a probe of an idle machine is given
# What a GPU takes beyond its budget, for its libraries, CUDA's context, kernels that are loaded at their first call,
# and calls that are longer than their slot. One H200 took 32.8 s for a budget of 15 (2026-11-27, torch 2.11),
# attention in fp64 over 8,192 positions included, which is left out since.
BEYOND_BUDGET = {"cuda": 15.0}


def probe_seconds(kind: str, budget_seconds: float = BUDGET_SECONDS) -> float:
    """Return about how many seconds a probe of devices of a kind takes by the clock."""
    return budget_seconds + BEYOND_BUDGET.get(kind, 0.0)
