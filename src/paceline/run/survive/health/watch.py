"""The watch: a supervisor looks at its ranks' pulses, finds the rank that hangs, and says how that is known.

A rank is late that has told nothing for a multiple of the median step; where the machine is loaded, or the rank
computes (a compiler, a collection of garbage), for longer. Of the late ones those are to blame that are furthest
behind: the others wait for them. Before anybody is blamed all ranks are asked for their stacks. Torch-free.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import RankHung
from paceline.patience import programs_per_core
from paceline.run.survive.health.flight import missing_from, reached
from paceline.run.survive.health.pulse import PULSE_FOLDER, Pulse
from paceline.run.survive.health.sight import NearSight, Sight
from paceline.run.survive.health.stacks import collective_in, main_thread, parted, save_stacks
from paceline.spec.journal.timing.clock import passed_seconds
from paceline.spec.survive.health import HealthSpec
from paceline.spec.survive.phases import IN_A_STEP, PHASES, TOLD
from paceline.supervise.blame import leave_error

LOOK_SECONDS = 0.2
STACKS_SECONDS = 1.0  # to write them, on a machine with free cores
STEPS_KEPT = 64
STEPS_NEEDED = 3  # before their median says anything
COMPUTING = 0.5  # of the time, from which on a rank is taken to compute
COMPUTING_FACTOR = 6.0  # times as long a rank may say nothing that computes
BEFORE_THEY_MEET = PHASES[:2]  # starting, and waiting for the others
STOPPED = "TtZX"  # states of /proc: stopped, traced, ended


@dataclass(frozen=True)
class Suspect:
    """Ranks that hang: what is told of it, and since which moment (`passed_seconds`) they stand still."""

    ranks: tuple[int, ...]
    what: str
    because: str
    since: float
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _Silence:
    """How long a rank has told nothing: in seconds of an idle machine."""

    beats: int
    seconds: float = 0.0
    cpu_before: float = 0.0
    clock_before: float = 0.0


class PulseWatch:
    """Looks at the pulses of `ranks` ranks in a supervisor's folder."""

    def __init__(
        self, folder: Path, ranks: int, health: HealthSpec, run_dir: Path | None = None,
        load: Callable[[], float] = programs_per_core, sight: Sight | None = None,
    ) -> None:  # fmt: skip
        """Stacks are kept below `run_dir`; `load` is how many programs want each core.

        `sight` is where ranks are seen; without one, on this machine.
        """
        self._sight = sight or NearSight(folder)
        self._folder, self._ranks, self._health, self._run_dir, self._load = folder, ranks, health, run_dir, load
        self._silences: dict[int, _Silence] = {}
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)
        self._seen_steps: dict[int, int] = {}
        self._looked = -float("inf")
        self._asked: float | None = None
        self._unanswered: dict[int, str] = {}  # what ranks had written when they were asked
        self._is_told = False
        self.met: set[int] = set()  # ranks that were seen to have met the others

    @staticmethod
    def of(health: HealthSpec | None, folder: Path, ranks: int, run_dir: Path | None) -> PulseWatch | None:
        """Return the watch over a world's ranks, None where hangs are not looked for."""
        return PulseWatch(folder, ranks, health, run_dir) if health is not None and health.hangs else None

    def for_ranks(self) -> dict[str, str]:
        """Return what the environment of the ranks says: where their pulses are listened to."""
        return {PULSE_FOLDER: str(self._folder)}

    def look(self, now: float, ended: Collection[int] = ()) -> Suspect | None:
        """Return who hangs, or None. `now` is of the system's monotonic clock; `ended` are ranks that run no more.

        Call it often: between two calls it is taken that the machine was as loaded as at the second.
        """
        if now - self._looked < LOOK_SECONDS:
            return None
        passed = min(now - self._looked, 5 * LOOK_SECONDS)  # a supervisor that slept saw nothing
        self._looked = now
        pulses = {rank: self._sight.pulse(rank) for rank in range(self._ranks) if rank not in ended}
        known = {rank: pulse for rank, pulse in pulses.items() if pulse is not None}
        self.met |= {rank for rank, pulse in known.items() if pulse.phase not in BEFORE_THEY_MEET}
        if ended or self._is_told or len(known) < self._ranks:
            self._asked = None
            return None  # what a peer's end brings about is no hang
        for pulse in known.values():
            self._note(pulse, passed / self._load(), now)
        behind = self._behind(known, now)
        if not behind:
            self._asked = None
            return None
        if self._asked is None:
            self._asked, self._unanswered = now, {rank: self._sight.stack(rank) for rank in known}
            self._ask(known)
        elif self._unanswered and now - self._asked >= STACKS_SECONDS * self._load() / 2:
            still = [rank for rank, before in self._unanswered.items() if self._sight.stack(rank) == before]
            self._unanswered = {}
            self._ask({rank: known[rank] for rank in still if rank in known}, by_signal=True)
        if now - self._asked < STACKS_SECONDS * self._load():
            return None
        return self._blamed(known, behind, now)

    def tell(self, suspect: Suspect) -> None:
        """Leave what is known of ranks that hang as their errors, where the supervisor looks for the first failure.

        They are to be ended then. This watch suspects nobody further: who goes on makes another.
        """
        self._is_told = True
        for rank in suspect.ranks:
            hung = RankHung(
                suspect.what, suspect.because, "start the same command again: it resumes from the last checkpoint",
            )  # fmt: skip
            details = {**hung.as_dict(), "evidence": dict(suspect.evidence)}
            leave_error(self._folder, rank, details, cause=True, moment=suspect.since)

    # ---- who is late -----------------------------------------------------------------------------------------------

    def _note(self, pulse: Pulse, passed: float, now: float) -> None:
        """Add what has passed to a rank's silence, or end it."""
        silence = self._silences.get(pulse.rank)
        if silence is None or silence.beats != pulse.beats:
            silence = _Silence(pulse.beats, cpu_before=self._sight.cpu_seconds(pulse), clock_before=now)
            self._silences[pulse.rank] = silence
        else:
            silence.seconds += passed
        if self._seen_steps.get(pulse.rank, 0) != pulse.steps_made:
            self._seen_steps[pulse.rank] = pulse.steps_made
            self._steps.append(pulse.step_seconds)

    def limit_seconds(self, pulse: Pulse, now: float) -> float:
        """Return for how long a rank may tell nothing where it is."""
        health, silence = self._health, self._silences[pulse.rank]
        if self._sight.state(pulse) in STOPPED:
            return health.hang_minimum
        if pulse.phase not in IN_A_STEP or pulse.steps_made < STEPS_NEEDED:
            return health.hang_elsewhere
        limit = max(health.hang_minimum, health.hang_factor * statistics.median(self._steps))
        spent = self._sight.cpu_seconds(pulse) - silence.cpu_before
        computes = spent > COMPUTING * (now - silence.clock_before)
        return min(health.hang_elsewhere, limit * COMPUTING_FACTOR) if computes else limit

    def _behind(self, known: Mapping[int, Pulse], now: float) -> list[Pulse]:
        """Return the ranks that are furthest behind and late, one that stands still by itself before all others."""
        late = [one for one in known.values() if self._silences[one.rank].seconds > self.limit_seconds(one, now)]
        stopped = [one for one in late if self._sight.state(one) in STOPPED]
        if stopped:
            return stopped
        last = min(one.order for one in known.values())
        return [one for one in late if one.order == last]

    # ---- who is to blame -------------------------------------------------------------------------------------------

    def _ask(self, known: Mapping[int, Pulse], by_signal: bool = False) -> None:
        """Have every rank write its stacks; one that is stopped cannot."""
        for pulse in known.values():
            if self._sight.state(pulse) not in STOPPED:
                self._sight.ask(pulse, by_signal)

    def _blamed(self, known: Mapping[int, Pulse], behind: list[Pulse], now: float) -> Suspect:
        answers = {rank: parted(self._sight.stack(rank)) for rank in known}
        stacks = {rank: stack for rank, (stack, _) in answers.items()}
        flights = {rank: flight for rank, (_, flight) in answers.items()}
        waits_in = {rank: collective_in(stack) for rank, stack in stacks.items()}
        named = [one for one in behind if not waits_in[one.rank]] or behind
        states = {rank: self._sight.state(pulse) for rank, pulse in known.items()}
        first = named[0]
        silence = self._silences[first.rank].seconds
        peers = {name for rank, name in waits_in.items() if name and rank not in [one.rank for one in named]}
        everybody = len(named) == len(known) and len(known) > 1
        who = ", ".join(str(one.rank) for one in named)
        subject = f"rank{'s' if len(named) > 1 else ''} {who} of {self._ranks}"
        what = f"{subject} hung {TOLD[first.phase]} of step {first.step}"
        kept = save_stacks(self._run_dir, stacks, flights, states, first.step) if self._run_dir else None
        told = [f"nothing was heard for {silence:.1f} s of an idle machine, where {self._told_limit(first, now)}"]
        told += [f"process {one.process} is {_state_told(states[one.rank])}" for one in named
                 if states[one.rank] in STOPPED]  # fmt: skip
        if everybody:
            told.append("all ranks wait for each other: no one is behind, so suspect what is between them")
        elif peers:
            told.append(f"its peers wait in {', '.join(sorted(peers))}")
        at = main_thread(stacks[first.rank])
        told.append(f"it is at {at[0]}" if at else "it answered with no stack")
        told += (apart := missing_from(flights))
        if kept is not None:
            told.append(f"the stacks of all ranks and their last collectives are in {kept}")
        evidence = {
            "silent_seconds": round(silence, 3),
            "limit_seconds": round(self.limit_seconds(first, now), 3),
            "median_step_seconds": statistics.median(self._steps) if self._steps else None,
            "ranks": [
                {"rank": rank, "step": pulse.step, "phase": pulse.phase, "state": states[rank],
                 "silent_seconds": round(self._silences[rank].seconds, 3), "collective": waits_in[rank] or None,
                 "reached": {group: list(last) for group, last in reached(flights[rank]).items()},
                 "stack": main_thread(stacks[rank])[:6]}
                for rank, pulse in known.items()
            ],
            "collectives": apart,
            "stacks": str(kept) if kept else None,
        }  # fmt: skip
        ranks = tuple(one.rank for one in named)
        return Suspect(ranks, what, "; ".join(told), passed_seconds() - (now - first.since), evidence)

    def _told_limit(self, pulse: Pulse, now: float) -> str:
        limit = self.limit_seconds(pulse, now)
        median = f", and a step takes {statistics.median(self._steps):.3g} s" if self._steps else ""
        return f"{limit:.1f} s is the limit{median}"


def _state_told(state: str) -> str:
    names = {"T": "stopped by a signal", "t": "held by a debugger", "Z": "ended and not yet collected", "X": "ended"}
    return names.get(state, f"in state {state}")
