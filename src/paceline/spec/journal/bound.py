"""VerdictRecord: what bounds a run's steps, said while the run lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from paceline.spec.journal.record import Numbers, Record, Told, Words


@dataclass(frozen=True)
class VerdictRecord(Record):
    """What bounds the steps since the verdict before: beside each record of all ranks."""

    KIND: ClassVar[str] = "verdict"

    step: Annotated[int | None, Told("steps done")]
    bound: Annotated[
        str,
        Told(
            "`data`, `communication`, `host`, `straggler`, `checkpoint`, `memory` (passes of few samples) or `compute`"
        ),
    ]
    healthy: Annotated[bool | None, Told("whether steps compute, and nothing beside that is worth a word")]
    because: Annotated[str, Told("the verdict's reason in one line")]
    shares: Annotated[Numbers, Told("the part of a step, with what lies between two, that each cause decides, 0 to 1")]
    evidence: Annotated[Words, Told("the figures that show it")]
    advice: Annotated[str, Told("what to try next")]
    promise: Annotated[str, Told("what the planner says that would bring; empty where it does not know")]
    step_seconds: Annotated[float | None, Told("how long a step takes, with what lies between two", "s")]
    steps: Annotated[int | None, Told("how many steps it is of", "steps")]

    @property
    def short(self) -> str:
        """The verdict in two words, for a status line."""
        share = self.shares.get(self.bound)
        return f"{self.bound}-bound" + (", healthy" if self.healthy else "" if share is None else f" {share:.0%}")
