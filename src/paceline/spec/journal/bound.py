"""VerdictRecord and TraceRecord: what bounds a run's steps, said while the run lives, and where their time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from paceline.spec.journal.record import Ids, Numbers, Record, Told, Words


@dataclass(frozen=True)
class VerdictRecord(Record):
    """What bounds the steps since the verdict before: beside each record of all ranks."""

    KIND: ClassVar[str] = "verdict"

    step: Annotated[int | None, Told("steps done")]
    bound: Annotated[
        str,
        Told(
            "`data`, `communication`, `pipeline` (it fills and drains), `host`, `straggler`, `checkpoint`,"
            " `evaluation`, `memory` (passes of few samples) or `compute`"
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


@dataclass(frozen=True)
class TraceRecord(Record):
    """A trace of some steps, which a running job was asked for: written when rank 0 has done its part."""

    KIND: ClassVar[str] = "trace"

    step: Annotated[int | None, Told("steps done")]
    first: Annotated[int | None, Told("the first step that was traced")]
    last: Annotated[int | None, Told("the last step that was traced")]
    ranks: Annotated[Ids | None, Told("the ranks that were asked; null for all")]
    path: Annotated[str, Told("the folder of the files, one for each rank")]
    by: Annotated[str, Told("who asked: `command`, `signal`, `page` or `alert`")]
    seconds: Annotated[float | None, Told("what training waited for it on rank 0, beside what tracing costs", "s")]
