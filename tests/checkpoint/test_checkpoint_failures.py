"""Saves that fail: full disk, read-only folder, killed ranks, two savers at once. Earlier checkpoints survive."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from checkpoint_samples import laid_out, load_sample, save_sample
from distributed import run_ranks

from paceline.checkpoint import find_latest, list_checkpoints, save_checkpoint, verify_checkpoint
from paceline.checkpoint import folder as folder_module
from paceline.checkpoint.beside.flight import SaveOutcome, SaveTo
from paceline.checkpoint.folder import clear_partials, create_partial
from paceline.checkpoint.ranks import Ranks
from paceline.errors import ExhaustedTogether, StorageError
from paceline.patience import Patience


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@contextlib.contextmanager
def _broken(how: str) -> Iterator[None]:
    """Make this process's next flush of a file fail in the given way."""

    def fail(_: int) -> NoReturn:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "interrupted":
            raise KeyboardInterrupt
        if how == "defect":
            raise ZeroDivisionError("a defect")
        code = {"disk full": errno.ENOSPC, "read-only": errno.EROFS}[how]
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        if how == "file too large":  # a true refusal by the kernel, in the middle of the data
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
        else:
            patch.setattr(os, "fsync", fail)
        yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _save_broken(root: str, ways: list[str], victim: int) -> list[tuple[str, str, bool]]:
    """Save step 1, then step 2 with one broken rank, in each way; return error type, text and whether it took long."""
    save_sample(Path(root), 1, "shard")
    answers = []
    for how in ways:
        limit = Patience(20.0)
        breaking = _broken(how) if dist.get_rank() == victim else contextlib.nullcontext()
        with breaking, pytest.raises((StorageError, KeyboardInterrupt)) as caught:
            save_sample(Path(root), 2, "shard")
        answers.append((caught.type.__name__, str(caught.value), limit.is_over))
    return answers


@pytest.mark.parametrize("victim", [0, 2])
def test_a_failure_on_one_rank_is_the_same_error_on_all(tmp_path: Path, victim: int) -> None:
    because = {
        "disk full": "No space left on device",
        "read-only": "Read-only file system",
        "file too large": "File too large",
        "defect": "ZeroDivisionError: a defect",
    }
    by_rank = run_ranks(_save_broken, 3, str(tmp_path), list(because), victim)
    for answers, words in zip(zip(*by_rank, strict=True), because.values(), strict=True):
        assert len({(kind, text) for kind, text, _ in answers}) == 1
        kind, text, took_long = answers[0]
        assert kind == "StorageError" and not took_long
        assert "step 2 was not saved" in text and f"rank {victim}: " in text and words in text and "try" in text
    assert _names(tmp_path) == ["step-00000001"]
    assert load_sample(tmp_path / "step-00000001")["step"] == 1


def test_an_interrupt_stays_one_and_the_others_are_told(tmp_path: Path) -> None:
    answers = run_ranks(_save_broken, 2, str(tmp_path), ["interrupted"], 1)
    assert answers[1][0][0] == "KeyboardInterrupt"
    assert answers[0][0][0] == "StorageError" and "rank 1: KeyboardInterrupt" in answers[0][0][1]
    assert _names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_a_save_harms_nothing(tmp_path: Path, victim: int) -> None:
    answers = run_ranks(_save_broken, 2, str(tmp_path), ["killed"], victim, may_die=[victim])
    kind, text, seconds = answers[1 - victim][0]
    assert kind == "StorageError" and "a rank stopped answering" in text and seconds < 20
    assert "gloo" not in text and text.isascii(), "torch's words for it are the cause, not the text"
    assert "did not finish" in text and "published" not in text
    assert find_latest(tmp_path) == tmp_path / "step-00000001"
    left = [name for name in _names(tmp_path) if name.startswith(".partial-")]
    assert len(left) == (2 if victim == 0 else 0)  # rank 0 clears up after the others; nobody after rank 0
    save_sample(tmp_path, 2)
    assert _names(tmp_path) == ["step-00000001", "step-00000002"]
    assert load_sample(tmp_path / "step-00000001")["step"] == 1
    assert load_sample(tmp_path / "step-00000002")["step"] == 2


def _published_and_killed(root: str) -> str:
    """Save a step, of which rank 0 is killed when the folder has its name and nobody knows."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageError) as caught:
        if dist.get_rank() == 0:
            patch.setattr(folder_module, "remove_old", lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        save_sample(Path(root), 2, "shard")
    return str(caught.value)


def test_a_checkpoint_that_is_published_is_not_said_to_be_unfinished(tmp_path: Path) -> None:
    text = run_ranks(_published_and_killed, 2, str(tmp_path), may_die=[0])[1]
    assert "step-00000002" in text and "is published" in text and "did not finish" not in text and "gloo" not in text
    assert find_latest(tmp_path) == tmp_path / "step-00000002"


def _save_into(root: str) -> str:
    with pytest.raises(StorageError) as caught:
        save_sample(Path(root), 1, "shard")
    return str(caught.value)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    messages = run_ranks(_save_into, 2, str(tmp_path / "file" / "checkpoints"))
    assert messages[0] == messages[1] and "Not a directory" in messages[0]


def test_too_little_space_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match="and 100 are free"):
        save_sample(tmp_path, 1)
    assert _names(tmp_path) == []


def test_old_checkpoints_go_after_the_new_one_is_there(tmp_path: Path) -> None:
    for step in range(1, 4):
        assert save_sample(tmp_path, step, keep_last=3).removed == ()
    info = save_sample(tmp_path, 4, keep_last=2)
    assert sorted(info.removed) == ["step-00000001", "step-00000002"] and info.kept == ()
    assert _names(tmp_path) == ["step-00000003", "step-00000004"]


def test_a_failed_save_removes_no_old_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        save_sample(tmp_path, step)

    def replaced() -> None:
        raise StorageError("this world was replaced", "epoch 3 has begun", "stop")

    with pytest.raises(StorageError, match="this world was replaced"):
        save_checkpoint(tmp_path, 3, laid_out("plain"), {}, keep_last=1, fence=replaced)
    assert _names(tmp_path) == ["step-00000001", "step-00000002"]


def test_an_incomplete_checkpoint_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_sample(tmp_path, step)
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    save_sample(tmp_path, 4, keep_last=2)
    assert _names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_step_saved_again_is_newer_and_leaves_the_first_alone(tmp_path: Path) -> None:
    first = save_sample(tmp_path, 5).path
    before = (first / "manifest.json").read_bytes()
    again = save_checkpoint(tmp_path, 5, {"x": torch.ones(1)}, {}, keep_last=3).path
    third = save_checkpoint(tmp_path, 5, {"x": torch.ones(1)}, {}, keep_last=3).path
    assert [path.name for path in (first, again, third)] == ["step-00000005", "step-00000005.1", "step-00000005.2"]
    assert find_latest(tmp_path) == third and (first / "manifest.json").read_bytes() == before


def test_two_savers_at_once_do_not_clobber(tmp_path: Path) -> None:
    inner: list[Path] = []

    def save_meanwhile() -> None:  # runs when the outer save has written its shards and not yet published
        assert any(name.startswith(".partial-") for name in _names(tmp_path))
        inner.append(save_checkpoint(tmp_path, 5, {"x": torch.ones(3)}, {"who": "inner"}, keep_last=2).path)

    outer = save_checkpoint(tmp_path, 5, {"x": torch.zeros(3)}, {"who": "outer"}, keep_last=2, fence=save_meanwhile)
    assert outer.path != inner[0]
    assert verify_checkpoint(outer.path).extra == {"who": "outer"}
    assert verify_checkpoint(inner[0]).extra == {"who": "inner"}
    assert len(list_checkpoints(tmp_path).complete) == 2 and len(_names(tmp_path)) == 2


def test_only_dead_saves_are_cleared(tmp_path: Path) -> None:
    alive = create_partial(tmp_path, 1)
    dead = create_partial(tmp_path, 2)
    os.close(dead.lock)  # what the end of its process does
    (dead.folder / "shard").write_text("half")
    (tmp_path / ".partial-step-00000003-0000.lock").touch()  # a save killed between publishing and unlocking
    assert clear_partials(tmp_path) == []
    assert _names(tmp_path) == sorted([alive.folder.name, alive.folder.name + ".lock"])
    alive.discard()
    assert _names(tmp_path) == []


def test_without_locks_nothing_is_cleared_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = create_partial(tmp_path, 1)
    os.close(left.lock)

    def unsupported(*_: Any) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    info = save_sample(tmp_path, 2)
    assert load_sample(info.path)["step"] == 2
    assert len(info.kept) == 1 and "no locks" in info.kept[0] and left.folder.exists()


def test_an_old_checkpoint_that_cannot_be_removed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_sample(tmp_path, 1)

    def refuse(path: Path, **_: Any) -> NoReturn:
        raise PermissionError(errno.EPERM, "not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.shutil, "rmtree", refuse)
        info = save_sample(tmp_path, 2, keep_last=1)
    assert load_sample(info.path)["step"] == 2
    assert info.removed == () and any("step-00000001" in reason and "not permitted" in reason for reason in info.kept)
    save_sample(tmp_path, 3, keep_last=1)
    assert _names(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("text", ["DefaultCPUAllocator: can't allocate memory: you tried to allocate", "gloo"])
def test_no_memory_for_what_ranks_tell_each_other_is_no_peer_that_is_lost(tmp_path: Path, text: str) -> None:
    """torch's allocator raises what its collectives raise, here outside of what ranks agree on."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises((ExhaustedTogether, StorageError)) as told:
        patch.setattr(Ranks, "from_first", lambda *given: _raise(RuntimeError(f"{text}: ...")))
        save_sample(tmp_path, 1)
    lacks_memory = text != "gloo"
    assert isinstance(told.value, ExhaustedTogether) is lacks_memory
    assert lacks_memory or "a rank stopped answering" in told.value.what
    outcome = SaveOutcome(SaveTo(tmp_path, 1), 0.0, error=told.value)
    assert outcome.has_lost_a_peer is not lacks_memory
    if isinstance(told.value, ExhaustedTogether):
        assert told.value.rank == 0 and isinstance(told.value.__cause__, RuntimeError) and text in told.value.because


def _raise(error: Exception) -> NoReturn:
    raise error
