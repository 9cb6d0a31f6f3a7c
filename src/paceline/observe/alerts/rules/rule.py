"""What every rule has in common: records come in, and a look says whether something is the matter now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from paceline.observe.alerts.rules.run_seen import AlertSeen
from paceline.spec.journal.record import Record
from paceline.spec.watch.alerts import RULES


@dataclass(frozen=True)
class Trouble:
    """What is the matter: a line, its numbers, what to do, and how grave it is where that is not the rule's own.

    What `is_said` by the run in its own terminal is not said there once more.
    """

    title: str
    evidence: Mapping[str, object] = field(default_factory=dict)
    advice: str = ""
    severity: str = ""
    is_said: bool = False


class AlertRule:
    """One rule. It keeps what it needs of the records that it is given."""

    name: ClassVar[str]

    def __init__(self, seen: AlertSeen) -> None:
        """`seen` is what all rules have in common; it is given each record before the rules are."""
        self.seen, self.spec = seen, seen.spec

    @property
    def severity(self) -> str:
        """How grave an alert of this rule is, where a trouble does not say."""
        return RULES[self.name][0]

    def add(self, record: Record) -> None:
        """Take a record of the run."""

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return what is the matter at a moment (seconds since the epoch), or None.

        While the rule is `firing`, it takes more than the threshold's other side to be over.
        """
        raise NotImplementedError
