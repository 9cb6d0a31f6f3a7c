"""Rules of what a run is allowed and how it ends: a budget that is nearly spent, and the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.observe.alerts.rules.rule import AlertRule, Trouble
from paceline.observe.alerts.rules.run_seen import AlertSeen
from paceline.plan.explain.hours import day_text
from paceline.spec.survive.budget import Said
from paceline.units import format_seconds

SPENT_SECONDS = 5.0  # between two looks at what is spent
Spending = Callable[[], Mapping[str, tuple[float, float, Said]]]  # budget -> (spent, limit, how an amount is said)


class BudgetSpent(AlertRule):
    """A share of a budget is spent: a warning at the first, critical where all of it is."""

    name = "budget"

    def __init__(self, seen: AlertSeen, spending: Spending, warn_at: float) -> None:
        super().__init__(seen)
        self._spending, self._warn_at = spending, warn_at
        self._looked = 0.0
        self._found: Trouble | None = None

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return which budget is spent furthest, from its share on."""
        if now - self._looked >= SPENT_SECONDS or self.seen.ended is not None:
            self._looked, self._found = now, self._furthest()
        return self._found

    def _furthest(self) -> Trouble | None:
        found = [(spent / limit, spent, limit, name, said)
                 for name, (spent, limit, said) in self._spending().items()]  # fmt: skip
        furthest = max(found, key=lambda each: each[:4], default=None)
        if furthest is None or furthest[0] < self._warn_at:
            return None
        share, spent, limit, name, said = furthest
        title = f"{share:.0%} of the budget of {said(limit)} is spent"
        evidence = {"budget": name, "spent": spent, "limit": limit, "share": share}
        advice = f"a larger {name}, or let the run end with a checkpoint"
        return Trouble(title, evidence, advice, "critical" if share >= 1.0 else "")


ENDS = {
    "complete": "is complete",
    "requeue": "has saved, to be started again,",
    "stopped": "was stopped",
    "failed": "failed",
}


class Finished(AlertRule):
    """The run has ended, and how."""

    name = "finished"

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return how the run has ended."""
        end = self.seen.ended
        if end is None:
            return None
        took = f", after {format_seconds(end.seconds)}" if end.seconds else ""
        error = end.error or {}
        told = f": {error['what']}" if error.get("what") else ""
        how = ENDS.get(end.status, end.status)
        if waits := end.status == "requeue" and end.goes_on is not None:
            how = f"has saved until its hours begin, {day_text(end.goes_on or 0.0)},"
        title = f"the run {how} at step {end.step}{took}{told}"
        evidence = {"status": end.status, "exit_code": end.exit_code, "step": end.step}
        severity = {"failed": "critical", "requeue": "warning"}.get(end.status, "info")
        if waits:  # as the spec has it
            severity = "info"
        return Trouble(title, evidence, str(error.get("try") or ""), severity)
