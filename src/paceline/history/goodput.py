"""Goodput: the part of a run's time that training needed, what the rest went to, and what a simulation expects."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.history.phases import (
    AS_ASKED,
    CHECKPOINTS,
    DATA,
    EVALUATION,
    LOST,
    PAUSED,
    TRAINING,
    Phase,
    between_starts,
    resume_steps,
)
from paceline.history.records import Records, number
from paceline.simulate.costs_of_run import MeasuredCosts, Rehearsal, rehearse
from paceline.spec.journal.kinds import CheckpointRecord, RecoveryRecord, RunEnded
from paceline.spec.journal.record import plain_mean
from paceline.units import format_seconds

LONGEST_SECONDS = 1e12  # of a run that is simulated: beyond it a journal is damaged
USEFUL = (TRAINING, DATA, EVALUATION)  # phases that a run without an interruption has too


@dataclass(frozen=True)
class MeasuredGoodput:
    """Where a run's wall time without planned pauses went, in seconds; the kinds add up to it.

    Faults are those that it went on from by itself, restarts those of its starts that somebody, or a launcher, has made
    since the one before ended otherwise than asked.

    `costs` are what saves and faults cost here, and `simulated` what runs with the same costs come to whose faults come
    at random; None of a run without either. Neither has what is in `other_seconds` or `between_seconds`.
    """

    wall_seconds: float
    useful_seconds: float
    lost_seconds: float  # steps made again
    recovery_seconds: float  # from a fault, or the beginning of a new start, to the first step after it
    stall_seconds: float  # waiting for checkpoints
    other_seconds: float  # starting and proving at the first start
    faults: int
    costs: MeasuredCosts | None
    simulated: Rehearsal | None
    restarts: int = 0
    between_seconds: float = 0.0  # from the last record of a start that was to go on to the next start: nobody ran
    paused_seconds: float = 0.0  # in no kind: outside of its hours, or until somebody wanted more of it

    @property
    def exposed_seconds(self) -> float:
        """Wall time in which the run was at work after its first step: what the simulated runs are held against."""
        return self.wall_seconds - self.other_seconds - self.between_seconds

    @property
    def share(self) -> float:
        """Useful time over wall time."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds else 1.0


@dataclass(frozen=True)
class Restart:
    """A start that goes on with a run which was interrupted: how long nothing was trained, and what of it was kept."""

    seconds: float  # from its beginning to that of its first step
    between: float  # from the last record before it to its beginning
    kept: bool  # whether no step is made again


def restarts_of(records: Records) -> list[Restart]:
    """Return the starts that somebody else than the run's own supervisor has made, since the one before broke off.

    A pause that was planned counts for nothing, and a start that a further world of the same call has begun is one of
    its recoveries.
    """
    ends = {end.attempt: end for end in records.of(RunEnded)}
    recovered = {(record.attempt, record.step) for record in records.of(RecoveryRecord)}
    steps, done = records.steps, resume_steps(records)
    attempts, found = steps.column("attempt"), list[Restart]()
    for before, after in itertools.pairwise(sorted(records.spans)):
        broken, paused = between_starts(records.spans[before][1], records.spans[after][0], ends.get(before))
        was_asked = paused > 0 or (before in ends and ends[before].status in AS_ASKED)
        if was_asked or (after, done.get(after)) in recovered:
            continue
        own, last = attempts == after, steps.column("step")[attempts == before]
        began, ended = records.spans[after]
        if own.any():  # else the start made no step: all of it is gone
            first = int(np.flatnonzero(own)[0])
            ended = float(np.nan_to_num(steps.column("time")[first] - steps.column("total")[first], nan=began))
        found.append(Restart(max(0.0, ended - began), broken, not last.size or last.max() <= done.get(after, 0)))
    return found


def goodput_of(records: Records, phases: Sequence[Phase], simulates: bool = True) -> MeasuredGoodput:
    """Return a run's goodput, from its phases and the recoveries on record; runs with the same costs where asked."""
    seconds = {phase.kind: phase.seconds for phase in phases}
    paused = seconds.pop(PAUSED, 0.0)
    wall = sum(seconds.values())
    recoveries, restarts = records.of(RecoveryRecord), restarts_of(records)
    # The first step after a fault counts as a step.
    back = [(record.seconds.get("total") or 0.0) - (record.seconds.get("step") or 0.0) for record in recoveries]
    useful = sum(seconds.get(kind, 0.0) for kind in USEFUL)
    lost, stalls = seconds.get(LOST, 0.0), seconds.get(CHECKPOINTS, 0.0)
    back += [each.seconds for each in restarts]
    rest = max(0.0, wall - useful - lost - stalls)
    between = min(rest, sum(each.between for each in restarts))
    recovery = min(rest - between, sum(back))
    other = rest - between - recovery
    exposed = useful + lost + stalls + recovery
    costs = _costs(records, recoveries, restarts, back, useful, exposed) if simulates else None
    simulated = rehearse(costs) if costs else None
    return MeasuredGoodput(
        wall, useful, lost, recovery, stalls, other, len(recoveries), costs, simulated, len(restarts), between, paused
    )


def _costs(
    records: Records, recoveries: Sequence[RecoveryRecord], restarts: Sequence[Restart], back: Sequence[float],
    work: float, exposed: float,
) -> MeasuredCosts | None:  # fmt: skip
    """Return what saves and faults cost a run that did so much work; None without a fault, or without a step.

    What a restart took counts as restarting. Until somebody, or a launcher, starts the run again nobody runs: how long
    that takes is no cost of the run's own.
    """
    saves = [record for record in records.of(CheckpointRecord) if record.tier is None]
    steps = len(set(records.steps.column("step")))
    saved_at = sorted({record.step for record in saves if record.step})
    if not back or not steps or not work or not exposed < LONGEST_SECONDS:
        return None
    gaps = [after - before for before, after in zip([0, *saved_at], saved_at, strict=False)]
    step = work / steps

    # A restart's whole time is its restarting, and its loading is in that.
    restart = plain_mean([*(record.seconds.get("start") or 0.0 for record in recoveries),
                          *(each.seconds for each in restarts)])  # fmt: skip
    restore = plain_mean([*(record.seconds.get("restore") or 0.0 for record in recoveries), *(0.0 for _ in restarts)])
    kept = [*(record.step not in (0, *saved_at) for record in recoveries), *(each.kept for each in restarts)]
    worlds = [*(record.from_world or 1 for record in recoveries), *(start.world_size or 1 for start in records.starts)]
    return MeasuredCosts(
        devices=max(worlds, default=1),
        work=work,
        step=step,
        every=statistics.median(gaps) * step if gaps else work,
        stall=plain_mean(max(0.0, number(record.cost_seconds) or 0.0) for record in saves) if saves else 0.0,
        write=plain_mean(max(0.0, number(record.seconds) or 0.0) for record in saves) if saves else 0.0,
        detection=max(0.0, plain_mean(back) - restart - restore),
        restart=restart,
        restore=restore,
        between_faults=exposed / len(back),
        kept=plain_mean(kept),
    )


def goodput_text(goodput: MeasuredGoodput) -> str:
    """Return a run's goodput in one line."""
    kinds = (
        ("lost", goodput.lost_seconds), ("recovery", goodput.recovery_seconds), ("checkpoints", goodput.stall_seconds),
        ("between starts", goodput.between_seconds), ("starting and other", goodput.other_seconds),
    )  # fmt: skip
    rest = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in kinds if seconds > 0)
    text = f"{goodput.share:.1%} (useful {format_seconds(goodput.useful_seconds)}" + (f", {rest})" if rest else ")")
    if goodput.paused_seconds:
        text += f", without planned pauses of {format_seconds(goodput.paused_seconds)}"
    if goodput.simulated is None:
        return text
    part = goodput.exposed_seconds / goodput.wall_seconds
    low, mean, high = (
        f"{share * part:.1%}"
        for share in (goodput.simulated.goodput.p10, goodput.simulated.goodput.mean, goodput.simulated.goodput.p90)
    )
    counted = ((goodput.faults, "fault"), (goodput.restarts, "new start"))
    faults = " and ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counted if count)
    return f"{text}; {faults}, for which the simulator expects {mean} ({low} to {high})"
