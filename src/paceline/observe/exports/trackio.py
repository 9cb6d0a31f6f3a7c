"""trackio: the store on this machine keeps a record once, however often the record is delivered."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from paceline.errors import ConfigError
from paceline.observe.exports.logged import LoggedSteps, own_id
from paceline.observe.exports.sink import ExportedRun, ExportSink
from paceline.observe.exports.values import step_of, values_of
from paceline.spec.journal.record import Record

FRAGMENTS = "jsonl"  # trackio's name for a store on a shared mount, which takes no batches
NEEDED = ("log_ids", "run_id", "timestamps")


class StoredRecords:
    """Writes each record as a row of trackio's store, under an id of its content: a second time changes nothing.

    The store has a batch for good when `send` returns. trackio's own `log` only puts it into a queue.
    """

    def __init__(self, run: ExportedRun, store: Any, state: dict[str, object]) -> None:
        self._run, self._store, self._id = run, store, own_id(run, state)

    def send(self, records: Sequence[Record]) -> None:
        """Store the numbers of records, at their steps and times."""
        rows = [(record, step, values) for record in records
                if (step := step_of(record)) is not None and (values := values_of(record))]  # fmt: skip
        if rows:
            self._store.bulk_log(
                project=self._run.project, run=self._run.name, run_id=self._id,
                metrics_list=[values for _, _, values in rows], steps=[step for _, step, _ in rows],
                timestamps=[_moment(record) for record, _, _ in rows],
                log_ids=[self._row_id(record, step, values) for record, step, values in rows],
            )  # fmt: skip

    def _row_id(self, record: Record, step: int, values: dict[str, float]) -> str:
        told = [self._id, record.KIND, record.attempt, record.time, step, sorted(values.items())]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]

    def state(self) -> dict[str, object]:
        """Return the id under which the next start goes on."""
        return {"id": self._id}

    def close(self) -> None:
        """Nothing is open."""


def open_trackio(run: ExportedRun, state: dict[str, object]) -> ExportSink:
    """Return the store of trackio on this machine. Raises ConfigError where trackio's version has no row ids."""
    if import_module("trackio.utils").get_storage_mode() == FRAGMENTS:
        tool = import_module("trackio").init(project=run.project, name=run.name, resume="allow")
        return LoggedSteps(tool, state)
    store = import_module("trackio.sqlite_storage").SQLiteStorage
    if missing := [name for name in NEEDED if name not in inspect.signature(store.bulk_log).parameters]:
        raise ConfigError(
            "this version of trackio keeps records twice", f"its bulk_log has no {missing[0]}",
            "pip install 'paceline[trackio]'",
        )  # fmt: skip
    return StoredRecords(run, store, state)


def _moment(record: Record) -> str:
    return datetime.fromtimestamp(record.time or 0.0, UTC).isoformat()
