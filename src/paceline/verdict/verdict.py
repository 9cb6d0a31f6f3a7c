"""BoundVerdict: what bounds a run's steps, the figures that show it, and what to try next.

A cause is a small module with a function from `StepsSeen` to a part of the step; CAUSES are those that need no word
of the planner. What no cause takes is computing. Parts are shares of the step's own time, and of what lies between two
steps, so that a slow machine does not change the verdict. What a change would bring is the planner's word, which the
run carries along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.units import format_seconds
from paceline.verdict.bound_part import BoundPart
from paceline.verdict.communication import communication_part
from paceline.verdict.data import data_part
from paceline.verdict.evaluating import evaluating_part
from paceline.verdict.host import host_part
from paceline.verdict.memory import memory_part
from paceline.verdict.pipeline import bubble_seconds, pipeline_part
from paceline.verdict.promised import cheaper_step, promise_of
from paceline.verdict.saving import saving_part
from paceline.verdict.steps_seen import StepsSeen
from paceline.verdict.straggler import straggler_part

CAUSES: tuple[Callable[[StepsSeen], BoundPart | None], ...] = (
    data_part, host_part, straggler_part, saving_part, evaluating_part,
)  # fmt: skip
COMPUTE = "compute"
HEALTHY_SHARE = 0.6  # of a step that is computing, where nothing else is worth a word
LEAST_SHARE = 0.25  # of a step: a cause that decides less than this does not bound it
SHOWN = {"total": "a step", "data": "waiting for its batch", "forward_backward": "forward and backward",
         "reduce": "reduction", "waiting": "waiting in collectives", "optimizer": "optimizer", "other": "beside a step",
         "scoring": "scoring candidates, or the noise scale",
         "read": "reading a batch", "saving": "checkpoints", "between": "between two steps",
         "evaluating": "evaluations"}  # fmt: skip


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
    """What bounds a run's steps: `data`, `communication`, `pipeline`, `host`, `straggler`, `checkpoint`, `evaluation`,
    `memory` or `compute`.

    `share` is the part of a step that it decides; without it steps would be `gain` times as fast at most. `promise` is
    what the planner says that the next thing to try would bring, where it knows. `parts` are all causes, the largest
    first. `skew` shows how far ranks are apart; it is empty of one rank.
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
    promise: str = ""
    healthy: bool = False  # computing, and nothing beside it that is worth a word

    @property
    def text(self) -> str:
        """The verdict in one line."""
        return f"{self.kind}-bound{', healthy' if self.healthy else ''}: {self.because}"


def judge(seen: StepsSeen, outlook: Mapping[str, object] | None = None) -> BoundVerdict:
    """Return the verdict: the cause with the largest part, if it is a quarter of a step; else computing.

    `outlook` is what the planner says of the run's plan with one thing otherwise (plan/risk/outlook.py). Without it no
    verdict says that a pass has too few samples, and a pipeline's bubble counts as communication.
    """
    bubble = bubble_seconds(seen, outlook)
    found = [*(cause(seen) for cause in CAUSES), communication_part(seen, bubble), pipeline_part(seen, bubble)]
    found.append(memory_part(seen, outlook) if outlook else None)
    parts = sorted(filter(None, found), key=lambda part: -part.share)
    left = _compute_part(parts, outlook or {})
    first = parts[0] if parts and parts[0].share >= LEAST_SHARE else left
    share = f"{first.share:.0%} of a step of {format_seconds(seen.whole_seconds)}"
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
        promise=promise_of(outlook, first.kind) if outlook else "",
        healthy=first is left and left.share >= HEALTHY_SHARE,
    )


def _words(kind: str) -> str:
    return {
        "data": "waiting for data", "host": "the host", "straggler": "one slow rank", "checkpoint": "checkpoints",
        "evaluation": "evaluations",
        "memory": "passes of few samples", "pipeline": "a pipeline that fills and drains",
    }.get(kind, kind)  # fmt: skip


def _compute_part(parts: list[BoundPart], outlook: Mapping[str, object]) -> BoundPart:
    """Return what no cause takes: the computing."""
    taken = sum(part.share for part in parts)
    names = ", ".join(f"{part.kind} {part.share:.0%}" for part in parts)
    evidence = [f"all else decides {min(1.0, taken):.0%} of a step together: {names}"]
    return BoundPart(COMPUTE, max(0.0, 1.0 - taken), tuple(evidence), cheaper_step(outlook))


def _skew(seen: StepsSeen) -> tuple[RankSkew, ...]:
    if seen.ranks < 2 or not seen.whole:
        return ()
    found = [(SHOWN[name], seen.spreads[name]) for name in SHOWN if name in seen.spreads]
    return tuple(RankSkew(name, each.least, each.median, each.most, each.rank) for name, each in found)
