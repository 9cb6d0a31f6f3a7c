"""AlertMessage: what a sink is given, as JSON for programs and as text for people."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from paceline.spec.journal.line import spelt
from paceline.spec.journal.watching import AlertRecord

FORMAT = 1
FIRING, RESOLVED = "firing", "resolved"


@dataclass(frozen=True)
class AlertMessage:
    """Alerts of one run that are sent together."""

    run: str
    run_dir: str
    alerts: tuple[AlertRecord, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the message as plain data."""
        keys = ("rule", "severity", "state", "title", "evidence", "advice", "step", "time")
        alerts = [spelt({key: getattr(alert, key) for key in keys}) for alert in self.alerts]
        return {"format": FORMAT, "run": self.run, "run_dir": self.run_dir, "host": socket.gethostname(),
                "text": self.as_text(), "alerts": alerts}  # fmt: skip

    def as_text(self) -> str:
        """Return the message as lines, each with how grave it is."""
        return "\n".join(filter(None, (self.head(), *(line_of_alert(alert) for alert in self.alerts))))

    def head(self) -> str:
        """Return which run the message is of."""
        return f"{self.run} on {socket.gethostname()} ({self.run_dir})"


def line_of_alert(alert: AlertRecord) -> str:
    """Return an alert in one line."""
    state = "" if alert.state == FIRING else "over: "
    advice = f" -- try: {alert.advice}" if alert.advice and alert.state == FIRING else ""
    return f"[{alert.severity}] {state}{alert.title}{advice}"
