"""LiveRun: what a run's journal says up to now. Each record is folded in once, so that a look costs what is new."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from paceline.history.phases import (
    BETWEEN,
    CHECKPOINTS,
    DATA,
    EVALUATION,
    LOST,
    PAUSED,
    START_UP,
    TRAINING,
    VERIFICATION,
    Phase,
    between_starts,
)
from paceline.history.rates import UNKNOWN_ITEMS, ForecastItems, forecast_items, rated
from paceline.history.records import COLUMNS, Records, StepTable, number, row_of, table, text
from paceline.observe.follow import Follower
from paceline.observe.live.series import StepSeries
from paceline.report.compare import reference_start
from paceline.spec.journal.bound import VerdictRecord
from paceline.spec.journal.kinds import (
    CheckpointRecord,
    EvaluationRecord,
    FaultRecord,
    RanksRecord,
    RecoveryRecord,
    RunEnded,
    RunStarted,
    StepRecord,
    VerifyRecord,
    parse,
)
from paceline.spec.journal.record import Record, Some, read
from paceline.spec.journal.timing.clock import RunMoments, at_moment, shifted, shifts_of
from paceline.spec.journal.watching import AlertRecord, HealthSample, NodeSample
from paceline.spec.run_files import is_run

RECENT_STEPS = 400  # that "now" is: medians, the verdict and terms are of these
MOST_OF_A_KIND = 2000  # rare records that are kept; the counts are of all
MOST_TOLD = 60  # findings of the training's health that are kept
NODES, NODE_BYTES = 4096, 32 << 10  # that are shown; of what each wrote before, the end is read
BESIDE = ("alert", "node")  # kinds that are written beside the starts too, by whoever outlives them
RUNNING, SILENT = "running", "silent"
PHASES = (TRAINING, DATA, LOST, EVALUATION, CHECKPOINTS, VERIFICATION)  # as the report has them
SILENT_SECONDS, SILENT_STEPS = 60.0, 10  # a run is silent after both, without a record


class LiveRun:
    """A run's journal, folded. `refresh` reads what is new; all else answers from what was read."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self.steps = StepSeries()
        self.starts: dict[int, RunStarted] = {}
        self.spans: dict[int, tuple[float, float]] = {}
        self.ends: dict[int, RunEnded] = {}
        self.others: dict[str, deque[Record]] = {}
        self.counts: Counter[str] = Counter()
        self.slowest: Counter[int] = Counter()  # rank -> in how many records of all ranks it was the slowest
        self.nodes: dict[str, NodeSample] = {}  # name -> newest sample
        self.health: HealthSample | None = None  # the newest sample that has figures of blocks, if any has
        self.told: deque[Mapping[str, object]] = deque(maxlen=MOST_TOLD)  # what samples found, with their `step`
        self.bound: VerdictRecord | None = None  # the newest verdict on record
        self.alerts: dict[str, AlertRecord] = {}  # rule -> newest record, which says whether it fires
        self.alerted: deque[AlertRecord] = deque(maxlen=MOST_OF_A_KIND)  # all of them
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.undone = 0
        self.items = 0.0
        self._clock = RunMoments()
        self._items: dict[int, ForecastItems] = {}  # of each start: what its forecast counts
        self.version = 0  # grows with each refresh that read something
        self.trouble = ""  # why the journal could not be read, the last time
        self._recent: deque[tuple[dict[str, object], int]] = deque(maxlen=RECENT_STEPS)
        self._lines: Iterator[dict[str, object]] | None = None
        self._follower = Follower(self.run_dir, node_bytes=NODE_BYTES)

    # ---- reading ---------------------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether there was more to read than the time given to the last refresh."""
        return self._lines is not None

    def refresh(self, seconds: float = math.inf) -> bool:
        """Read what is new, for about so long; return whether there was any. What is left is read the next time."""
        until, any_new, trouble = time.monotonic() + seconds, False, self.trouble
        try:
            self._lines = self._lines or self._follower.lines()
            for line in self._lines:
                self._fold(line)
                any_new = True
                if time.monotonic() > until:
                    break
            else:
                self._lines = None
            is_gone = bool(self.spans) and not is_run(self.run_dir)
            self.trouble = "it is gone, and what was read of it stays" if is_gone else ""
        except OSError as error:
            self._lines, self.trouble = None, str(error)
        self.version += any_new or self.trouble != trouble
        return any_new

    def _fold(self, line: dict[str, object]) -> None:
        kind, attempt = line.get("kind"), int(number(line.get("attempt")) or 1)
        moment = None if kind in BESIDE else self._clock.of(attempt, line)
        if moment is not None:
            line = line if line.get("time") == moment else at_moment(line, moment)
            first, last = self.spans.get(attempt, (moment, moment))
            self.spans[attempt] = (min(first, moment), max(last, moment))
        if kind == StepRecord.KIND:
            self._fold_step(line, attempt)
        elif kind == NodeSample.KIND:
            if len(self.nodes) < NODES or text(line.get("node")) in self.nodes:
                self.nodes[text(line.get("node"))] = read(NodeSample, line)
        elif kind == HealthSample.KIND:
            sample = read(HealthSample, line)
            self.health = sample if sample.values or not self.health else self.health
            self.told.extend({**each, "step": sample.step} for each in sample.told)
        elif kind == VerdictRecord.KIND:
            self.bound = read(VerdictRecord, line)
        elif kind == AlertRecord.KIND:
            self._fold_alert(read(AlertRecord, line))
        elif (record := parse({**line, "attempt": attempt})) is not None:
            self._fold_other(record, attempt)

    def _fold_step(self, line: Mapping[str, object], attempt: int) -> None:
        step = number(line.get("step"))
        if step is None:
            return
        line = rated(line, self._items.get(attempt, UNKNOWN_ITEMS))
        self.counts["step"] += 1
        self._undo(*self.steps.add(line))
        total, data = (value if math.isfinite(value) else 0.0 for value in map(self.steps.last, ("total", "data")))
        self.seconds[TRAINING] += total - data
        self.seconds[DATA] += data
        self.items += weight if math.isfinite(weight := self.steps.last("weight")) else 0.0
        self._recent.append((dict(line), attempt))

    def _undo(self, count: int, total: float, data: float) -> None:
        if count:
            self.undone += count
            self.seconds[TRAINING] -= total - data
            self.seconds[DATA] -= data
            self.seconds[LOST] += total

    def _fold_other(self, record: Record, attempt: int) -> None:
        self.counts[record.KIND] += 1
        if isinstance(record, RunStarted):
            self.starts[attempt], self._items[attempt] = record, forecast_items(record)
            if record.step is not None:
                self._undo(*self.steps.undo_from(record.step + 1))
        elif isinstance(record, RunEnded):
            self.ends[attempt] = record
        else:
            self.others.setdefault(record.KIND, deque(maxlen=MOST_OF_A_KIND)).append(record)
        if isinstance(record, EvaluationRecord):
            self.seconds["evaluation"] += number(record.seconds) or 0.0
        elif isinstance(record, CheckpointRecord):
            self.seconds["checkpoints"] += number(record.cost_seconds) or 0.0
        elif isinstance(record, VerifyRecord):
            began, ended = self.spans.get(attempt, (0.0, 0.0))[0], number(record.time)
            self.seconds["verification"] += min(number(record.seconds) or 0.0, max(0.0, (ended or began) - began))
        elif isinstance(record, RanksRecord) and (slowest := slowest_of(record)) is not None:
            self.slowest[slowest[0]] += 1

    def _fold_alert(self, alert: AlertRecord) -> None:
        self.alerted.append(alert)
        self.alerts.pop(alert.rule, None)  # the newest stands last
        self.alerts[alert.rule] = alert
        while len(self.alerts) > MOST_OF_A_KIND:
            self.alerts.pop(next(iter(self.alerts)))

    # ---- what it says ----------------------------------------------------------------------------------------------

    def of(self, kind: type[Some]) -> list[Some]:
        """Return the newest records of a rare kind, in the order they were written."""
        return [record for record in self.others.get(kind.KIND, ()) if isinstance(record, kind)]

    def newest(self, kind: type[Some]) -> Some | None:
        """Return the last record of a rare kind; None where there is none."""
        found = self.of(kind)
        return found[-1] if found else None

    def records(self) -> Records:
        """Return what a report's functions read: all rare records that are kept, and the recent steps."""
        rows = [
            row_of(read(StepRecord, line), attempt, number(line.get("step")) or 0) for line, attempt in self._recent
        ]
        values = np.array(rows, dtype=np.float64).reshape(-1, len(COLUMNS))
        others = [record for kept in self.others.values() for record in kept]
        starts = tuple(self.starts[attempt] for attempt in sorted(self.starts))
        return Records(starts, StepTable(values), (*others, *self.ends.values()), dict(self.spans), 1)

    @property
    def reference(self) -> RunStarted:
        """The start whose forecast holds: the last one that has one."""
        return reference_start(Records(tuple(self.starts[each] for each in sorted(self.starts)), EMPTY, (), {}, 1))

    @property
    def name(self) -> str:
        """What the task is called."""
        return text(table(self.reference.spec.get("task")).get("name")) or "run"

    @property
    def steps_done(self) -> int:
        """How many steps count."""
        last = self.steps.last("step")
        done = [start.step or 0 for start in self.starts.values()]
        return int(last) if math.isfinite(last) else max(done, default=0)

    @property
    def steps_planned(self) -> int | None:
        """How many steps the run is of, by its forecast."""
        planned = number(self.reference.forecast.get("steps"))
        return int(planned) if planned else None

    @property
    def last_moment(self) -> float | None:
        """When the newest record was written, by the clock that holds now."""
        moved = self._clock.moved
        return max((ended + moved.get(attempt, 0.0) for attempt, (_, ended) in self.spans.items()), default=None)

    @property
    def end(self) -> RunEnded | None:
        """The end of the newest start; None while it goes on, or where it was killed."""
        return self.ends.get(max(self.spans, default=0))

    def status(self, now: float | None = None) -> str:
        """Return how the newest start ended; without an end on record `running`, or `silent`."""
        if self.end is not None:
            return self.end.status or "ended"
        last, step = self.last_moment, self.step_seconds
        if last is None:
            return SILENT
        silent = max(SILENT_SECONDS, SILENT_STEPS * (step or 0.0))
        return SILENT if (time.time() if now is None else now) - last > silent else RUNNING

    @property
    def step_seconds(self) -> float | None:
        """The median of the newest steps, as long as they take; None before the first."""
        totals = [number(table(line.get("seconds")).get("total")) for line, _ in list(self._recent)[-50:]]
        known = [value for value in totals if value is not None]
        return float(np.median(known)) if known else None

    def phases(self) -> tuple[Phase, ...]:
        """Return the wall time by phase up to now, as the report does of a whole run."""
        running = sum(ended - began for began, ended in self.spans.values())
        _, placed, _, ended_at = self.on_one_clock()
        spans = [(*placed[attempt], ended_at.get(attempt)) for attempt in sorted(placed)]
        gaps = [between_starts(ended, after[0], end) for (_, ended, end), after in itertools.pairwise(spans)]
        known = {**self.seconds, START_UP: max(0.0, running - sum(self.seconds.values()))}
        known[BETWEEN], known[PAUSED] = sum(broken for broken, _ in gaps), sum(paused for _, paused in gaps)
        return tuple(Phase.of(kind, seconds) for kind, seconds in known.items() if seconds > 0)

    def on_one_clock(
        self,
    ) -> tuple[list[RunStarted], dict[int, tuple[float, float]], list[RecoveryRecord], dict[int, RunEnded]]:
        """Return starts, spans, recoveries and ends by the clock that holds now, though it was set between starts."""
        shifts = shifts_of(self.starts.values(), self.spans, self._clock.moved)
        by = {attempt: shifts.get(attempt, 0.0) for attempt in {*self.starts, *self.spans, *self.ends}}
        spans = {attempt: (began + by[attempt], ended + by[attempt]) for attempt, (began, ended) in self.spans.items()}
        starts = [shifted(self.starts[attempt], by[attempt]) for attempt in sorted(self.starts)]
        recoveries = [shifted(each, by.get(each.attempt or 1, 0.0)) for each in self.of(RecoveryRecord)]
        return starts, spans, recoveries, {attempt: shifted(end, by[attempt]) for attempt, end in self.ends.items()}

    def restarts(self) -> list[tuple[float, str]]:
        """Return where later starts and recovered worlds begin: the step, and what to call it."""
        first = min(self.starts, default=0)
        later = [(float(start.step), f"start {each}") for each, start in self.starts.items()
                 if start.step is not None and each > first]  # fmt: skip
        faults = [(float(each.step), "recovery") for each in self.of(RecoveryRecord) if each.step is not None]
        return sorted([*later, *faults])[-12:]

    def faults(self) -> list[FaultRecord]:
        """Return what went wrong."""
        return self.of(FaultRecord)


EMPTY = StepTable(np.empty((0, len(COLUMNS))))


def slowest_of(record: RanksRecord) -> tuple[int, float] | None:
    """Return the rank that took longest for what it computes, and how many times the median; None where unknown.

    Where computing cannot be told from waiting, it is the passes.
    """
    for name in ("computing", "forward_backward", "total"):
        spread = record.spread(name)
        if spread is not None and spread.median:
            return spread.rank, spread.most / spread.median
    return None
