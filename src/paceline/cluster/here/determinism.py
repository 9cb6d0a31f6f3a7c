"""What deterministic kernels cost a step, where that was measured: for a plan, a journal and a report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeterministicPrice:
    """A step's time with deterministic kernels over that with the usual ones: the median of rounds, and its 95 %."""

    ratio: float
    low: float
    high: float
    source: str

    def __str__(self) -> str:
        range_ = f"{self.low:.2f} to {self.high:.2f}"
        verdict = ", which cannot be told from none" if self.low <= 1 <= self.high else ""
        return f"x{self.ratio:.2f} of a step's time ({range_}){verdict}; measured by {self.source}"


BENCHMARK = "benchmarks/costs/deterministic.py"
# By the kind of a device. A kind that is missing was not measured by us.
MEASURED = {
    "cpu": DeterministicPrice(1.00, 0.98, 1.01, f"{BENCHMARK}, llama-1m, on 2 cores, 2026-11-23"),
}


def deterministic_price(kind: str) -> str:
    """Return what deterministic kernels cost on devices of a kind, or that it was not measured, in one line."""
    price = MEASURED.get(kind)
    if price is not None:
        return str(price)
    return (
        f"not measured on {kind}, and the forecast is that of the usual kernels; `{BENCHMARK} --device {kind}` measures"
    )
