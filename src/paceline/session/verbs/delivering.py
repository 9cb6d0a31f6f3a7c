"""What `paceline deliver` does: bring other tools what they have missed of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError, MissingExtra
from paceline.observe.exports.process import deliver_until
from paceline.observe.exports.sink import ExportedRun
from paceline.session.extras import missing_export
from paceline.spec.journal.kinds import RunStarted
from paceline.spec.journal.reading import read_kind
from paceline.spec.run_files import is_run
from paceline.spec.watch.exports import ExportsSpec


def deliver_run(
    run_dir: Path, given: dict[str, object], rest_seconds: float, say: Callable[[str], None]
) -> tuple[ExportsSpec, list[str]]:
    """Deliver a run's journal to its sinks, and return them and the names of those that have not got all of it.

    `given` are options of `run.exports` in the place of the run's own. Raises ConfigError where there is no run or no
    sink, MissingExtra where a sink's package is not installed.
    """
    starts = list(read_kind(run_dir, RunStarted)) if is_run(run_dir) else []
    if not starts:
        raise ConfigError(
            f"{run_dir} is no run's directory", "it has no journal with a start", "a run that was trained"
        )
    spec = starts[-1].spec
    kept = dict(spec.get("run", {}).get("exports") or {})
    known = {field.name for field in dataclasses.fields(ExportsSpec)}
    exports = ExportsSpec(**{name: value for name, value in {**kept, **given}.items() if name in known})
    exports.refuse_contradictions()
    if not exports.names:
        raise ConfigError(f"{run_dir} is exported to nobody", "run.exports names no tool", "--to openmetrics=file")
    if name := missing_export(exports):
        raise MissingExtra(name, name, f"run.exports.{name}")
    run = ExportedRun(run_dir, str(spec.get("task", {}).get("name") or run_dir.name), exports)
    return exports, deliver_until(run, lambda: None, say, rest_seconds)
