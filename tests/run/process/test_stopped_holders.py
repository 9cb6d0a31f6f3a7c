"""A run's directory whose supervisor is gone, or stands still: who holds it then, and what the next start does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from orphanage import takes_orphans
from runs import is_running, wait_until
from test_lock import holder

from paceline import lock as lock_module
from paceline.errors import RunInUse
from paceline.lock import take
from paceline.system.lock_holders import is_stopped


def stopped_rank(run_dir: Path) -> tuple[int, int]:
    """Return a supervisor that was killed, and the process of its rank, which was stopped before it heard of that."""
    then = "child = subprocess.Popen(['sleep', '600'], pass_fds=(lock.descriptor,)); print(child.pid, flush=True)"
    first = holder(run_dir, f"{then}; time.sleep(600)")
    assert first.stdout is not None
    rank = int(first.stdout.readline())
    os.kill(rank, signal.SIGSTOP)
    wait_until(lambda: is_stopped(rank))
    first.kill()
    first.wait()
    os.kill(rank, signal.SIGTERM)  # as the system sends it to ranks whose supervisor dies
    return first.pid, rank


def test_a_rank_that_was_stopped_when_its_supervisor_died_is_woken_by_the_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would hold the directory for ever, and hears that it is to end when it goes on."""
    with takes_orphans():
        _, rank = stopped_rank(tmp_path)
    try:
        with take(tmp_path) as lock:
            lock.check()
        assert not is_running(rank)
        assert f"process {rank} of it is stopped by a signal, and is woken" in capsys.readouterr().out
    finally:
        if is_running(rank):
            os.kill(rank, signal.SIGKILL)


def test_what_a_dead_supervisor_has_left_is_named_where_it_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "ORPHANS_SECONDS", 0.0)
    with takes_orphans():
        supervisor, rank = stopped_rank(tmp_path)
    try:
        with pytest.raises(RunInUse) as refusal:
            take(tmp_path)
    finally:
        os.kill(rank, signal.SIGKILL)
    told = str(refusal.value)
    assert f"process {supervisor} on" in told and f"has not ended: process {rank}" in told
    assert f"kill -KILL {rank}" in told and f"kill -TERM {supervisor}" not in told


def test_a_holder_that_is_stopped_is_told_as_such(tmp_path: Path) -> None:
    first = holder(tmp_path)
    try:
        first.send_signal(signal.SIGSTOP)
        os.waitpid(first.pid, os.WUNTRACED)
        with pytest.raises(RunInUse, match="it is stopped by a signal") as refusal:
            take(tmp_path)
        assert f"kill -CONT {first.pid}" in str(refusal.value)
    finally:
        first.kill()
        first.wait()
