"""AlertWatch: a look at a run's records through all rules; what fires or is over goes on record, and to the sinks."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from paceline.observe.alerts.message import FIRING, RESOLVED, AlertMessage, line_of_alert
from paceline.observe.alerts.outbox import Outbox
from paceline.observe.alerts.rules.ending import Finished
from paceline.observe.alerts.rules.machine import MemoryNear
from paceline.observe.alerts.rules.ranks import RankDown
from paceline.observe.alerts.rules.rule import AlertRule, Trouble
from paceline.observe.alerts.rules.run_seen import AlertSeen
from paceline.observe.alerts.silence import is_silenced, read_silences
from paceline.observe.follow import Follower
from paceline.spec.journal.beside import BesideFile, read_beside
from paceline.spec.journal.kinds import ClockRecord, RunEnded, RunStarted
from paceline.spec.journal.reading import numbered, read_tail_step
from paceline.spec.journal.record import Record
from paceline.spec.journal.redact import Redactor
from paceline.spec.journal.timing.clock import LEAST_SECONDS, MovedClock, boot_here, shifted
from paceline.spec.journal.watching import AlertRecord
from paceline.spec.run_files import journal_folder
from paceline.spec.watch.alerts import SEVERITIES, is_within, minutes_of
from paceline.spec.watch.traced import TraceRequest, ask_for_trace, trace_under_way
from paceline.supervise.ranks_lost import RanksLost

SINK_SECONDS = 90.0  # that sinks have once the run has ended, where nobody waits for them
LOOK_SECONDS = 0.5
Result = TypeVar("Result")
NAME = "alerts"


@dataclass
class _Active:
    """An alert that fires: as it was told last, and when it was sent last."""

    trouble: Trouble
    severity: str
    sent: float | None


class AlertWatch:
    """The rules over one run. `look` is one round; `watch` makes rounds in a thread until it is closed."""

    def __init__(
        self,
        run_dir: Path,
        name: str,
        seen: AlertSeen,
        rules: Sequence[AlertRule],
        outbox: Outbox,
        *,
        say: Callable[[str], None] = lambda line: None,
        redactor: Redactor | None = None,
        group_read: bool = False,
        on_record: bool = True,
        goes_on: bool = False,
    ) -> None:
        """`name` is the run's; records of starts before this moment are passed over. Without `on_record` nothing of it
        is kept. With `goes_on` the newest start is read too: another watch over it was lost, and this one goes on."""
        self._run_dir, self._name, self._seen, self._rules = run_dir, name, seen, list(rules)
        self._outbox, self._say, self._redactor = outbox, say, redactor or Redactor()
        self._clock, self._moved = MovedClock(), 0.0  # since the watch began; rules know the clock of that moment
        self._stood = self._clock.apart
        self._moved_of_run = 0.0  # the same, as far as records tell it
        newest = max((each for each, _ in numbered(journal_folder(run_dir))), default=0)
        self._follower, self._goes_on = Follower(run_dir, after=newest - goes_on), goes_on
        self._file = BesideFile(run_dir, NAME, group_read) if on_record else None
        self._firing: dict[str, _Active] = {}
        self._last_sent: dict[str, float] = {}
        self._traced: set[str] = set()  # rules that have had their trace
        self._waiting: list[AlertRecord] = []  # to be sent with others
        self._waits_since = 0.0
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._lost: list[RanksLost] = []
        self._is_closed = self._is_gone = False
        self._unrecorded_end: tuple[int, dict[str, object]] | None = None
        self._thread: threading.Thread | None = None

    # ---- one round -------------------------------------------------------------------------------------------------

    def look(self, now: float | None = None) -> list[AlertRecord]:
        """Read what is new, and return what has fired or is over since the last look."""
        self._moved += self._clock.moved()
        return self.judge(self._read(), time.time() - self._moved if now is None else now)

    def judge(self, records: Iterable[Record], now: float) -> list[AlertRecord]:
        """Take records, and return what has fired or is over at a moment: on record, said, and handed to the sinks."""
        with self._lock:
            lost, self._lost = self._lost, []
        left, found = list(records), []
        for down in sorted(lost, key=lambda each: each.time):  # what came after it may be that the run goes on
            later = [each for each in left if each.time is not None and each.time > down.time]
            self._take([each for each in left if each.time is None or each.time <= down.time])
            left = later
            for rule in self._of_ranks():
                rule.tell(down)
            found += self._changes(now)
            for rule in self._of_ranks():
                rule.settle()
        self._take(left)
        found += self._changes(now)
        self._send(now)
        return found

    def _take(self, records: Iterable[Record]) -> None:
        for each in records:
            self._seen.add(each)
            for rule in tuple(self._rules):
                self._guarded(rule, partial(rule.add, each))

    def _changes(self, now: float) -> list[AlertRecord]:
        """Return what has fired or is over, on record."""
        states = [self._guarded(rule, partial(self._state_of, rule, now)) for rule in tuple(self._rules)]
        found = [record for record in states if record is not None]
        silences = read_silences(self._run_dir) if found else {}
        for index, record in enumerate(found):
            found[index] = self._noted(record, silences, now)
        return found

    def _guarded(self, rule: AlertRule, work: Callable[[], Result]) -> Result | None:
        """Return what a rule says. One that fails is left out, and said: it takes neither the others nor the watch."""
        try:
            return work()
        except Exception as error:
            self._rules = [each for each in self._rules if each is not rule]
            self._firing.pop(rule.name, None)
            self._say(f"alert    the rule {rule.name} fails and is looked at no more: {type(error).__name__}: {error}")
            return None

    def _read(self) -> list[Record]:
        try:
            return [self._by_own_clock(record) for record in self._follower.new()]
        except OSError:  # a file server that is away for a moment; nothing is lost, and a later look goes on
            return []

    def _by_own_clock(self, record: Record) -> Record:
        """Return a record with its moment as the clock would have told it if nobody had set it."""
        if isinstance(record, RunStarted):
            self._moved_of_run = self._moved_at(record)
        elif isinstance(record, ClockRecord):
            self._moved_of_run += record.moved or 0.0
        return shifted(record, -self._moved_of_run)

    def _moved_at(self, start: RunStarted) -> float:
        """Return by how much the clock was set from when the watch began until a start, of this boot, told of it."""
        if not start.boot or start.boot != boot_here() or start.clock_apart is None:
            return self._moved
        by = start.clock_apart - self._stood
        return by if abs(by) >= LEAST_SECONDS else 0.0

    def _state_of(self, rule: AlertRule, now: float) -> AlertRecord | None:
        """Return what has changed about a rule: that it fires, more gravely than before, or no longer."""
        active = self._firing.get(rule.name)
        trouble = rule.look(now, active is not None)
        if trouble is None:
            if active is None:
                return None
            del self._firing[rule.name]
            return self._record(rule, active.trouble, active.severity, RESOLVED, now)
        severity = trouble.severity or rule.severity
        if active is not None and SEVERITIES.index(severity) <= SEVERITIES.index(active.severity):
            active.trouble = trouble
            return None
        self._firing[rule.name] = _Active(trouble, severity, None)
        return self._record(rule, trouble, severity, FIRING, now)

    def _record(self, rule: AlertRule, trouble: Trouble, severity: str, state: str, now: float) -> AlertRecord:
        start, shown = self._seen.start, now + self._moved
        return AlertRecord(rule.name, severity, state, trouble.title, dict(trouble.evidence), trouble.advice,
                           self._seen.step, time=shown, attempt=start.attempt if start else None)  # fmt: skip

    def _noted(self, record: AlertRecord, silences: Mapping[str, float], now: float) -> AlertRecord:
        """Put a change on record, say it, and have it sent where nothing silences it."""
        last = self._last_sent.get(record.rule)
        spec, critical = self._seen.spec, record.severity == SEVERITIES[-1]
        flaps = last is not None and now - last < spec.again and not (critical and record.state == FIRING)
        quiet = (
            not critical
            and bool(spec.quiet)
            and is_within(_minute_of(now + self._moved), minutes_of(spec.quiet, "quiet"))
        )
        told = record.state == FIRING or self._was_sent(record.rule)
        sends = told and not (flaps and record.state == FIRING) and not quiet
        sends = sends and not is_silenced(silences, record.rule, now + self._moved)
        record = self._redactor.record(AlertRecord(**{**vars(record), "sent": sends}))
        if self._file is not None:
            self._file.write(record)
        active = self._firing.get(record.rule)
        is_said = record.rule == Finished.name or (active is not None and active.trouble.is_said)  # by the run itself
        if record.severity != SEVERITIES[0] and not is_said:
            self._say(f"alert    {line_of_alert(record)}")
        if record.state == FIRING:
            self._trace_of(record.rule)
        if sends:
            self._waits_since = self._waits_since if self._waiting else now
            self._waiting.append(record)
            if record.state == FIRING:
                self._last_sent[record.rule] = now
                self._firing[record.rule].sent = now
        return record

    def _trace_of(self, rule: str) -> None:
        """Ask the run for a trace where the spec wants one of this rule: once, since what fires may fire often."""
        if rule not in self._seen.spec.trace or rule in self._traced or trace_under_way(self._run_dir) is not None:
            return
        self._traced.add(rule)
        try:
            ask_for_trace(self._run_dir, TraceRequest(by="alert", memory=rule == MemoryNear.name))
        except OSError as error:
            self._say(f"alert    no trace is taken: {error}")

    def _was_sent(self, rule: str) -> bool:
        return rule in self._last_sent

    def _send(self, now: float, at_once: bool = False) -> None:
        """Hand what waits to the sinks: when something critical is with it, or it has waited for others."""
        critical = any(each.severity == SEVERITIES[-1] for each in self._waiting)
        if self._waiting and (at_once or critical or now - self._waits_since >= self._seen.spec.group):
            self._outbox.put(AlertMessage(self._name, str(self._run_dir), tuple(self._waiting)))
            self._waiting = []

    # ---- beside a run ----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Look again and again, in a thread.

        What an earlier watch has left firing is over where this is another start, else it fires on, and is not told
        again.
        """
        if self._goes_on:
            self._take_earlier()
        else:
            self._end_earlier()
        self._thread = threading.Thread(target=self._rounds, name="paceline-alerts", daemon=True)
        self._thread.start()

    def tell(self, lost: RanksLost) -> None:
        """Take what the supervisor has seen of its ranks, from any thread; it is judged at once."""
        with self._lock:
            self._lost.append(lost)
        self._wake.set()

    def tell_alone(self, lost: RanksLost) -> None:
        """Put a loss on record without a look at the run, and hand it to the sinks; `hand_over` waits for them.

        For whoever sees that the run's watch is lost. What fires already is not told again.
        """
        self._seen.step = read_tail_step(self._run_dir)
        self._take_earlier()
        self.tell(lost)
        self.judge((), lost.time)

    def ended(self, exit_code: int, error: Mapping[str, object] | None = None) -> None:
        """Take how the run has ended for its supervisor, where its ranks could not put that on record."""
        self._unrecorded_end = None if error is None else (exit_code, dict(error))

    def gone(self) -> None:
        """Take that the run's process is gone: that is no trouble where its end is on record. Judged at `close`."""
        self._is_gone = True

    def pause(self) -> None:
        """Look no further until `close`, or for good: somebody else may watch the run now."""
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def hand_over(self, patience_seconds: float) -> None:
        """Send what waits, and end: somebody else watches the run."""
        self.pause()
        self._finish(patience_seconds)

    def close(self, patience_seconds: float) -> None:
        """Look a last time, send what waits, and wait so long for the sinks."""
        self.pause()
        self.look()
        if self._is_gone:
            for rule in self._of_ranks():
                rule.gone(time.time())
            self.judge((), time.time() - self._moved)
        if self._unrecorded_end is not None and self._seen.ended is None:
            code, error = self._unrecorded_end
            self.judge([RunEnded("failed", code, error, self._seen.step)], time.time() - self._moved)
        self._finish(patience_seconds)

    def _finish(self, patience_seconds: float) -> None:
        self._send(time.time() - self._moved, at_once=True)
        self._outbox.close(patience_seconds)
        if self._file is not None:
            self._file.close()

    def _rounds(self) -> None:
        while not self._is_closed:
            self.look()
            self._wake.wait(LOOK_SECONDS)
            self._wake.clear()

    def _of_ranks(self) -> list[RankDown]:
        return [rule for rule in self._rules if isinstance(rule, RankDown)]

    def _take_earlier(self) -> None:
        for record in firing_in(read_beside(self._run_dir, AlertRecord, NAME)):
            if record.rule == "finished":
                continue
            moment = record.time if record.sent else None
            trouble = Trouble(record.title, record.evidence or {}, record.advice)
            self._firing[record.rule] = _Active(trouble, record.severity, moment)
            if record.rule == RankDown.name and record.time is not None:
                for rule in self._of_ranks():
                    rule.take_earlier(trouble, record.time)
            if moment is not None:
                self._last_sent[record.rule] = moment

    def _end_earlier(self) -> None:
        for record in firing_in(read_beside(self._run_dir, AlertRecord, NAME)):
            if self._file is not None and record.rule != "finished":
                over = AlertRecord(**{**vars(record), "state": RESOLVED, "time": time.time(), "sent": False})
                self._file.write(over)


def firing_in(records: Iterable[AlertRecord]) -> list[AlertRecord]:
    """Return the alerts that fire still after these records, the oldest first."""
    found: dict[str, AlertRecord] = {}
    for record in records:
        found.pop(record.rule, None)
        if record.state == FIRING:
            found[record.rule] = record
    return list(found.values())


def _minute_of(now: float) -> int:
    local = datetime.datetime.fromtimestamp(now)
    return local.hour * 60 + local.minute
