"""What deterministic kernels cost a step, where that was measured, in words for a plan, a journal and a report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeterministicPrice:
    """A step's time with deterministic kernels over that with the usual ones: the median, and half of all rounds.

    `control` is how far two runs with the usual kernels were apart: less than that cannot be told from nothing.
    """

    ratio: float
    low: float
    high: float
    control: float
    source: str


BENCHMARK = "benchmarks/deterministic.py"
MEASURED = {
    "cpu": DeterministicPrice(1.0, 1.0, 1.0, 0.0, "TODO"),
}


def price_text(kind: str) -> str:
    """Return what deterministic kernels cost on devices of a kind, in one line that needs no other."""
    price = MEASURED.get(kind)
    if price is None:
        return (
            f"what deterministic kernels cost was not measured on {kind}: the forecast is that of the usual kernels; "
            f"`{BENCHMARK} --device {kind}` measures it"
        )
    apart = abs(price.ratio - 1) > price.control
    verdict = "" if apart else ", which cannot be told from none"
    range_ = f"{price.low:.3f} to {price.high:.3f}"
    return f"deterministic kernels take x{price.ratio:.3f} of a step's time ({range_}){verdict}: {price.source}"
