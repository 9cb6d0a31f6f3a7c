"""Rules of ranks: a rank that is down, and a rank that is slower than the others."""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.errors import of_rank
from paceline.observe.alerts.rules.rule import AlertRule, Trouble
from paceline.observe.alerts.rules.run_seen import AlertSeen
from paceline.spec.journal.kinds import FaultRecord, RanksRecord, RecoveryRecord, RunStarted
from paceline.spec.journal.record import Record
from paceline.supervise.ranks_lost import RanksLost

RECORDS_NEEDED = 2  # in a row, in which the same rank is slow


class RankDown(AlertRule):
    """A rank that has died or hangs, as its supervisor tells or the journal; or the whole run, gone without an end."""

    name = "rank_down"

    def __init__(self, seen: AlertSeen) -> None:
        super().__init__(seen)
        self._lost: Trouble | None = None
        self._what = ""  # of the fault on record that it is
        self._since = -math.inf  # when that was seen
        self._went_on = -math.inf  # when the run went on last
        self._told_until = -math.inf  # what was lost until then is told

    def add(self, record: Record) -> None:
        """Take a record."""
        if isinstance(record, FaultRecord) and record.rank is not None and self._lost is None:
            evidence = {"ranks": [record.rank], **(record.evidence or {})}
            self._lost = Trouble(
                of_rank(record.what, record.rank, bool(record.names_ranks)), evidence, _advice(record.because)
            )
            self._since, self._what = -math.inf if record.time is None else record.time, record.what
        elif isinstance(record, RecoveryRecord | RunStarted):
            self._went_on = math.inf if record.time is None else max(self._went_on, record.time)
            self.settle()

    def tell(self, lost: RanksLost) -> None:
        """Take what a supervisor has seen: it knows before anything is on record."""
        if self._lost is None and lost.time > self._told_until:
            evidence = {"ranks": list(lost.ranks), "seen": lost.time, "because": lost.because}
            self._lost, self._since, self._what = Trouble(lost.what, evidence, _advice(lost.because)), lost.time, ""

    def take_earlier(self, trouble: Trouble, time: float) -> None:
        """Take what another watch over this start has told at a moment: it lasts until the run goes on after that."""
        self._lost, self._since, self._told_until, self._what = trouble, time, time, ""

    def settle(self) -> None:
        """End what is lost where the run has gone on since: word of a loss may come after that.

        Of one trouble word comes more than once, and those who see it note other moments: a node that loses the
        coordinator, and the next coordinator. All until the run went on is that trouble.
        """
        if self._lost is not None and self._went_on > self._since:
            self._lost = None
            if math.isfinite(self._went_on):
                self._told_until = max(self._told_until, self._went_on)

    def gone(self, now: float) -> None:
        """Take that the run's process is gone; that is no trouble where the run's end is on record."""
        if self.seen.ended is None:
            evidence = {"seen": now, "step": self.seen.step}
            because = "its process is gone, and no end is on record: it was killed, or its machine was lost"
            advice = "start the same command again: it resumes from the last checkpoint"
            self._lost = Trouble(f"the run is gone after step {self.seen.step}: {because}", evidence, advice)
            self._since, self._what = math.inf, ""

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return who is down, until the run goes on. A fault that has ended the run is that of its error."""
        error = (self.seen.ended.error or {}) if self.seen.ended is not None else {}
        if self._lost is not None and self._what and error.get("what") == self._what:
            return replace(self._lost, advice=str(error.get("try") or ""), is_said=True)
        return self._lost


class StragglingRank(AlertRule):
    """A rank that computes longer than the others, whatever their waiting makes of the step."""

    name = "straggler"

    def __init__(self, seen: AlertSeen) -> None:
        super().__init__(seen)
        self._slow: dict[int, int] = {}  # rank -> records in a row
        self._found: Trouble | None = None

    def add(self, record: Record) -> None:
        """Take a record."""
        if isinstance(record, RunStarted):
            self._slow, self._found = {}, None
        if not isinstance(record, RanksRecord):
            return
        spread = record.spread("computing")
        if spread is None or not spread.most or not spread.median or (record.ranks or 0) < 2:
            return
        rank, times, limit = spread.rank, spread.most / spread.median, self.spec.straggler_factor
        if times <= (1 + (limit - 1) / 2 if self._found else limit):
            self._slow, self._found = {}, None
            return
        self._slow = {rank: self._slow.get(rank, 0) + 1}
        if self._slow[rank] >= RECORDS_NEEDED:
            title = f"rank {rank} computes {times:.2f} times as long as the median of {record.ranks} ranks"
            evidence = {"rank": rank, "times": times, "median_seconds": spread.median, "step": record.step}
            self._found = Trouble(title, evidence, "run.health.on_straggler = 'less_work' or 'replace' answers it")

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return who is slow."""
        return self._found


def _advice(because: str) -> str:
    return f"nothing, where run.recovery has the run go on by itself; cause: {because}" if because else "see the logs"
