"""Frozen tensors are written once: later checkpoints link them, and each stays whole when the others are gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_samples import check_equal, laid_out
from distributed import run_ranks

from paceline.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from paceline.checkpoint.tiers import unchanged as room
from paceline.checkpoint.tiers.unchanged import Unchanged
from paceline.errors import StorageError

FROZEN = 5  # checkpoints


def _saved(root: str, layout: str, keep_last: int, stay: int = FROZEN) -> None:
    """Save five times; "fp32" changes each time, and more of them after checkpoint number `stay`."""
    state, known = laid_out(layout), Unchanged()
    for step in range(1, FROZEN + 1):
        save_checkpoint(Path(root), step, state, {"step": step}, keep_last=keep_last, unchanged=known)
        for name in ("fp32", "rows7", "bf16") if step >= stay else ("fp32",):
            state[name] += 1


def _inodes(path: Path) -> set[int]:
    return {file.stat().st_ino for file in path.glob("*-unchanged.safetensors")}


def _whole(path: Path, step: int) -> None:
    """Check that the checkpoint loads with the values of its step."""
    verify_checkpoint(path)
    state = laid_out("plain", blank=True)
    load_checkpoint(path, state)
    state["fp32"] -= step - 1
    check_equal(state, "plain")


@pytest.mark.parametrize(("ranks", "layout"), [(1, "plain"), (2, "plain"), (2, "shard")])
def test_what_stays_the_same_is_written_once(tmp_path: Path, ranks: int, layout: str) -> None:
    run_ranks(_saved, ranks, str(tmp_path), layout, 9)
    paths = [tmp_path / f"step-{step:08d}" for step in range(1, FROZEN + 1)]
    linked = [_inodes(path) for path in paths]
    assert not linked[0], "nothing is known of the first one"
    assert linked[1] and linked[1] == linked[2] == linked[3] == linked[4]
    for step, path in enumerate(paths, 1):
        _whole(path, step)
    for path in paths[:-1]:
        shutil.rmtree(path)
    _whole(paths[-1], FROZEN)


def test_a_checkpoint_needs_none_of_those_that_were_removed(tmp_path: Path) -> None:
    run_ranks(_saved, 2, str(tmp_path), "shard", 1)
    (path,) = tmp_path.iterdir()
    _whole(path, FROZEN)
    assert all(file.stat().st_nlink == 1 for file in path.iterdir())


def test_what_changes_again_is_written_again(tmp_path: Path) -> None:
    run_ranks(_saved, 2, str(tmp_path), "shard", 9, 3)
    paths = [tmp_path / f"step-{step:08d}" for step in range(1, FROZEN + 1)]
    assert _inodes(paths[1]) == _inodes(paths[2]) and not _inodes(paths[1]) & _inodes(paths[3])
    for step, path in enumerate(paths[:3], 1):
        _whole(path, step)
    verify_checkpoint(paths[4])


def _a_rank_comes_anew(root: str) -> None:
    state, known = laid_out("plain"), Unchanged()
    for step in range(1, 6):
        if step == 4 and dist.get_rank():
            known = Unchanged()
        save_checkpoint(Path(root), step, state, {"step": step}, keep_last=9, unchanged=known)
        blank = laid_out("plain", blank=True)
        load_checkpoint(Path(root) / f"step-{step:08d}", blank)
        check_equal(blank, "plain")


def test_a_rank_that_has_come_anew_names_the_same_files(tmp_path: Path) -> None:
    run_ranks(_a_rank_comes_anew, 2, str(tmp_path))
    linked = [_inodes(tmp_path / f"step-{step:08d}") for step in range(1, 6)]
    assert linked[1] and linked[1] == linked[2] and not linked[3] and linked[4]


def _twice(root: Path, known: Unchanged) -> Path:
    for step in (1, 2):
        path = save_checkpoint(root, step, laid_out("plain"), {}, keep_last=9, unchanged=known).path
    return path


def test_a_damaged_file_is_not_handed_on(tmp_path: Path) -> None:
    known = Unchanged()
    (file,) = _twice(tmp_path, known).glob("*-unchanged.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    path = save_checkpoint(tmp_path, 3, laid_out("plain"), {}, keep_last=9, unchanged=known).path
    _whole(path, 1)
    with pytest.raises(StorageError):
        verify_checkpoint(file.parent)


def test_a_file_system_without_links_has_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> None:
        raise PermissionError("no links")

    known = Unchanged()
    _twice(tmp_path, known)
    monkeypatch.setattr(room.os, "link", refused)
    path = save_checkpoint(tmp_path, 3, laid_out("plain"), {}, keep_last=9, unchanged=known).path
    _whole(path, 1)
    assert all(file.stat().st_nlink == 1 for file in path.iterdir())


def test_a_save_that_failed_is_not_the_last_one(tmp_path: Path) -> None:
    def refused() -> None:
        raise StorageError("no")

    known = Unchanged()
    _twice(tmp_path, known)
    changed = {name: tensor + 1 if name == "fp64" else tensor for name, tensor in laid_out("plain").items()}
    with pytest.raises(StorageError):
        save_checkpoint(tmp_path, 3, changed, {}, keep_last=9, unchanged=known, fence=refused)
    path = save_checkpoint(tmp_path, 4, laid_out("plain"), {}, keep_last=9, unchanged=known).path
    _whole(path, 1)
    assert _inodes(path) == _inodes(tmp_path / "step-00000002")
    assert isinstance(changed["fp64"], torch.Tensor)
