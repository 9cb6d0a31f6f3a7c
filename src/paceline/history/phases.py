"""Where the wall time of a run went, over all its starts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.history.records import Records, StepTable, number
from paceline.spec.journal.kinds import CheckpointRecord, EvaluationRecord, RunEnded, VerifyRecord

TRAINING, DATA, LOST, EVALUATION = "training", "data", "lost_work", "evaluation"
CHECKPOINTS, VERIFICATION, START_UP, BETWEEN = "checkpoints", "verification", "start_up", "between_starts"
PAUSED = "paused"
PHASE_NAMES = {
    TRAINING: "training",
    DATA: "data",
    LOST: "lost work",
    EVALUATION: "evaluation",
    CHECKPOINTS: "checkpoints",
    VERIFICATION: "verification",
    START_UP: "start-up and other",
    BETWEEN: "between starts",
    PAUSED: "paused",
}  # kind -> as it is printed: no code reads the printed name
AS_ASKED = ("complete", "stopped")  # ends after which a run goes on only when somebody wants more of it


@dataclass(frozen=True)
class Phase:
    """A share of the wall time, in seconds, and what is counted in it. Code knows a phase by its kind."""

    kind: str
    seconds: float
    note: str
    name: str  # as it is printed

    @classmethod
    def of(cls, kind: str, seconds: float, note: str = "") -> Phase:
        """Return the phase of a kind under the name that it is printed by."""
        return cls(kind, seconds, note, PHASE_NAMES[kind])


@dataclass(frozen=True)
class Start:
    """One start of the run. Steps are counted from the run's beginning; times are seconds since the epoch."""

    number: int
    started: float | None
    ended: float | None
    seconds: float
    status: str  # "complete", "requeue", "failed", or "no end on record"
    exit_code: int | None
    resumed_from: str
    resumed_at_step: int | None
    last_step: int | None
    steps: int
    lost_steps: int
    world_size: int | None
    plan: str


def resume_steps(records: Records) -> dict[int, float]:
    """Return for every attempt how many steps were done before it began, where that is on record.

    The attempt's first step says it exactly; a start that reached no step is asked for its own `step`.
    """
    done: dict[int, float] = {}
    for start in records.starts:
        if start.step is not None:
            done[start.attempt or 1] = start.step
    attempts, steps = records.steps.column("attempt"), records.steps.column("step")
    for attempt in np.unique(attempts):
        done[int(attempt)] = float(steps[attempts == attempt].min()) - 1
    return done


def lost_mask(records: Records) -> NDArray[np.bool_]:
    """Return which steps were undone: the run went back to before them, in a later start or in the same."""
    attempts, steps = records.steps.column("attempt"), records.steps.column("step")
    lost = np.zeros(len(records.steps), dtype=bool)
    for attempt, done in resume_steps(records).items():
        lost |= (attempts < attempt) & (steps > done)
    _, last = np.unique(steps[::-1], return_index=True)
    again = np.ones(len(steps), dtype=bool)  # a start that recovers in its processes makes a step twice
    again[len(steps) - 1 - last] = False
    return lost | again


def surviving(records: Records) -> StepTable:
    """Return the steps that count, one row per step in rising order."""
    kept = records.steps.where(~lost_mask(records))
    _, last = np.unique(kept.column("step")[::-1], return_index=True)
    return StepTable(kept.values[len(kept) - 1 - last])


def starts_of(records: Records) -> tuple[Start, ...]:
    """Return the run's starts, oldest first."""
    resumed, lost = resume_steps(records), lost_mask(records)
    attempt_column, step_column = records.steps.column("attempt"), records.steps.column("step")
    ends = {end.attempt: end for end in records.of(RunEnded)}
    found = sorted({start.attempt or 1 for start in records.starts} | set(records.spans) | {*resumed})
    attempts = []
    for index in found:
        start, end, own = records.start(index), ends.get(index), attempt_column == index
        span, at = records.spans.get(index), resumed.get(index)
        attempts.append(
            Start(
                number=index,
                started=span[0] if span else None,
                ended=span[1] if span else None,
                seconds=span[1] - span[0] if span else 0.0,
                status=(end and end.status) or "no end on record",
                exit_code=end.exit_code if end else None,
                resumed_from=start.resumed_from or "",
                resumed_at_step=None if at is None else int(at),
                last_step=int(step_column[own].max()) if own.any() else None,
                steps=int(own.sum()),
                lost_steps=int((own & lost).sum()),
                world_size=start.world_size,
                plan=start.plan_text,
            )
        )
    return tuple(attempts)


def _verify_seconds(records: Records) -> float:
    """Return the seconds of proofs made after a start began; one made before its process started is not in its time."""
    total = 0.0
    for record in records.of(VerifyRecord):
        began, ended = records.spans.get(record.attempt or 1, (0.0, 0.0))[0], number(record.time)
        total += min(number(record.seconds) or 0.0, max(0.0, (began if ended is None else ended) - began))
    return total


def _seconds_of(records: Sequence[EvaluationRecord]) -> float:
    return sum(number(record.seconds) or 0.0 for record in records)


def _stalls_of(records: Sequence[CheckpointRecord]) -> float:
    return sum(number(record.cost_seconds) or 0.0 for record in records)


def between_starts(began: float, ended: float, end: RunEnded | None) -> tuple[float, float]:
    """Return the seconds between two starts, those of a planned pause apart: (interrupted, paused).

    `end` is that of the first of the two. A start that ended as asked was not interrupted, and one that saved until its
    hours begin (`run.when`) is late only from then on.
    """
    gap = max(0.0, ended - began)
    if end is None or (end.goes_on is None and end.status not in AS_ASKED):
        return gap, 0.0
    paused = gap if end.goes_on is None else min(gap, max(0.0, end.goes_on - began))
    return gap - paused, paused


def phases_of(records: Records, attempts: tuple[Start, ...]) -> tuple[Phase, ...]:
    """Return the wall time by phase; the phases add up to the time from the first record to the last."""
    lost = lost_mask(records)
    total = np.nan_to_num(records.steps.column("total"))
    data = np.nan_to_num(records.steps.column("data"))
    known = {
        TRAINING: (float((total - data)[~lost].sum()), "steps that count, without waiting for data"),
        DATA: (float(data[~lost].sum()), "waiting for the next batch"),
        LOST: (float(total[lost].sum()), "steps undone by an interruption and run again"),
        EVALUATION: (_seconds_of(records.of(EvaluationRecord)), "held-out loss"),
        CHECKPOINTS: (_stalls_of(records.of(CheckpointRecord)), "waiting for checkpoints"),
        VERIFICATION: (_verify_seconds(records), "proving the plan equal to one device"),
    }
    running = sum(attempt.seconds for attempt in attempts)
    ends = {end.attempt: end for end in records.of(RunEnded)}
    gaps = [
        between_starts(before.ended, after.started, ends.get(before.number))
        for before, after in itertools.pairwise(attempts)
        if after.started is not None and before.ended is not None
    ]
    known[START_UP] = (
        max(0.0, running - sum(seconds for seconds, _ in known.values())),
        "process start, loading, resuming, logging",
    )
    known[BETWEEN] = (sum(broken for broken, _ in gaps), "from the last record of a start to the next start")
    known[PAUSED] = (sum(paused for _, paused in gaps), "outside its hours, or after an end that was asked for")
    return tuple(Phase.of(kind, seconds, note) for kind, (seconds, note) in known.items() if seconds > 0)
