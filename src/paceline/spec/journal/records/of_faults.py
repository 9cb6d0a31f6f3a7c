"""The kinds of record of checkpoints and faults, and of how a run goes on after a fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from paceline.spec.journal.record import Numbers, Record, Table, Told


@dataclass(frozen=True)
class CheckpointRecord(Record):
    """A checkpoint that was published whole."""

    KIND: ClassVar[str] = "checkpoint"

    step: Annotated[int | None, Told("steps done")]
    path: Annotated[str, Told("its folder")]
    bytes: Annotated[int | None, Told("its size on disk", "bytes")]
    seconds: Annotated[float | None, Told("from the moment that it holds until it was published", "s")]
    stall_seconds: Annotated[
        float | None,
        Told(
            "in which training waited for it; without it all of `seconds`, as in journals of earlier releases",
            "s",
            if_any=True,
        ),
    ] = None
    tier: Annotated[str | None, Told("`memory` or `remote` where it is not in the run's directory", if_any=True)] = None

    @property
    def cost_seconds(self) -> float | None:
        """What the checkpoint cost the run."""
        return self.seconds if self.stall_seconds is None else self.stall_seconds

    @property
    def is_beside(self) -> bool:
        """Whether training went on meanwhile: it was written from a copy of the state in host memory."""
        stall = self.stall_seconds
        return self.tier != "remote" and stall is not None and stall < (self.seconds or 0.0)


@dataclass(frozen=True)
class ReplayRecord(Record):
    """The first step after a resume, held against the same step of an earlier start."""

    KIND: ClassVar[str] = "replay"

    step: Annotated[int | None, Told("number of the step")]
    of_attempt: Annotated[int | None, Told("the start whose record of the step it was held against")]
    differences: Annotated[Numbers, Told("of `loss` and `grad_norm`; 0 is bit for bit", "relative")]


@dataclass(frozen=True)
class FaultRecord(Record):
    """Something that went wrong, whether the run survived it or not."""

    KIND: ClassVar[str] = "fault"

    what: Annotated[str, Told("what happened")]
    because: Annotated[str, Told("because of what")]
    rank: Annotated[int | None, Told("the rank it happened on, where it is known", if_any=True)] = None
    signal: Annotated[int | None, Told("the signal that ended a process", if_any=True)] = None
    names_ranks: Annotated[
        bool | None, Told("whether `what` says by itself on which ranks it happened", if_any=True)
    ] = None
    evidence: Annotated[
        Table | None,
        Told(
            "of a rank that hung: `silent_seconds`, `limit_seconds`, `median_step_seconds`, the folder of all `stacks`,"
            " of each of `ranks` its `step`, `phase`, `state` (of /proc), `collective`, number and name of the last"
            " collective that it has `reached` in each group, and the innermost frames of its `stack`; and which"
            " `collectives` some ranks have begun and others have not",
            if_any=True,
        ),
    ] = None


@dataclass(frozen=True)
class InjectedRecord(Record):
    """A fault that was made on purpose (`run.faults`) and has struck."""

    KIND: ClassVar[str] = "injected"

    fault: Annotated[int | None, Told("its number in the plan of faults, from 1")]
    what: Annotated[str, Told("its kind")]
    step: Annotated[int | None, Told("the step in which it struck; of `rendezvous` and `load` the number of the start")]
    phase: Annotated[str, Told("where in the step")]
    rank: Annotated[int | None, Told("the rank that it struck")]
    struck: Annotated[float | None, Told("when, in seconds since the epoch: some are recorded by the next start", "s")]


@dataclass(frozen=True)
class RecoveryRecord(Record):
    """The run goes on after a fault: written when the first step after it is made."""

    KIND: ClassVar[str] = "recovery"

    generation: Annotated[int | None, Told("number of the world that goes on; a call begins with 1")]
    rung: Annotated[
        str,
        Told(
            "how that world came about: `reform` (in the processes that were left), `standby` (forked from a process"
            " that had imported torch) or `restart` (new processes)"
        ),
    ]
    because: Annotated[str, Told("the fault")]
    rank: Annotated[int | None, Told("the rank that failed first, where it is known")]
    from_world: Annotated[int | None, Told("ranks before", "devices")]
    to_world: Annotated[int | None, Told("ranks now", "devices")]
    resumed_from: Annotated[str | None, Told("where the state is from; null where the run begins anew")]
    step: Annotated[int | None, Told("steps done before the first step after the fault")]
    steps_lost: Annotated[int | None, Told("steps on record that are made again", "steps")]
    seconds: Annotated[
        Numbers,
        Told(
            "`total` and its parts: `detect` (from when all ranks were last seen to be well), `end` (until nothing of"
            " the old world ran, or was ready to go on), `start` (until rank 0 of the new world began to build),"
            " `restore` (building and loading), `step` (the first step)",
            "s",
        ),
    ]
