"""BoundVerdict: what bounds a run's steps, the figures that show it, and what to try next.

A cause is a small module with a function from `StepsSeen` to a part of the step; CAUSES is their table. What no cause
takes is computing. Parts are shares of the step's own time, so that a slow machine does not change the verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.observe.verdict.communication import communication_part
from paceline.observe.verdict.data import data_part
from paceline.observe.verdict.host import host_part
from paceline.observe.verdict.part import BoundPart
from paceline.observe.verdict.seen import RankSpread, StepsSeen
from paceline.units import format_seconds

CAUSES: tuple[Callable[[StepsSeen], BoundPart | None], ...] = (data_part, communication_part, host_part)
COMPUTE = "compute"
LEAST_SHARE = 0.25  # of a step: a cause that decides less than this does not bound it
SKEWED = 1.2  # times the median: a rank beyond it is said to be apart
SHOWN = {"total": "a step", "data": "waiting for its batch", "forward_backward": "forward and backward",
         "reduce": "reduction", "waiting": "waiting in collectives", "optimizer": "optimizer", "other": "beside a step",
         "read": "reading a batch"}  # fmt: skip


@dataclass(frozen=True)
class RankSkew:
    """How far the ranks are apart in one part of a step: seconds, and the rank that takes longest."""

    name: str
    least: float
    median: float
    most: float
    rank: int


@dataclass(frozen=True)
class BoundVerdict:
    """What bounds a run's steps: `data`, `communication`, `host` or `compute`.

    `share` is the part of a step that it decides; without it steps would be `gain` times as fast at most. `parts` are
    all causes, the largest first. `skew` shows how far ranks are apart; it is empty of one rank.
    """

    kind: str
    share: float
    gain: float | None  # None of computing, which no step is without, and where nothing would be left of a step
    because: str
    evidence: tuple[str, ...]
    advice: str
    parts: tuple[BoundPart, ...]
    skew: tuple[RankSkew, ...]
    steps: int

    @property
    def text(self) -> str:
        """The verdict in one line."""
        return f"{self.kind}-bound: {self.because}"


def judge(seen: StepsSeen) -> BoundVerdict:
    """Return the verdict: the cause with the largest part, if it is a quarter of a step; else computing."""
    parts = sorted(filter(None, (cause(seen) for cause in CAUSES)), key=lambda part: -part.share)
    left = _compute_part(seen, parts)
    first = parts[0] if parts and parts[0].share >= LEAST_SHARE else left
    share = f"{first.share:.0%} of a step of {format_seconds(seen.step_seconds)}"
    because = f"{share} {'is computing' if first is left else 'is decided by ' + _words(first.kind)}"
    return BoundVerdict(
        kind=first.kind,
        share=first.share,
        gain=1 / (1 - first.share) if first is not left and first.share < 1 else None,
        because=because,
        evidence=first.evidence,
        advice=first.advice,
        parts=tuple(sorted([*parts, left], key=lambda part: -part.share)),
        skew=_skew(seen),
        steps=seen.steps,
    )


def _words(kind: str) -> str:
    return {"data": "waiting for data", "host": "the host"}.get(kind, kind)


def _compute_part(seen: StepsSeen, parts: list[BoundPart]) -> BoundPart:
    """Return what no cause takes: the computing."""
    taken = sum(part.share for part in parts)
    evidence = [f"data, collectives and the host decide {min(1.0, taken):.0%} of a step together"]
    apart = _computed(seen)
    if apart is not None and apart.median > 0 and apart.most > SKEWED * apart.median:
        times = apart.most / apart.median
        evidence.append(f"rank {apart.rank} takes {times:.1f} times as long for its passes as the median of the ranks")
    advice = (
        "more devices, or a cheaper step: plan.precision = 'bf16', plan.compile, less recompute"
        " (`paceline plan SPEC --explain` prices them)"
    )
    return BoundPart(COMPUTE, max(0.0, 1.0 - taken), tuple(evidence), advice)


def _computed(seen: StepsSeen) -> RankSpread | None:
    """Return how far ranks are apart in what they compute, where waiting can be told from it."""
    return seen.spreads.get("computing")


def _skew(seen: StepsSeen) -> tuple[RankSkew, ...]:
    if seen.ranks < 2 or not seen.whole:
        return ()
    found = [(SHOWN[name], seen.spreads[name]) for name in SHOWN if name in seen.spreads]
    return tuple(RankSkew(name, each.least, each.median, each.most, each.rank) for name, each in found)
