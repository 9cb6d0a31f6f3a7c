"""What the worlds of a run have taken so far, of time and money: limits of both count on through recoveries."""

from __future__ import annotations

from paceline.spec.journal.timing.clock import passed_seconds
from paceline.spec.run import RunSpec


class SpentSoFar:
    """Counts from here on, each world at its own price."""

    def __init__(self, seconds: float = 0.0, usd: float = 0.0) -> None:
        """`seconds` and `usd` have been spent under a coordinator before this one, which was lost."""
        self._since = passed_seconds()
        self._began = self._since - seconds
        self._usd, self._usd_per_second = usd, 0.0

    def begin(self, usd_per_second: float) -> tuple[float, float]:
        """Return the seconds and the money that have passed as a world begins, which costs so much."""
        now = passed_seconds()
        self._usd += (now - self._since) * self._usd_per_second
        self._since, self._usd_per_second = now, usd_per_second
        return now - self._began, self._usd

    def limit_reached(self, run: RunSpec) -> str:
        """Return which limit of a run is reached by now, or "". A world costs on until the next one begins."""
        now = passed_seconds()
        return run.limit_reached(now - self._began, self._usd + (now - self._since) * self._usd_per_second)
