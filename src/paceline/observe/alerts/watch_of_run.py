"""A watch made for a run of a spec: rules, sinks, and what the run has spent of its budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.observe.alerts.outbox import Outbox
from paceline.observe.alerts.rules.ending import Spending
from paceline.observe.alerts.rules.ranks import RankDown
from paceline.observe.alerts.rules.run_seen import AlertSeen
from paceline.observe.alerts.rules.table import make_rules
from paceline.observe.alerts.sinks.make import NamedSink
from paceline.observe.alerts.watch import AlertWatch
from paceline.run.survive.budget import spent_by_all
from paceline.spec.journal.reading import read_records
from paceline.spec.journal.redact import Redactor
from paceline.spec.journal.watching import AlertRecord
from paceline.spec.run import RunSpec
from paceline.spec.survive.budget import BUDGETS, Said
from paceline.supervise.ranks_lost import RanksLost

OF_A_MOMENT = ("disk", "memory", "budget")  # rules that look at what is now: a journal does not tell what was


def watch_of(
    run: RunSpec,
    run_dir: Path,
    name: str,
    sinks: Sequence[NamedSink],
    say: Callable[[str], None],
    goes_on: bool = False,
) -> AlertWatch:
    """Return the watch over a run's directory; it does not look yet. With `goes_on` it replaces a lost one."""
    seen = AlertSeen(run.alerts)
    rules = make_rules(seen, run_dir, spending_of(run, run_dir), _warns_from(run))
    return AlertWatch(run_dir, name, seen, rules, Outbox(sinks, say), say=say, redactor=Redactor(run.redact),
                      group_read=run.group_read, goes_on=goes_on)  # fmt: skip


def tell_of_loss(
    run: RunSpec, run_dir: Path, name: str, sinks: Sequence[NamedSink], lost: RanksLost, say: Callable[[str], None]
) -> AlertWatch:
    """Have a loss told by whoever sees that the run's watch is lost with it; `hand_over` waits for the sinks."""
    seen = AlertSeen(run.alerts)
    rules = [RankDown(seen)] if RankDown.name not in run.alerts.off else []
    watch = AlertWatch(run_dir, name, seen, rules, Outbox(sinks, say), say=say, redactor=Redactor(run.redact),
                       group_read=run.group_read)  # fmt: skip
    watch.tell_alone(lost)
    return watch


def replayed(run: RunSpec, run_dir: Path, name: str) -> list[AlertRecord]:
    """Return what the rules find in a run's journal as it stands, at the moments of its records. Nothing is sent."""
    seen = AlertSeen(run.alerts)
    rules = [rule for rule in make_rules(seen, run_dir, dict, _warns_from(run)) if rule.name not in OF_A_MOMENT]
    watch = AlertWatch(run_dir, name, seen, rules, Outbox(()), on_record=False)
    found: list[AlertRecord] = []
    for record in read_records(run_dir):
        if record.time is not None:
            found += watch.judge((), record.time)
            found += watch.judge((record,), record.time)
    return found


def spending_of(run: RunSpec, run_dir: Path) -> Spending:
    """Return what says what is spent of each budget from its share on, by the journal's own moments and rates."""

    def spending() -> dict[str, tuple[float, float, Said]]:
        found: dict[str, tuple[float, float, Said]] = {}
        for budget in run.budgets:
            try:
                spent = spent_by_all(budget, run, run_dir)
            except OSError:  # a file server that is away for a moment
                continue
            for name, limit in budget.limits.items():
                amount = spent[BUDGETS[name][0]] / BUDGETS[name][1]
                if amount >= budget.warn_at * limit:
                    found[f"{budget.table_name}.{name}"] = (amount, limit, BUDGETS[name][2])
        return found

    return spending


def _warns_from(run: RunSpec) -> float:
    """Return the least share of a budget that is told; what each one's own share is, `spending_of` looks at."""
    return min((each.warn_at for each in run.budgets), default=run.budget.warn_at)
