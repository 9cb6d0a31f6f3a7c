"""trackio keeps each record once, however often a batch is delivered, and for good before it counts as delivered."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from observe.exports.test_exports import STEPS, append, run_of, started, step_line

from paceline.errors import ConfigError
from paceline.observe.exports.cursor import JournalCursor
from paceline.observe.exports.logged import LoggedSteps
from paceline.observe.exports.process import deliver_until
from paceline.observe.exports.trackio import StoredRecords, open_trackio


class Store:
    """trackio's table of metrics: rows under ids, of which a second one is passed over."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[int, dict[str, float]]] = {}
        self.runs: set[tuple[str, str, str]] = set()

    def bulk_log(self, project: str, run: str, metrics_list: list[dict[str, float]], steps: list[int],
                 timestamps: list[str], log_ids: list[str], run_id: str) -> None:  # fmt: skip
        self.runs.add((project, run, run_id))
        assert len(metrics_list) == len(steps) == len(timestamps) == len(log_ids) and all(timestamps)
        for own, step, values in zip(log_ids, steps, metrics_list, strict=True):
            self.rows.setdefault(own, (step, values))


def stands_in(monkeypatch: pytest.MonkeyPatch, store: Any, mode: str = "sqlite") -> None:
    whole, utils, storage = (ModuleType(f"trackio{name}") for name in ("", ".utils", ".sqlite_storage"))
    told = {"init": lambda **asked: SimpleNamespace(log=None, finish=lambda: None)}
    for module, names in (
        (whole, told),
        (utils, {"get_storage_mode": lambda: mode}),
        (storage, {"SQLiteStorage": store}),
    ):
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def evaluation(step: int) -> str:
    return json.dumps({"kind": "evaluation", "schema": 1, "time": 2e9, "step": step, "loss": 2.0}) + "\n"


def test_a_batch_that_is_delivered_twice_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    stands_in(monkeypatch, store)
    append(tmp_path, started(1), *map(step_line, range(1, 31)))
    cursor, run = JournalCursor(tmp_path, "trackio"), run_of(tmp_path, trackio=True)
    first = open_trackio(run, cursor.state)
    first.send(cursor.read()[0])  # and the process dies before it is noted
    append(tmp_path, evaluation(30), step_line(31))
    assert deliver_until(run, lambda: None, print, 30) == []
    assert sorted(step for step, _ in store.rows.values()) == [*range(1, 31), 30, 31]
    assert [values["loss/held_out"] for _, values in store.rows.values() if "loss/held_out" in values] == [2.0]
    assert len(store.runs) == 1
    append(tmp_path, started(2), step_line(31), attempt=2)
    assert deliver_until(run, lambda: None, print, 30) == []
    assert len(store.rows) == 33 and len(store.runs) == 1, "a step that a later start does again is another record"


def test_two_runs_of_one_project_keep_their_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    stands_in(monkeypatch, store)
    for name in ("a", "b"):
        append(tmp_path / name, started(1), *map(step_line, range(1, 4)))
        assert deliver_until(run_of(tmp_path / name, trackio=True), lambda: None, print, 30) == []
    assert len(store.rows) == 6 and len(store.runs) == 2


def test_a_version_without_ids_of_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in(monkeypatch, SimpleNamespace(bulk_log=lambda project, run, metrics_list, steps=None: None))
    with pytest.raises(ConfigError, match="log_ids"):
        open_trackio(run_of(tmp_path, trackio=True), {})


def test_a_store_on_a_shared_mount_is_left_to_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in(monkeypatch, Store(), mode="jsonl")
    assert isinstance(open_trackio(run_of(tmp_path, trackio=True), {}), LoggedSteps)


def test_trackio_itself_keeps_all_steps_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip("trackio")
    append(tmp_path, started(1), *map(step_line, range(1, STEPS)))
    run = run_of(tmp_path, trackio=True)
    sink = open_trackio(run, {})
    assert isinstance(sink, StoredRecords)
    sink.send(JournalCursor(tmp_path, "trackio").read()[0])
    stores = [path for path in (tmp_path / "store").rglob("*.db") if path.stat().st_size]
    for _ in range(2):  # as it was sent, and once more
        with sqlite3.connect(stores[0]) as kept:
            counted = kept.execute("select count(*), count(distinct step), count(distinct run_id) from metrics")
            assert counted.fetchone() == (STEPS - 1, STEPS - 1, 1)
        assert deliver_until(run, lambda: None, print, 60) == []
