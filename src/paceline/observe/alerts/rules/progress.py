"""Rules of how fast a run gets on: no step, steps slower than forecast, a checkpoint that is too old."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

from paceline.observe.alerts.rules.rule import AlertRule, Trouble
from paceline.observe.alerts.rules.run_seen import STEPS_KEPT, AlertSeen
from paceline.patience import programs_per_core
from paceline.spec.journal.kinds import CheckpointRecord, FaultRecord, RanksRecord, RunStarted, StepRecord
from paceline.spec.journal.record import Record
from paceline.units import format_seconds, parse_seconds

LONG_GAPS = (
    ("run", "evaluate_every"), ("run", "checkpoint_every"), ("task", "samples", "every"),
    ("run", "checkpoints", "memory_every"), ("run", "checkpoints", "remote_every"),
)  # fmt: skip
Due = tuple[tuple[str, ...], ...]
LONGER = 3.0  # times the longest pause so far after such a step, before the next one counts as too long
ELSEWHERE_SECONDS = 600.0  # where the spec does not say how long building and saving may take
STEPS_NEEDED = 32
PAUSES_NEEDED = 128  # what comes every 100 steps by default (checks of agreement, health) has been seen once
SCATTER = 4.0  # times what the longest pause between ordinary steps was above their median, that one must exceed it by
SHORTEST_SECONDS = 1.0  # two looks at the journal
OVER = 0.75  # of what is missing of a rate: a rule that fires is over where less than this is missing


class NoStep(AlertRule):
    """No step for some median steps: of a run that computes. Building, saving and evaluating have a longer limit.

    As soon as the pauses between its own steps have shown how they scatter, a run warns after those median steps; it is
    critical after `no_step_minimum`, as it is without a warning of a run that has made few steps.
    """

    name = "no_step"

    def __init__(self, seen: AlertSeen, load: Callable[[], float] = programs_per_core) -> None:
        super().__init__(seen)
        self._load = load
        self._since: float | None = None  # the last sign of life that a step was, or a start
        self._is_recovering = False
        self._was_due: Due = ()  # behind the last step
        self._longest: dict[Due, float] = {}  # pause behind a step after which the same was due
        self._pauses: deque[float] = deque(maxlen=STEPS_KEPT)  # behind other steps of this start
        self._counted, self._longest_pause = 0, 0.0  # and of all of them

    def add(self, record: Record) -> None:
        """Take a record."""
        if isinstance(record, StepRecord) and record.time is not None:
            if self._since is not None and not self._is_recovering and self.seen.steps_made > 1:
                self._add_pause(record.time - self._since)
            self._since, self._is_recovering, self._was_due = record.time, False, self._due(record.step or 0)
        elif isinstance(record, RunStarted):
            self._since, self._is_recovering, self._was_due = record.time, False, ()
            self._pauses.clear()
            self._counted, self._longest_pause = 0, 0.0
        elif isinstance(record, FaultRecord) and record.rank is not None:
            self._is_recovering = True

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return how long no step was made, where that is too long."""
        if self._since is None or self.seen.ended is not None:
            return None
        silent, limit = now - self._since, self._limit()
        warns = min(limit, self._warning_limit())
        severity = "" if silent / (self._load() if self.seen.on_cpu else 1.0) > limit else "warning"
        if severity and silent / self._load() <= warns:
            return None
        limit, median = warns if severity else limit, self.seen.median_seconds
        usual = f"; a step takes {format_seconds(median)}" if median else ""
        title = f"no step for {format_seconds(silent)}, since step {self.seen.step}{usual}"
        evidence = {"silent_seconds": silent, "limit_seconds": limit, "median_step_seconds": median}
        return Trouble(title, evidence, "look at the logs of the ranks; of one that hangs the stack is kept", severity)

    def _add_pause(self, seconds: float) -> None:
        """Note how long no step was made between two."""
        if self._was_due:
            self._longest[self._was_due] = max(self._longest.get(self._was_due, 0.0), seconds)
            return
        self._pauses.append(seconds)
        self._counted, self._longest_pause = self._counted + 1, max(self._longest_pause, seconds)

    def _warning_limit(self) -> float:
        """Return the limit that the scatter of the pauses between steps allows; none where too few were made."""
        if self._was_due or self._is_elsewhere or self._counted < PAUSES_NEEDED:
            return math.inf
        median = statistics.median(self._pauses)
        beyond = self._longest_pause + SCATTER * (self._longest_pause - median)
        return max(self.spec.no_step_medians * median, beyond, SHORTEST_SECONDS)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the run is taken to be building, or to be ending."""
        return self._is_recovering or self.seen.step >= (self.seen.planned_steps or self.seen.step + 1)

    def _limit(self) -> float:
        median = self.seen.median_seconds
        text = self.seen.option("run", "health", "hang_elsewhere")
        elsewhere = parse_seconds(text) if isinstance(text, str) else ELSEWHERE_SECONDS
        if median is None or self._is_elsewhere:
            return elsewhere
        limit = max(self.spec.no_step_minimum, self.spec.no_step_medians * median)
        if not self._was_due:
            return limit
        return max(limit, LONGER * self._longest[self._was_due] if self._was_due in self._longest else elsewhere)

    def _due(self, step: int) -> Due:
        """Return which of LONG_GAPS come after a step."""
        every = [(keys, self.seen.steps_between(*keys)) for keys in LONG_GAPS]
        return tuple(keys for keys, steps in every if steps and step % steps == 0)


class Slow(AlertRule):
    """Steps that come slower than forecast, beyond the forecast's own interval.

    On CPUs, steps that would be fast enough if no other program wanted their cores wake nobody: that is on record.
    """

    name = "slow"

    def __init__(self, seen: AlertSeen, load: Callable[[], float] = programs_per_core) -> None:
        super().__init__(seen)
        self._load = load
        self._queued = 0.0  # seconds of a step in which the thread that trains had work and no core, as ranks told last

    def add(self, record: Record) -> None:
        """Take a record."""
        if isinstance(record, RunStarted):
            self._queued = 0.0
        elif isinstance(record, RanksRecord):
            spread = record.spread("queued_here")
            self._queued = spread.most if spread is not None else 0.0

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return how far below the forecast the rate is."""
        promised = self.seen.figure("forecast", "step_seconds", "value")
        highest = self.seen.figure("forecast", "step_seconds", "high") or promised
        if not promised or len(self.seen.seconds) < STEPS_NEEDED or self.seen.ended is not None:
            return None
        median = statistics.median(self.seen.seconds)
        least = self.spec.slow_share * (OVER if firing else 1.0)

        def is_slow(seconds: float) -> bool:
            return 1.0 - promised / seconds >= least and seconds >= (highest or 0.0)

        if not is_slow(median):
            return None
        missing, shared = 1.0 - promised / median, self._load() if self.seen.on_cpu else 1.0
        own = min(median / shared, max(promised, median - self._queued)) if self.seen.on_cpu else median
        title = f"{missing:.0%} below the forecast's rate: a step takes {format_seconds(median)}"
        evidence = {"median_step_seconds": median, "forecast_step_seconds": promised, "missing": missing}
        if not is_slow(own):
            evidence |= {"programs_per_core": shared, "queued_seconds": self._queued}
            title += "; other programs want its cores"
            return Trouble(title, evidence, "fewer programs on this machine, or cores of their own for the run", "info")
        advice = "`paceline report` says what bounds a step; other programs on these devices are the usual reason"
        return Trouble(title, evidence, advice)


class CheckpointOld(AlertRule):
    """No checkpoint for some times as many steps as there usually are between two."""

    name = "checkpoint_old"

    def __init__(self, seen: AlertSeen) -> None:
        super().__init__(seen)
        self._step: int | None = None  # of the newest checkpoint, or where the start went on from

    def add(self, record: Record) -> None:
        """Take a record."""
        if isinstance(record, CheckpointRecord | RunStarted):
            self._step = record.step or 0

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return how old the newest checkpoint is, where that is too old."""
        every = self.seen.steps_between("run", "checkpoint_every")
        if every is None or self._step is None or self.seen.ended is not None:
            return None
        age = self.seen.step - self._step
        if age <= self.spec.checkpoint_factor * every:
            return None
        title = f"no checkpoint for {age:,} steps, since step {self._step}; one was due every {every:,}"
        advice = "saves may fail or hang: look for warnings of checkpoints, and at the storage of run.dir"
        return Trouble(title, {"age_steps": age, "every_steps": every, "step": self._step}, advice)
