"""The file of a run's lock is deleted, or moved with its directory, while the run goes on: what its next world does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import RunInUse, StorageError
from paceline.lock import LOCK_VARIABLE, RunLock, take
from paceline.lock_file import NAME


def as_rank(lock: RunLock, descriptor: str) -> RunLock:
    """Return the lock that a rank of this supervisor takes, which has inherited this descriptor."""
    os.environ[LOCK_VARIABLE] = f"{descriptor}:{lock.token}:{lock.generation}"
    return take(lock.run_dir)


@pytest.mark.parametrize("rank", ["forked before", "started since", "far"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_the_next_world_makes_the_file_again_and_its_ranks_are_the_supervisors(
    tmp_path: Path, rank: str, is_whole: bool
) -> None:
    """A rank that is new would lock a file of its own: at the next fault the supervisor took it for another start."""
    with take(tmp_path / "run") as lock:
        before = os.dup(lock.descriptor)
        (lock.run_dir / NAME).unlink()
        if not is_whole:
            lock.run_dir.rmdir()
        assert lock.next_generation() == 2
        inherited = {"forked before": str(before), "started since": str(os.dup(lock.descriptor)), "far": ""}
        mine = as_rank(lock, inherited[rank])
        mine.check()
        assert (mine.token, mine.generation) == (lock.token, 2) and not lock.is_lost
        assert lock.next_generation() == 3 and not lock.is_lost
        with pytest.raises(RunInUse, match="generation 2 of the run"):
            mine.check()


def test_whoever_has_the_directory_since_keeps_it(tmp_path: Path) -> None:
    lock = take(tmp_path)
    (tmp_path / NAME).unlink()
    with take(tmp_path), pytest.raises(RunInUse):
        lock.next_generation()


def test_a_directory_that_was_moved_is_named_and_not_made_anew(tmp_path: Path) -> None:
    """Its checkpoints are elsewhere, so the next world would begin from the first step."""
    with take(tmp_path / "run") as lock:
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(StorageError, match="was moved while the run went on") as refusal:
            lock.next_generation()
        assert str(tmp_path / "moved") in str(refusal.value) and not (tmp_path / "run").exists()
        (tmp_path / "moved").rename(tmp_path / "run")
        assert lock.next_generation() == 2


def test_a_file_that_a_file_server_keeps_under_another_name_was_deleted_and_not_moved(tmp_path: Path) -> None:
    """NFS renames a file that is deleted while it is open: `.nfs...`, beside where it was."""
    with take(tmp_path / "run") as lock:
        (lock.run_dir / NAME).rename(lock.run_dir / ".nfs0000000000a1b2c300000001")
        lock.check_saving()
        assert lock.next_generation() == 2 and lock.was_made_again


def test_a_program_that_changes_its_working_directory_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was moved, and a relative run.dir means another place now."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with take(Path("run")) as lock:
        lock.check_saving()
        monkeypatch.chdir(tmp_path / "elsewhere")
        with pytest.raises(StorageError, match="working directory") as refusal:
            lock.check_saving()
        assert str(tmp_path / "run") in str(refusal.value) and "was moved" not in str(refusal.value)
        monkeypatch.chdir(tmp_path)
        lock.check_saving()
