"""Tools that take a dictionary of numbers for each step: Weights & Biases offline, and trackio's shared stores."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from paceline.observe.exports.cursor import FOLDER
from paceline.observe.exports.sink import ExportedRun
from paceline.observe.exports.values import step_of, values_of
from paceline.spec.journal.record import Record

STEP = "step"  # what W&B draws all values over


class LoggedSteps:
    """Sends each record's numbers to `log(numbers, step)` of a tool that is open."""

    def __init__(self, tool: Any, state: dict[str, object]) -> None:
        self._tool, self._state = tool, state

    def send(self, records: Sequence[Record]) -> None:
        """Log the numbers of records, those of one step together."""
        by_step: dict[int, dict[str, float]] = {}
        for record in records:
            step = step_of(record)
            if step is not None and (values := values_of(record)):
                by_step.setdefault(step, {}).update(values)
        for step, values in by_step.items():
            self._tool.log(values, step=step)

    def state(self) -> dict[str, object]:
        """Return the id under which the next start goes on."""
        return self._state

    def close(self) -> None:
        """Have the tool write what it still holds."""
        self._tool.finish()


class OfflineRows(LoggedSteps):
    """A row for each record, with its step as a value: W&B's own count of rows only grows, and drops what is below it.

    A step that is made again after a fault, and a checkpoint that is written when later steps are made, are below it.
    """

    def __init__(self, tool: Any, state: dict[str, object]) -> None:
        super().__init__(tool, state)
        tool.define_metric(STEP)
        tool.define_metric("*", step_metric=STEP)

    def send(self, records: Sequence[Record]) -> None:
        """Log the numbers of records, each with its step."""
        for record in records:
            step = step_of(record)
            if step is not None and (values := values_of(record)):
                self._tool.log({**values, STEP: step})


def open_wandb(run: ExportedRun, state: dict[str, object]) -> OfflineRows:
    """Return an offline run of Weights & Biases in RUN/exports, under one id for all starts."""
    own = own_id(run, state)
    folder = run.dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    wandb = import_module("wandb")
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    tool = wandb.init(project=run.project, name=run.name, id=own, resume="allow", mode="offline", dir=str(folder),
                      settings=settings)  # fmt: skip
    return OfflineRows(tool, {"id": own})


def own_id(run: ExportedRun, state: dict[str, object]) -> str:
    """Return the id under which a tool keeps the run: the one on record, else one of its directory."""
    return str(state.get("id") or hashlib.sha256(str(run.dir.resolve()).encode()).hexdigest()[:12])
