"""What `paceline alerts` does: try the sinks of a spec, tell the alerts of runs, silence rules."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.account.bill import runs_in
from paceline.config.build import Override
from paceline.errors import ConfigError, PacelineError, suggestion
from paceline.observe.alerts.message import FIRING, AlertMessage
from paceline.observe.alerts.process import run_from_plain
from paceline.observe.alerts.silence import ALL, silence
from paceline.observe.alerts.sinks.make import NamedSink, make_sinks
from paceline.observe.alerts.watch import NAME, firing_in
from paceline.observe.alerts.watch_of_run import replayed
from paceline.session.watch.alerting import name_of
from paceline.spec.arguments import run_directory
from paceline.spec.journal.beside import read_beside
from paceline.spec.journal.kinds import RunStarted
from paceline.spec.journal.reading import read_kind
from paceline.spec.journal.watching import AlertRecord
from paceline.spec.load import load_spec
from paceline.spec.run import RunSpec
from paceline.spec.watch.alerts import RULES, SEVERITIES, AlertsSpec


@dataclass(frozen=True)
class TriedSink:
    """Whether a sink took a message, and why not."""

    name: str
    sent: bool
    because: str = ""


@dataclass(frozen=True)
class TriedAlerts:
    """What became of a message to every sink, and what the rules find in a run's journal."""

    sinks: tuple[TriedSink, ...]
    replayed: tuple[AlertRecord, ...]

    @property
    def exit_code(self) -> int:
        """0 where every sink took its message, else 1 of an error's family: 2."""
        return 0 if all(sink.sent for sink in self.sinks) else ConfigError.exit_code


@dataclass(frozen=True)
class RunAlert:
    """An alert on record, and the run that it is of."""

    run: str
    alert: AlertRecord


def try_alerts(path: Path, overrides: Sequence[str | Override] = ()) -> TriedAlerts:
    """Send a message to every sink of a spec, or of a run's directory; each is sent whatever rules it wants.

    Of a run's directory the rules look at its journal too. Raises ConfigError for what is neither.
    """
    if path.is_dir():
        run, name, run_dir = _run_of(path), path.name, path
    else:
        spec = load_spec(path, overrides)
        run, name, run_dir = spec.run, name_of(spec), run_directory(spec)
    told = "this is a test of paceline alerts: nothing is the matter"
    alert = AlertRecord("finished", SEVERITIES[-1], FIRING, told, {}, "nothing to do")
    message = AlertMessage(name, str(run_dir), (alert,))
    tried = tuple(_tried(sink, message) for sink in make_sinks(run.alerts))
    return TriedAlerts(tried, tuple(replayed(run, path, name)) if path.is_dir() else ())


def _tried(sink: NamedSink, message: AlertMessage) -> TriedSink:
    try:
        sink.send(message)
    except PacelineError as error:
        return TriedSink(sink.name, False, error.because)
    return TriedSink(sink.name, True)


def _run_of(run_dir: Path) -> RunSpec:
    """Return the run's options as its newest start has them on record."""
    starts = list(read_kind(run_dir, RunStarted))
    if not starts:
        because = "there is no start in it"
        raise ConfigError(f"{run_dir} is not a run's directory", because, "a spec file, or a run's directory")
    run = starts[-1].spec.get("run")
    alerts = run.get("alerts") if isinstance(run, dict) else None
    return run_from_plain({"alerts": alerts}) if alerts else RunSpec(alerts=AlertsSpec())


def alerts_of(paths: Sequence[Path]) -> list[RunAlert]:
    """Return the alerts on record of runs' directories, or of all runs in folders, oldest first."""
    found = [RunAlert(run.name, alert) for run in runs_in(paths) for alert in read_beside(run, AlertRecord, NAME)]
    return sorted(found, key=lambda each: each.alert.time or 0.0)


def firing_of(alerts: Sequence[RunAlert]) -> int:
    """Return how many alerts fire still; that a run has ended is none of them."""
    runs = {each.run for each in alerts}
    return sum(
        record.rule != "finished" for run in runs for record in firing_in(a.alert for a in alerts if a.run == run)
    )


def silence_rule(run_dir: Path, rule: str, seconds: float) -> dict[str, float]:
    """Silence a rule of a run, or all where it is empty, for so long; return all silences. Raises ConfigError."""
    if rule and rule not in RULES:
        raise ConfigError(f"--rule {rule}", "there is no such rule", suggestion(rule, list(RULES)))
    if not (run_dir / "journal").is_dir():
        raise ConfigError(f"{run_dir} is not a run's directory", "it has no journal", "name the folder of a run")
    return silence(run_dir, rule or ALL, time.time() + seconds)
