"""The watch: a supervisor looks at its ranks, finds the rank that hangs, and says how that is known.

Of the ranks that are late (`silences.py`) those are to blame that are furthest behind: the others wait for them. Before
anybody is blamed all ranks are asked for their stacks: who stands in a collective waits for others, and is not to blame
while one of those is at work. Nor is one that waits for ranks which have ended with code 0: these have left too early.
Until a rank is late, the watch asks for nothing of a single one: what it sees has the same size however many ranks
there are. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.errors import PacelineError, RankHung
from paceline.patience import programs_per_core
from paceline.spec.journal.timing.clock import passed_seconds
from paceline.spec.survive.health import HealthSpec
from paceline.spec.survive.phases import MEETS, TOLD
from paceline.supervise.blame import LEFT_NO_ERROR, TRY_LEFT, leave_if_there_is_room, ranks_text
from paceline.supervise.pulses.flight import missing_from, reached
from paceline.supervise.pulses.pulse import PULSE_FOLDER
from paceline.supervise.pulses.sight import (
    LONGEST_LOOK_SECONDS,
    LOOK_SECONDS,
    NearSight,
    ProcessOf,
    Sight,
    nobody_knows,
)
from paceline.supervise.pulses.silences import HangLimits, WatchedRank, furthest_behind
from paceline.supervise.pulses.stacks import FLIGHT_MARK, collective_in, main_thread, parted, save_stacks

WAITS_TO_MEET = ("rendezvous", MEETS)  # phases in which a rank waits for its peers, in no collective
STACKS_SECONDS = 1.0  # at most, to write them, on a machine with free cores
TRY, THEIR = "start the same command again: it resumes from the last checkpoint", ("its", "their")
AGAIN_SECONDS = 5.0  # after which stacks are too old to blame anybody


@dataclass(frozen=True)
class Suspect:
    """Ranks that hang: what is told of it, and since which moment (`passed_seconds`) they stand still.

    Or ranks that `have_left` with code 0, for which others wait.
    """

    ranks: tuple[int, ...]
    what: str
    because: str
    since: float
    evidence: Mapping[str, object] = field(default_factory=dict)
    have_left: bool = False


class WorldWatch(Protocol):
    """Looks at the ranks of a world while they run."""

    def for_ranks(self) -> dict[str, str]:
        """Return what the environment of the ranks says of it."""

    def look(self, now: float, ended: Collection[int] = (), has_failed: bool = False) -> Suspect | None:
        """Return which ranks stand still for ever, or None; `now` is of the monotonic clock.

        `ended` are ranks that run no more, of which one `has_failed`, or all have ended with code 0.
        """

    def tell(self, suspect: Suspect) -> None:
        """Leave what is known of them as their errors, where the supervisor looks for the first failure."""


class PulseWatch:
    """Looks at the pulses of `ranks` ranks in a supervisor's folder."""

    def __init__(
        self, folder: Path, ranks: int, health: HealthSpec, run_dir: Path | None = None,
        load: Callable[[], float] = programs_per_core, sight: Sight | None = None,
        process_of: ProcessOf = nobody_knows,
    ) -> None:  # fmt: skip
        """Stacks are kept below `run_dir`; `load` is how many programs want each core.

        `sight` is where ranks are seen; without one, on this machine, where `process_of` knows their processes.
        """
        self._sight = sight or NearSight(folder, range(ranks), HangLimits.of(health), process_of)
        self._folder, self._ranks, self._run_dir, self._load = folder, ranks, run_dir, load
        self._looked = -float("inf")
        self._asked: float | None = None
        self._unanswered: dict[int, str] = {}  # what ranks had written when they were asked
        self._is_told = False
        self.have_met = False  # whether a rank was seen to have met the others

    @staticmethod
    def of(
        health: HealthSpec | None, folder: Path, ranks: int, run_dir: Path | None, process_of: ProcessOf = nobody_knows
    ) -> PulseWatch | None:
        """Return the watch over a world's ranks, None where hangs are not looked for."""
        if health is None or not health.hangs:
            return None
        return PulseWatch(folder, ranks, health, run_dir, process_of=process_of)

    def for_ranks(self) -> dict[str, str]:
        """Return what the environment of the ranks says: where their pulses are listened to."""
        return {PULSE_FOLDER: str(self._folder)}

    def look(self, now: float, ended: Collection[int] = (), has_failed: bool = False) -> Suspect | None:
        """Return who hangs, or None. `now` is of the system's monotonic clock; `ended` are ranks that run no more.

        Where one of those `has_failed` nobody hangs: what a peer's failure brings about is no hang. Call it often:
        between two calls it is taken that the machine was as loaded as at the second.
        """
        if now - self._looked < LOOK_SECONDS:
            return None
        passed = min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        load = self._load()
        overview = self._sight.overview(ended, passed / load, now, has_failed)
        self.have_met |= overview.have_met
        running = [rank for rank in range(self._ranks) if rank not in ended]
        are_all_seen = overview.ranks >= len(running)
        if has_failed or self._is_told or not (overview.is_late if are_all_seen else overview.stopped_is_late):
            if self._asked is not None:
                self._asked = None
                self._sight.leave()
            return None
        if self._asked is None:
            self._asked, self._unanswered = now, {rank: self._sight.stack(rank) for rank in running}
            self._sight.ask(running)
        elif self._unanswered and now - self._asked >= STACKS_SECONDS * load / 2:
            still = [rank for rank, before in self._unanswered.items() if self._sight.stack(rank) == before]
            self._unanswered = {}
            self._sight.ask([rank for rank in still if rank not in ended], by_signal=True)
        known = {rank: seen for rank, seen in self._sight.closely().items() if rank not in ended}
        if now - self._asked < STACKS_SECONDS * load and not self._have_answered(known, len(running)):
            return None
        behind = self._to_blame(known) if len(known) == len(running) or not are_all_seen else []
        if not are_all_seen:  # some have no pulse: they import, or have left a world and wait to meet who is stopped
            behind = [one for one in behind if one.is_stopped]
        if not behind and now - self._asked >= AGAIN_SECONDS * load:
            self._asked = None
        if behind and ended and all(self._waits_for_peers(one) for one in behind):
            return self._left(ended, behind, now)
        return self._blamed(known, behind, now) if behind else None

    def _have_answered(self, known: Mapping[int, WatchedRank], running: int) -> bool:
        """Return whether all ranks have written what they were asked for that can, where that is known before long."""
        return len(known) == running == len(self._unanswered) and all(
            seen.is_stopped or (FLIGHT_MARK in (told := self._sight.stack(rank)) and told != self._unanswered[rank])
            for rank, seen in known.items()
        )

    def _to_blame(self, known: Mapping[int, WatchedRank]) -> list[WatchedRank]:
        """Return the ranks that hang: those that are late, and for which others wait.

        One that stands in a collective waits itself. Where all that are as far do, it is their common silence, or that
        of a message between them, that counts: between machines, or where messages go, for as long as if they worked.
        """
        late = furthest_behind(known.values())
        waits = {rank for rank in known if collective_in(parted(self._sight.stack(rank))[0])}
        if named := [one for one in late if one.is_stopped or one.pulse.rank not in waits]:
            return named
        others = {one.order for one in known.values() if not one.is_late}
        are_overdue = all(one.is_overdue for one in late)
        if late and late[0].order not in others and (are_overdue or self._sight.is_quiet()):
            return late
        if all(one.waits and (one.pulse.rank in waits or one.pulse.phase == MEETS) for one in known.values()):
            return _apart(known.values())
        return []

    def tell(self, suspect: Suspect) -> None:
        """Leave what is known of ranks that hang as their errors, where the supervisor looks for the first failure.

        They are to be ended then. This watch suspects nobody further: who goes on makes another.
        """
        self._is_told = True
        kind, try_ = (PacelineError, TRY_LEFT) if suspect.have_left else (RankHung, TRY)
        for rank in suspect.ranks:
            error = kind(suspect.what, suspect.because, try_).naming_ranks()
            details = {**error.as_dict(), "evidence": dict(suspect.evidence)}
            leave_if_there_is_room(self._folder, rank, details, suspect.since)

    # ---- who is to blame -------------------------------------------------------------------------------------------

    def _waits_for_peers(self, one: WatchedRank) -> bool:
        """Return whether a rank waits for others, in a collective or before one, and is not held by a signal."""
        if one.is_stopped:
            return False
        return one.pulse.phase in WAITS_TO_MEET or bool(collective_in(parted(self._sight.stack(one.pulse.rank))[0]))

    def _left(self, ended: Collection[int], waiting: list[WatchedRank], now: float) -> Suspect:
        """Return ranks that have ended with code 0, for which others wait: they have failed, and nobody else."""
        pulse = waiting[0].pulse
        what = f"{ranks_text(ended)} of {self._ranks} ended with code 0 before {THEIR[len(ended) > 1]} peers were done"
        waits = f"{ranks_text(one.pulse.rank for one in waiting)} waited {TOLD[pulse.phase]} of step {pulse.step}"
        because = f"{LEFT_NO_ERROR}; {waits}, and nobody came"
        return Suspect(tuple(sorted(ended)), what, because, passed_seconds() - (now - pulse.since), {}, True)

    def _blamed(self, known: Mapping[int, WatchedRank], behind: list[WatchedRank], now: float) -> Suspect:
        answers = {rank: parted(self._sight.stack(rank)) for rank in known}
        stacks = {rank: stack for rank, (stack, _) in answers.items()}
        flights = {rank: flight for rank, (_, flight) in answers.items()}
        waits_in = {rank: collective_in(stack) for rank, stack in stacks.items()}
        named = [one for one in behind if not waits_in[one.pulse.rank]] or behind
        ranks = tuple(one.pulse.rank for one in named)
        states = {rank: seen.state for rank, seen in known.items()}
        first = named[0]
        pulse = first.pulse
        peers = {name for rank, name in waits_in.items() if name and rank not in ranks}
        everybody = len(named) == self._ranks > 1
        subject = f"{ranks_text(ranks)} of {self._ranks}"
        what = f"{subject} hung {TOLD[pulse.phase]} of step {pulse.step}"
        kept = save_stacks(self._run_dir, stacks, flights, states, pulse.step) if self._run_dir else None
        of_what = "" if first.rests else " of an idle machine"
        told = [f"nothing was heard for {first.silent_seconds:.1f} s{of_what}, where {_told_limit(first)}"]
        told += [f"process {one.pulse.process} is {_state_told(one.state)}" for one in named if one.is_stopped]
        if everybody:
            told.append("all ranks wait for each other: no one is behind, so suspect what is between them")
            told += _in_different(waits_in) if any(waits_in.values()) else []
        elif peers:
            told.append(f"its peers wait in {', '.join(sorted(peers))}")
        at = main_thread(stacks[pulse.rank])
        told.append(f"it is at {at[0]}" if at else "it answered with no stack")
        told += (apart := missing_from(flights))
        if kept is not None:
            told.append(f"the stacks of all ranks and their last collectives are in {kept}")
        evidence = {
            "silent_seconds": round(first.silent_seconds, 3),
            "limit_seconds": round(first.limit_seconds, 3),
            "median_step_seconds": first.median_step_seconds,
            "ranks": [
                {"rank": rank, "step": seen.pulse.step, "phase": seen.pulse.phase, "state": seen.state,
                 "silent_seconds": round(seen.silent_seconds, 3), "collective": waits_in[rank] or None,
                 "reached": {group: list(last) for group, last in reached(flights[rank]).items()},
                 "stack": main_thread(stacks[rank])[:6]}
                for rank, seen in sorted(known.items())
            ],
            "collectives": apart,
            "stacks": str(kept) if kept else None,
        }  # fmt: skip
        return Suspect(ranks, what, "; ".join(told), passed_seconds() - (now - pulse.since), evidence)


def _apart(waiting: Collection[WatchedRank]) -> list[WatchedRank]:
    """Return those of ranks that wait for each other which are elsewhere than most; all, where none are.

    Who waits between two steps for its peers to come is where it should be.
    """
    ranks = [one for one in waiting if one.pulse.phase != MEETS] or list(waiting)
    places = Counter(one.order for one in ranks)
    (most, _), *others = places.most_common()
    return [one for one in ranks if one.order != most] if others and len(ranks) == len(waiting) else ranks


def _in_different(waits_in: Mapping[int, str]) -> list[str]:
    """Return a sentence on the collectives that ranks wait in, by rank, where those are several."""
    ranks: dict[str, list[int]] = {}
    for rank, name in sorted(waits_in.items()):
        ranks.setdefault(name or "no collective", []).append(rank)
    each = [f"{ranks_text(those)} in {name}" for name, those in ranks.items()]
    return (
        [f"they wait in different collectives: {'; '.join(each)}"] if len(ranks) > 1 and any(waits_in.values()) else []
    )


def _told_limit(seen: WatchedRank) -> str:
    median = seen.median_step_seconds
    steps = f", and a step takes {median:.3g} s" if median is not None else ""
    at_rest = " of one that does nothing, as the system tells" if seen.rests and not seen.is_stopped else ""
    return f"{seen.limit_seconds:.1f} s is the limit{at_rest}{steps}"


def _state_told(state: str) -> str:
    names = {"T": "stopped by a signal", "t": "held by a debugger", "Z": "ended and not yet collected", "X": "ended"}
    return names.get(state, f"in state {state}")
