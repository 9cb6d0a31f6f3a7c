"""What a recovery took: told by the first rank when the first step after a fault is made."""

from __future__ import annotations

from paceline.run.loop.resume import Progress, Restored
from paceline.spec.journal.kinds import DecisionRecord, RecoveryRecord
from paceline.spec.journal.record import Table, now
from paceline.spec.journal.timing.clock import passed_here, passed_seconds
from paceline.supervise.told.generation import Generation

MOMENTS = ("fault", "noticed", "ended", "begun", "built", "stepped")
PHASES = ("detect", "end", "start", "restore", "step")  # between two moments
# What happened, because of what, on which rank, what shows it, and if it names ranks, where known.
ToldFault = tuple[str, str, int | None, Table | None, bool | None]


class Recovered:
    """Follows one generation from its fault to its first step."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._moments = generation, passed_here(generation.moments, generation.clock)
        self._note("begun")
        self._progress, self._from = Progress(0, 0), ""
        self._is_told = not generation.fault

    @property
    def fault(self) -> ToldFault:
        """Return what has ended the world before."""
        fault = self._generation.fault
        what, because = str(fault.get("what", "")), str(fault.get("because", ""))
        return what, because, fault.get("rank"), fault.get("evidence"), fault.get("names_ranks")

    @property
    def decisions(self) -> list[DecisionRecord]:
        """Return what the supervisor has decided for this generation."""
        return [now(decision) for decision in self._generation.decisions]

    @property
    def lasting(self) -> list[DecisionRecord]:
        """Return what the supervisor has decided for all generations."""
        return [now(decision) for decision in self._generation.lasting]

    def built(self, restored: Restored | None) -> None:
        """Note that the state is in place."""
        self._note("built")
        if restored is not None:
            self._progress, self._from = restored.progress, str(restored.path)

    def stepped(self) -> RecoveryRecord | None:
        """Return the record of the recovery after its first step; None before, after, and where there was no fault."""
        if self._is_told:
            return None
        self._is_told = True
        self._note("stepped")
        generation, moments = self._generation, [self._moments[name] for name in MOMENTS]
        # A coordinator on another machine counts otherwise, and its clock may be another.
        parts = {name: max(0.0, moments[at + 1] - moments[at]) for at, name in enumerate(PHASES)}
        return RecoveryRecord(
            generation=generation.number,
            rung=generation.rung,
            because=str(generation.fault.get("what", "")),
            rank=generation.fault.get("rank"),
            from_world=generation.from_world,
            to_world=generation.to_world,
            resumed_from=self._from or None,
            step=self._progress.step,
            steps_lost=max(0, generation.reached - self._progress.step),
            seconds={"total": sum(parts.values()), **parts},
        )

    def _note(self, name: str) -> None:
        self._moments[name] = passed_seconds()
