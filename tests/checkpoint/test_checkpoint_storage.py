"""Storage that fails at each of the calls that a save makes to it, in turn: what is there stays whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import load_latest, save_checkpoint, verify_checkpoint
from paceline.checkpoint import save as saving
from paceline.errors import StorageError

CALLS = ((Path, "open"), (Path, "rename"), (Path, "mkdir"), (Path, "unlink"), (Path, "iterdir"), (Path, "stat"),
         (os, "open"), (os, "fsync"), (os, "fdatasync"), (os, "link"), (os, "unlink"), (os, "rmdir"),
         (os, "pwrite"), (os, "preadv"))  # fmt: skip


class Storage:
    """Counts calls, and fails from the call of number `at` on, or at that one alone: before it is done, or after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.at = 0
        self.number, self.is_lasting, self.is_done = errno.EROFS, True, False
        for owner, name in CALLS:
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, call: Any) -> Any:
        def watched(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            fails = self.at and (self.calls >= self.at if self.is_lasting else self.calls == self.at)
            made = None if fails and not self.is_done else call(*arguments, **named)
            if fails:
                raise OSError(self.number, "as a test wants")
            return made

        return watched

    def fails(self, at: int) -> None:
        """Fail from now on at the call of this number; 0 for never."""
        self.calls, self.at = 0, at


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    with monkeypatch.context() as patched:
        yield Storage(patched)


def state(number: float) -> dict[str, torch.Tensor]:
    """Return tensors of which one never changes, so that its file is linked."""
    return {"weight": torch.full((100,), number), "frozen": torch.arange(50.0)}


@pytest.mark.parametrize(
    ("number", "is_lasting", "is_done", "stride"),
    [
        (errno.EROFS, True, False, 5),
        (errno.EIO, False, False, 5),
        (errno.ENOENT, False, True, 5),  # a file server has done what it is asked for again, whose answer was lost
        pytest.param(errno.EROFS, True, False, 1, marks=pytest.mark.deep),
        pytest.param(errno.ENOSPC, True, False, 1, marks=pytest.mark.deep),
        pytest.param(errno.EIO, False, False, 1, marks=pytest.mark.deep),
        pytest.param(errno.ENOENT, False, True, 1, marks=pytest.mark.deep),
        pytest.param(errno.EIO, True, True, 1, marks=pytest.mark.deep),
    ],
)
def test_storage_that_fails_in_the_middle_of_a_save_harms_nothing(
    tmp_path: Path, storage: Storage, number: int, is_lasting: bool, is_done: bool, stride: int
) -> None:
    storage.number, storage.is_lasting, storage.is_done = number, is_lasting, is_done
    ended, at = {"saved": 0, "refused": 0}, 0
    while at <= storage.calls:
        storage.fails(0)
        at += stride
        root, kept, unchanged = tmp_path / str(at), saving.KeptPlan(), saving.Unchanged()
        for step in (1, 2, 3):
            save_checkpoint(root, step, state(step), {}, keep_last=2, kept=kept, unchanged=unchanged)
        storage.fails(at)
        try:
            save_checkpoint(root, 4, state(4), {}, keep_last=2, kept=kept, unchanged=unchanged)
            told = "saved"
        except StorageError:  # and no other error
            told = "refused"
        calls = storage.calls
        storage.fails(0)
        ended[told] += 1
        found = state(0)
        loaded = load_latest(root, found)
        assert loaded is not None
        reached = found["weight"][0].item()
        assert reached == 4 if told == "saved" else reached in (3, 4), (at, told)
        assert all(torch.equal(found[name], value) for name, value in state(reached).items())
        info = save_checkpoint(root, 5, state(5), {}, keep_last=2, kept=kept, unchanged=unchanged)
        verify_checkpoint(info.path)
        assert len(list(root.iterdir())) == 2, "nothing of the failed one is left, once storage is well"
        storage.calls = calls
    assert min(ended.values()) > 0, "it failed where that matters, and where it does not"


def test_a_checkpoint_is_saved_whether_or_not_old_ones_can_be_removed(tmp_path: Path, storage: Storage) -> None:
    """It has its name by then, and was read back: to say that it was not saved would be wrong."""
    for step in (1, 2):
        save_checkpoint(tmp_path, step, state(step), {}, keep_last=2)
    clear, before = saving.clear, [0]

    def counted(*arguments: Any) -> Any:
        before[0] = storage.calls  # of what comes first: files, names, and reading back
        return clear(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "clear", counted)
        storage.fails(0)
        save_checkpoint(tmp_path, 3, state(3), {}, keep_last=2)
        storage.fails(before[0] + 1)
        info = save_checkpoint(tmp_path, 4, state(4), {}, keep_last=2)
    assert info.path.name == "step-00000004" and not info.removed
    assert any("stays" in why or "stay" in why for why in info.kept)
