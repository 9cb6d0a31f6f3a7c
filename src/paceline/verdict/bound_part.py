"""BoundPart: the part of a step whose length is decided by a single cause, and the figures that show the cause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BoundPart:
    """`share` of a step's time, 0 to 1, that is decided by `kind`; `evidence` are the figures, `advice` what to try."""

    kind: str
    share: float
    evidence: tuple[str, ...]
    advice: str


def share_of(seconds: float, step_seconds: float) -> float:
    """Return a part of a step's time, from 0 to 1."""
    return min(1.0, max(0.0, seconds / step_seconds)) if step_seconds > 0 else 0.0
