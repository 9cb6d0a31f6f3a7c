"""MLflow: a run of an experiment, with metrics in batches."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from importlib import import_module

from paceline.observe.exports.sink import ExportedRun
from paceline.observe.exports.values import step_of, values_of
from paceline.spec.journal.kinds import RunEnded, RunStarted
from paceline.spec.journal.record import Record

MOST_METRICS = 1000  # in one request, as the REST interface allows
MOST_TEXT = 500  # characters of a parameter
MOST_NAME = 250  # characters of a metric's name
ENDINGS = {"complete": "FINISHED", "failed": "FAILED"}


class MlflowSink:
    """Logs to the tracking server, or the store, of `run.exports.mlflow`."""

    def __init__(self, run: ExportedRun, state: dict[str, object]) -> None:
        tracking, entities = import_module("mlflow.tracking"), import_module("mlflow.entities")
        self._metric, self._param = entities.Metric, entities.Param
        self._client = tracking.MlflowClient(tracking_uri=run.exports.mlflow)
        self._run_id = state.get("run_id") or self._new(run)

    def _new(self, run: ExportedRun) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        return str(self._client.create_run(number, run_name=run.name).info.run_id)

    def send(self, records: Sequence[Record]) -> None:
        """Log the numbers of records, with their steps and times."""
        metrics = [
            self._metric(_allowed(name), value, int(1e3 * (record.time or 0.0)), step_of(record) or 0)
            for record in records
            for name, value in values_of(record).items()
        ]
        for at in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[at : at + MOST_METRICS])
        for record in records:
            if isinstance(record, RunStarted):
                told = {"plan": record.plan_text, "devices": str(record.world_size), "host": record.host}
                for name, text in told.items():
                    self._client.set_tag(self._run_id, f"paceline.{name}", text[:MOST_TEXT])
                self._client.update_run(self._run_id, status="RUNNING")
            elif isinstance(record, RunEnded):
                self._client.set_terminated(self._run_id, ENDINGS.get(record.status, "KILLED"))

    def state(self) -> dict[str, object]:
        """Return the run's id, under which the next start goes on."""
        return {"run_id": self._run_id}

    def close(self) -> None:
        """Nothing is open."""


def _allowed(name: str) -> str:
    """Return a metric's name as MLflow takes it, which refuses a whole batch for one name that it does not take."""
    return posixpath.normpath(re.sub(r"[^\w.\-/ :]", "_", name)).lstrip("/")[:MOST_NAME]
