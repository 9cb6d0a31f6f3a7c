"""Silences: for how long each rank of a machine has told nothing, and for how long it may. Torch-free.

A rank is late that has told nothing for a multiple of the median step; where the machine is loaded, or the rank
computes (a compiler, a collection of garbage), for longer; where it does nothing at all (`rest.py`) and others can only
wait for it, for less. What a supervisor sees of its ranks is an overview, of the same size however many they are;
overviews of several supervisors make one.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.spec.survive.health import HealthSpec
from paceline.spec.survive.phases import AT_WORK, ENDED, IN_A_STEP, MEETS, PHASES
from paceline.supervise.pulses.longest_rests import LongestRests
from paceline.supervise.pulses.pulse import Pulse
from paceline.supervise.pulses.rest import Rest

STEPS_KEPT = 64
STEPS_NEEDED = 3  # before their median says anything
COMPUTING = 0.5  # of the time, from which on a rank is taken to compute
COMPUTING_FACTOR = 6.0  # times as long a rank may say nothing that computes
REST_BEGINS = 0.4  # seconds of silence, by the clock, after which it is looked whether a process does anything
LONGEST_REST_LOOK = 1.0  # seconds between two looks that count: who slept meanwhile saw nothing
RESTS_FACTOR = 3.0  # times the longest rest that this phase of a step has had of late, a rank may be at rest in it
MAY_WAIT = (*AT_WORK, "load", "check", "evaluate", "save")  # for a peer, in a collective
MAY_REST = (*MAY_WAIT, ENDED)  # where it is looked whether a process does anything
BEHIND_ALL = (sys.maxsize, 0)  # for whom nobody waits
BEFORE_THEY_MEET = PHASES[:2]  # starting, and waiting for the others
STOPPED = "TtZX"  # states of /proc: stopped, traced, ended


@dataclass(frozen=True)
class HangLimits:
    """For how long a rank may tell nothing, as `[run.health]` has it."""

    factor: float
    minimum: float  # seconds
    elsewhere: float  # seconds
    still: float  # seconds, of one that does nothing

    @staticmethod
    def of(health: HealthSpec) -> HangLimits:
        """Return the limits of a spec."""
        return HangLimits(health.hang_factor, health.hang_minimum, health.hang_elsewhere, health.hang_still)


@dataclass(frozen=True)
class WatchedRank:
    """A rank as the supervisor of its machine sees it.

    Seconds of silence are those of an idle machine; of one that does nothing, of the clock: it wants no core.
    """

    pulse: Pulse
    state: str  # of its process, as the system names it
    silent_seconds: float
    limit_seconds: float
    median_step_seconds: float | None  # of the ranks of its machine
    rests: bool = False  # whether the limit is that of one that does nothing, and both are of the clock
    is_overdue: bool = False  # whether it has told nothing for longer than it may whatever it does
    waits: bool = False  # whether it has done nothing for so long that it is one of those that wait, or hang

    @property
    def order(self) -> tuple[int, int]:
        """How far the rank is, for those that wait for it: nobody does for one that waits for its peers to come."""
        return BEHIND_ALL if self.pulse.phase == MEETS else self.pulse.order

    @property
    def is_late(self) -> bool:
        """Whether the rank has told nothing for longer than it may where it is."""
        return self.silent_seconds > self.limit_seconds

    @property
    def is_stopped(self) -> bool:
        """Whether its process stands still by itself."""
        return self.state in STOPPED

    def told(self, now: float) -> dict[str, object]:
        """Return what another machine is told of the rank: moments as ages, since clocks differ."""
        return {**asdict(self), "pulse": {**asdict(self.pulse), "since": now - self.pulse.since}}

    @staticmethod
    def heard(told: Mapping[str, Any], now: float) -> WatchedRank:
        """Return a rank of which another machine has told."""
        pulse = Pulse(**{**told["pulse"], "since": now - told["pulse"]["since"]})
        return WatchedRank(**{**told, "pulse": pulse})


@dataclass(frozen=True)
class Overview:
    """What a look at ranks shows, whatever their number."""

    ranks: int = 0  # that have a pulse
    have_met: bool = False  # whether one of them has met the others
    last: tuple[int, int] | None = None  # how far the rank is that is furthest behind
    last_is_late: bool = False  # whether a rank is late that is no further than that
    stopped_is_late: bool = False  # whether one is that stands still by itself, wherever it is
    waiting: int = 0  # ranks that do nothing, and have not for long, where ranks wait for their peers

    def told(self) -> dict[str, object]:
        """Return what another machine is told of it: what is not so by default."""
        return {name: value for name, value in vars(self).items() if value != getattr(Overview, name)}

    @staticmethod
    def heard(told: Mapping[str, Any]) -> Overview:
        """Return what another machine has told."""
        last = told.get("last")
        return Overview(**{**told, "last": None if last is None else tuple(last)})

    @property
    def is_late(self) -> bool:
        """Whether a rank hangs as far as these ranks tell: others wait for the rank, or it stands still by itself."""
        return self.last_is_late or self.stopped_is_late or self.all_wait

    @property
    def all_wait(self) -> bool:
        """Whether no rank does anything: none of them is behind, and yet nobody goes on."""
        return 0 < self.ranks == self.waiting


def together(overviews: Iterable[Overview]) -> Overview:
    """Return what several looks at different ranks show together."""
    found = Overview()
    for one in overviews:
        last = min((each for each in (found.last, one.last) if each is not None), default=None)
        late = any(each.last_is_late for each in (found, one) if each.last == last)
        found = Overview(
            found.ranks + one.ranks,
            found.have_met or one.have_met,
            last,
            late,
            found.stopped_is_late or one.stopped_is_late,
            found.waiting + one.waiting,
        )
    return found


def overview_of(seen: Iterable[WatchedRank]) -> Overview:
    """Return what ranks show together."""
    return together(
        Overview(
            1,
            one.pulse.phase not in BEFORE_THEY_MEET,
            one.order,
            one.is_late,
            one.is_late and one.is_stopped,
            int(one.waits),
        )
        for one in seen
    )


def furthest_behind(seen: Iterable[WatchedRank]) -> list[WatchedRank]:
    """Return the ranks that are furthest behind and late, one that stands still by itself before all others."""
    ranks = sorted(seen, key=lambda one: one.pulse.rank)
    late = [one for one in ranks if one.is_late]
    last = min((one.order for one in ranks), default=None)
    return [one for one in late if one.is_stopped] or [one for one in late if one.order == last]


@dataclass
class _Silence:
    """How long a rank has told nothing, and for how long its process stands still: in seconds of an idle machine."""

    beats: int
    state: str
    seconds: float = 0.0
    still_seconds: float = 0.0  # without a look at which it ran: a debugger may hold it for a moment of a long phase
    cpu_before: float = 0.0
    clock_before: float = 0.0
    phase: str = ""
    step: int = 0
    by_clock: float = 0.0  # as `seconds`, whatever the load is
    rest: Rest | None = None  # since the silence is long enough to look
    rest_seconds: float = 0.0  # by the clock
    is_late: bool = False  # of its rest: the rank may be asked for its stacks


class Silences:
    """The silences of the ranks of one machine."""

    def __init__(
        self, limits: HangLimits, state: Callable[[Pulse], str], cpu_seconds: Callable[[Pulse], float],
        rest: Callable[[Pulse, float], Rest] = lambda pulse, now: Rest(pulse.process, now),
        goes_on: Callable[[Pulse, float], None] = lambda pulse, now: None,
    ) -> None:  # fmt: skip
        """`state`, `cpu_seconds` and `rest` (from a moment on) say of a rank's process what the system knows.

        `goes_on` is told of each rank that tells something anew.
        """
        self._limits, self._state, self._cpu_seconds, self._rest = limits, state, cpu_seconds, rest
        self._goes_on = goes_on
        self._noted = -math.inf
        self._longest_rests = LongestRests()  # that ranks had in a step, and went on
        self._are_done = False  # whether the run is over on all ranks that are there
        self._silences: dict[int, _Silence] = {}
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)
        self._seen_steps: dict[int, int] = {}

    def note(self, pulses: Iterable[Pulse], passed: float, now: float) -> dict[int, WatchedRank]:
        """Return how ranks are seen, when so many seconds of an idle machine have passed since the last look."""
        known = list(pulses)
        for gone in self._silences.keys() - {pulse.rank for pulse in known}:
            del self._silences[gone]
        by_clock, self._noted = min(now - self._noted, LONGEST_REST_LOOK), now
        for pulse in known:
            self._note(pulse, passed, by_clock, now)
        median = statistics.median(self._steps) if self._steps else None
        self._are_done = all(pulse.phase == ENDED for pulse in known)
        return {pulse.rank: self._seen(pulse, median, now) for pulse in known}

    def _note(self, pulse: Pulse, passed: float, by_clock: float, now: float) -> None:
        """Add what has passed, on an idle machine and by the clock, to a rank's silence, or end it."""
        silence, state = self._silences.get(pulse.rank), self._state(pulse)
        if silence is None or silence.beats != pulse.beats:
            if silence is not None and silence.phase in AT_WORK:
                self._longest_rests.add(silence.phase, silence.step, silence.rest_seconds)
            silence = _Silence(pulse.beats, state, cpu_before=self._cpu_seconds(pulse), clock_before=now)
            silence.phase, silence.step = pulse.phase, pulse.step
            self._goes_on(pulse, now)
            self._silences[pulse.rank] = silence
        else:
            stood_still = silence.state in STOPPED and state in STOPPED
            silence.still_seconds = silence.still_seconds + passed if stood_still else 0.0
            silence.seconds, silence.state = silence.seconds + passed, state
            silence.by_clock += by_clock
            if silence.by_clock >= REST_BEGINS and (pulse.phase in MAY_REST or state in STOPPED):
                silence.rest = silence.rest or self._rest(pulse, now)
                goes_on = silence.rest.goes_on(now, has_settled=silence.is_late)
                silence.rest_seconds = silence.rest_seconds + by_clock if goes_on else 0.0
        if self._seen_steps.get(pulse.rank, 0) != pulse.steps_made:
            self._seen_steps[pulse.rank] = pulse.steps_made
            self._steps.append(pulse.step_seconds)

    def _seen(self, pulse: Pulse, median: float | None, now: float) -> WatchedRank:
        silence, limits = self._silences[pulse.rank], self._limits
        seconds = silence.still_seconds if silence.state in STOPPED else silence.seconds
        seen = WatchedRank(pulse, silence.state, seconds, 0.0, median)
        longest, still = self._longest_seconds(seen, now), self._still_seconds(seen)
        quiet = min(silence.by_clock, silence.rest_seconds + REST_BEGINS)
        if seen.is_stopped:  # it may have told nothing for long before
            quiet = silence.rest_seconds
        silence.is_late = quiet > still
        waits = pulse.phase == MEETS or (pulse.phase in MAY_WAIT and quiet > limits.minimum)
        seen = replace(
            seen, limit_seconds=longest, is_overdue=seconds > longest, waits=waits and seconds > limits.minimum
        )
        if silence.is_late and not seen.is_overdue:
            return replace(seen, silent_seconds=quiet, limit_seconds=still, rests=True)
        return seen

    def _still_seconds(self, seen: WatchedRank) -> float:
        """Return for how long a rank may do nothing where it is: for ever, if others may be at work for it."""
        if seen.is_stopped:
            return self._limits.still
        if seen.pulse.phase == ENDED:
            return self._limits.elsewhere
        known, median = seen.pulse.steps_made >= STEPS_NEEDED, seen.median_step_seconds
        if seen.pulse.phase not in AT_WORK or not known or median is None:
            return math.inf
        longest = self._longest_rests.longest(seen.pulse.phase, seen.pulse.step)
        return max(self._limits.still, self._limits.factor * median, RESTS_FACTOR * longest)

    def _longest_seconds(self, seen: WatchedRank, now: float) -> float:
        """Return for how long a rank may tell nothing where it is, whatever it does."""
        limits, pulse = self._limits, seen.pulse
        if seen.is_stopped or pulse.phase == MEETS:
            return limits.minimum
        if pulse.phase == ENDED and self._are_done:
            return math.inf
        if pulse.phase not in IN_A_STEP or pulse.steps_made < STEPS_NEEDED or seen.median_step_seconds is None:
            return limits.elsewhere
        limit = max(limits.minimum, limits.factor * seen.median_step_seconds)
        silence = self._silences[pulse.rank]
        spent = self._cpu_seconds(pulse) - silence.cpu_before
        computes = spent > COMPUTING * (now - silence.clock_before)
        return min(limits.elsewhere, limit * COMPUTING_FACTOR) if computes else limit
