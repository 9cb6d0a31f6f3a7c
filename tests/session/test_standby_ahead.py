"""A run of several ranks has its standby import torch while it is planned, and proofs are forked from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests_shared import decoder_task

from paceline.lock import take
from paceline.session import ahead, start
from paceline.spec.arguments import make_spec
from paceline.spec.cluster import ClusterSpec
from paceline.supervise.blame import Outcome


class Noted:
    """Stands for a standby, and notes what becomes of it."""

    def __init__(self, *told: Any) -> None:
        self.told, self.is_closed, self.held = told, False, list[Any]()

    def hold(self, lock: Any) -> None:
        self.held.append(lock)

    def close(self) -> None:
        self.is_closed = True


def spec_of(run_dir: Path, devices: int, **run: Any) -> Any:
    cluster = ClusterSpec(device="cpu", devices=devices, probe=False, learn=False)
    return make_spec(decoder_task(), cluster=cluster, run={"dir": str(run_dir), "verify": False, **run})


def with_a_checkpoint(run_dir: Path) -> Path:
    folder = run_dir / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return run_dir


@pytest.mark.parametrize(
    ("devices", "has_saved", "run", "is_ahead"),
    [(2, True, {}, True), (2, False, {}, True), (2, False, {"verify": True}, True), (1, True, {}, False),
     (2, True, {"recovery": {"standby": False}}, False), (2, True, {"when": "18:00-06:00"}, False)],
)  # fmt: skip
def test_where_it_is_there_before_the_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    has_saved: bool,
    run: dict[str, Any],
    is_ahead: bool,
) -> None:
    run_dir = with_a_checkpoint(tmp_path / "run") if has_saved else tmp_path / "run"
    made: list[Noted] = []
    monkeypatch.setattr(ahead, "Standby", lambda *told: made.append(Noted(*told)) or made[-1])
    seen: list[Any] = []

    def plan_here(spec: Any, say: Any, standby: Any) -> Any:
        seen.append(list(made))
        return None

    monkeypatch.setattr(start, "plan_here", plan_here)
    monkeypatch.setattr(start, "confirm_and_price", lambda planned, say: (planned, ()))
    monkeypatch.setattr(start, "hours_lines", lambda planned, window: [])
    monkeypatch.setattr(start, "used_up", lambda run, run_dir: "")
    monkeypatch.setattr(start, "in_hours", lambda window, run, say: run())
    proofs: list[Any] = []
    monkeypatch.setattr(start, "proven_brief", lambda *told: proofs.append(told[-1]) or "a brief")
    monkeypatch.setattr(start, "close_run", lambda *told: None)
    given: list[Any] = []
    monkeypatch.setattr(start, "run_brief", lambda *told: given.append(told[-1]) or Outcome(0))
    assert start.train(spec_of(run_dir, devices, **run), lambda line: None) == 0
    assert seen == [made] and len(made) == is_ahead
    assert given == proofs == (made or [None]), "it is handed on to what proves and to what starts ranks"
    assert all(standby.is_closed for standby in made)


@pytest.mark.parametrize(
    ("devices", "run", "environ", "begins"),
    [(2, {}, {}, True), (2, {"verify": True}, {}, True), (1, {}, {}, False), (2, {"nodes": {"count": 2}}, {}, False),
     (2, {"recovery": {"standby": False}}, {}, False), (2, {"when": "18:00-06:00"}, {}, False),
     (2, {}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, False)],
)  # fmt: skip
def test_it_begins_before_the_lock_is_taken_where_this_process_begins_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int, run: Any, environ: dict[str, str], begins: bool
) -> None:
    made: list[Noted] = []
    monkeypatch.setattr(ahead, "Standby", lambda *told: made.append(Noted(*told)) or made[-1])
    monkeypatch.setattr(ahead.os, "environ", environ)
    spec = spec_of(tmp_path / "run", devices, **run)
    with ahead.standby_first(spec) as first:
        assert (first is not None) == begins == bool(made)
        if first is not None:
            assert made[0].told[-1] is None, "there is no lock yet"
            with take(tmp_path / "run") as lock, ahead.standby_ahead(spec, lock, first) as standby:
                assert standby is first and made[0].held == [lock] and not made[0].is_closed
            assert made[0].is_closed, "before the lock is let go"
    assert len(made) == begins


def test_it_is_closed_where_planning_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Noted] = []
    monkeypatch.setattr(ahead, "Standby", lambda *told: made.append(Noted(*told)) or made[-1])
    run_dir = with_a_checkpoint(tmp_path / "run")
    spec = spec_of(run_dir, 2)
    with take(run_dir) as lock, pytest.raises(ValueError, match="no plan"), ahead.standby_ahead(spec, lock):
        raise ValueError("no plan")
    assert [standby.is_closed for standby in made] == [True]
