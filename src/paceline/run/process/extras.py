"""Optional packages that a run was asked to use, looked for before any process is started."""

from __future__ import annotations

from importlib import import_module

from paceline.errors import MissingExtra
from paceline.spec.run import RunSpec


def check_extras(run: RunSpec) -> None:
    """Raise MissingExtra where the run's options need a package that is not installed."""
    if run.tensorboard:
        try:
            import_module("tensorboard.summary.writer.event_file_writer")
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", "run.tensorboard = true") from error
