"""Rule of temperature: a device that is hotter than it should be for long, as node samples tell."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.observe.alerts.rules.rule import AlertRule, Trouble
from paceline.observe.alerts.rules.run_seen import AlertSeen
from paceline.spec.journal.record import Record, number, whole
from paceline.spec.journal.watching import NodeSample

SIGNAL = "celsius"  # of a node's samples
COOLER = 5.0  # degrees below the limit, at which it is over


class TooHot(AlertRule):
    """The hottest device of any node."""

    name = "temperature"

    def __init__(self, seen: AlertSeen) -> None:
        super().__init__(seen)
        self._degrees: dict[str, tuple[float, int | None]] = {}  # by node: the hottest, and its rank

    def add(self, record: Record) -> None:
        """Take a record."""
        if isinstance(record, NodeSample):
            spread = record.signals.get(SIGNAL)
            degrees = number(spread.get("max")) if isinstance(spread, Mapping) else None
            if degrees is not None and isinstance(spread, Mapping):
                self._degrees[record.node] = degrees, whole(spread.get("rank"))

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return the hottest device, where it is too hot."""
        node, (degrees, rank) = max(self._degrees.items(), key=lambda each: each[1][0], default=("", (0.0, None)))
        if degrees < self.spec.temperature_celsius - (COOLER if firing else 0.0) or self.seen.ended is not None:
            return None
        who = f"rank {rank}" if rank is not None else "a device"
        title = f"{who} on {node or 'a node'} is at {degrees:.0f} °C"
        evidence = {"node": node, "rank": rank, "celsius": degrees}
        return Trouble(title, evidence, "look at fans and air: devices lower their clocks when they are too hot")
