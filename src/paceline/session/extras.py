"""What a run is asked to use and keep out, looked at before anything is planned or started."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from paceline.errors import MissingExtra
from paceline.spec.journal.redact import Redactor
from paceline.spec.run import RunSpec
from paceline.spec.watch.exports import ExportsSpec
from paceline.task.data.storage.extras import missing_storage

OPENMETRICS = "openmetrics"  # which needs no package


def check_extras(run: RunSpec) -> None:
    """Raise MissingExtra where an option needs a package that is not installed, ConfigError where one is wrong."""
    Redactor(run.redact)
    remote = run.checkpoints.remote
    if remote and (missing := missing_storage(remote, f"run.checkpoints.remote = '{remote}'")):
        raise missing
    if run.tensorboard:
        try:
            import_module("tensorboard.summary.writer.event_file_writer")
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", "run.tensorboard = true") from error
    if name := missing_export(run.exports):
        raise MissingExtra(name, name, f"run.exports.{name}")
    if run.alerts.enabled and run.alerts.sinks:
        from paceline.observe.alerts.sinks.make import make_sinks
        from paceline.observe.alerts.sinks.services import need_apprise

        make_sinks(run.alerts)
        if any(sink.kind == "apprise" for sink in run.alerts.sinks):
            need_apprise()


def missing_export(exports: ExportsSpec) -> str:
    """Return the first tool that a run is exported to and whose package is not installed, or ""."""
    return next((name for name in exports.names if name != OPENMETRICS and not _is_installed(name)), "")


def _is_installed(name: str) -> bool:
    """Return whether a package is there. A folder of its name is none, such as the `wandb` that W&B itself makes."""
    found = find_spec(name)
    return found is not None and found.origin is not None
