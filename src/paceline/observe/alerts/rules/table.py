"""The table of all rules, and the rules of one watch made of it."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.alerts.rules.ending import BudgetSpent, Finished, Spending
from paceline.observe.alerts.rules.losses import LossSpike, NotFinite, Plateau
from paceline.observe.alerts.rules.machine import DiskFull, MemoryNear, disk_usage_of
from paceline.observe.alerts.rules.progress import CheckpointOld, NoStep, Slow
from paceline.observe.alerts.rules.ranks import RankDown, StragglingRank
from paceline.observe.alerts.rules.rule import AlertRule
from paceline.observe.alerts.rules.run_seen import AlertSeen
from paceline.observe.alerts.rules.temperature import TooHot

PLAIN = (NoStep, RankDown, NotFinite, LossSpike, Plateau, Slow, StragglingRank, MemoryNear, CheckpointOld, TooHot,
         Finished)  # fmt: skip


def make_rules(seen: AlertSeen, run_dir: Path, spending: Spending, warn_at: float) -> list[AlertRule]:
    """Return the rules that the spec does not switch off."""
    rules: list[AlertRule] = [kind(seen) for kind in PLAIN]
    rules += [DiskFull(seen, disk_usage_of(run_dir)), BudgetSpent(seen, spending, warn_at)]
    return [rule for rule in rules if rule.name not in seen.spec.off]
