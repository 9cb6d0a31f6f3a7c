"""Seeded sequences of saves, failures, damages and resumes: what is loaded is what was saved, and is never lost.

A model of what must be there is kept beside the store: after each turn the newest readable checkpoint is loaded, and
its values are those of the save that made it.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks

from paceline.checkpoint import list_checkpoints, load_latest, save_checkpoint, verify_checkpoint
from paceline.checkpoint.save_plan import KeptPlan
from paceline.checkpoint.tiers.remote import RemoteStore
from paceline.checkpoint.tiers.retention import HELD_OUT, Retention
from paceline.checkpoint.tiers.unchanged import Unchanged
from paceline.errors import StorageError

CALLS = ((os, "pwrite"), (os, "fsync"), (os, "link"), (os, "open"), (os, "unlink"), (os, "rmdir"), (os, "preadv"),
         (Path, "open"), (Path, "rename"), (Path, "mkdir"), (Path, "unlink"), (Path, "iterdir"))  # fmt: skip


class Killed(BaseException):
    """Stands for the end of the process: nothing of the program's own runs after it but `finally`."""


class Story:
    """One store, the values that each save had, and what may happen to them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.root, self.remote = folder / "checkpoints", RemoteStore(f"memory://paceline-{folder.name}-{seed}")
        self.saved: dict[int, dict[str, torch.Tensor]] = {}  # by the number of the save, which `extra` has
        self.found = Counter[str]()
        self.number = self.step = 0
        self.state = {"weight": torch.zeros(40), "frozen": torch.arange(30.0), "count": torch.tensor(0)}
        self.retention = Retention(self.draw.randint(1, 3), None, self.draw.randint(0, 2))
        self._begin()

    def _begin(self) -> None:
        self.unchanged, self.kept = Unchanged(), KeptPlan()

    def save(self, patch: pytest.MonkeyPatch, fails: bool) -> None:
        """Train a step and save; where it `fails`, some call of the storage does, from then on or once."""
        self.number, self.step = self.number + 1, self.step + 1
        if self.draw.random() < 0.8:
            self.state["weight"] += 1
        self.state["count"] += 1
        if self.draw.random() < 0.1:
            self.state["frozen"] += 1
        self.saved[self.number] = {name: tensor.clone() for name, tensor in self.state.items()}
        extra: dict[str, Any] = {"number": self.number}
        if self.draw.random() < 0.4:
            extra[HELD_OUT] = {"step": self.step, "loss": self.draw.random()}
        with patch.context() as patched:
            if fails:
                self._break(patched)
            try:
                save_checkpoint(self.root, self.step, self.state, extra, keep_last=self.retention,
                                unchanged=self.unchanged, kept=self.kept)  # fmt: skip
                self.found["saved"] += 1
            except (StorageError, Killed) as error:
                self.found["killed" if isinstance(error, Killed) else "failed"] += 1
                if isinstance(error, Killed):
                    self._begin()

    def _break(self, patched: pytest.MonkeyPatch) -> None:
        (owner, name), at, once = self.draw.choice(CALLS), self.draw.randint(1, 6), self.draw.random() < 0.5
        call, calls, kills = getattr(owner, name), [0], self.draw.random() < 0.4

        def broken(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == at or (calls[0] > at and not once):
                raise Killed if kills else OSError(errno.EIO, "as a test wants")
            return call(*given, **named)

        patched.setattr(owner, name, broken)

    def damage(self) -> None:
        """Flip a bit of the newest sound checkpoint where an older sound one is there to go on from."""
        readable = self.readable()
        if len(readable) < 2:
            return
        path = readable[0][1]
        file = self.draw.choice([found for found in sorted(path.iterdir()) if "unchanged" not in found.name])
        content = bytearray(file.read_bytes())
        content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        file.unlink()  # a hard link of others is left alone
        file.write_bytes(content)
        self.found["damaged"] += 1

    def resume(self) -> None:
        """Go on from the newest sound checkpoint, in a process that knows nothing."""
        self._begin()
        blank = {name: torch.full_like(tensor, -7) for name, tensor in self.state.items()}
        loaded = load_latest(self.root, blank)
        if loaded is None:
            assert not self.found["saved"]
            return
        was = self.saved[loaded.extra["number"]]
        assert all(torch.equal(blank[name], was[name]) for name in was), loaded.path
        self.state = blank
        self.step = int(loaded.path.name.removeprefix("step-").partition(".")[0])
        self.found["resumed"] += 1

    def move(self) -> None:
        """Give the store's folder another name, or have a copy in its place."""
        if self.root.exists():
            other = self.root.with_name(f"moved-{self.number}-{self.draw.random()}")
            if self.draw.random() < 0.5:
                self.root.rename(other)
            else:
                shutil.copytree(self.root, other, symlinks=True)
                shutil.rmtree(self.root)
            self.root = other
            self.found["moved"] += 1

    def copy(self) -> None:
        """Copy the newest checkpoint away; sometimes lose all that is here, and fetch it."""
        complete = list_checkpoints(self.root).complete
        if not complete:
            return
        try:
            verify_checkpoint(complete[0].path)
        except StorageError:
            return
        self.remote.copy(complete[0].path, 2)
        self.found["copied"] += 1
        if self.draw.random() < 0.5:
            shutil.rmtree(self.root)
            self.root.mkdir()
            newest = self.remote.fetch_newest(self.root, 0)
            assert newest is not None
            assert list_checkpoints(self.root).complete[0].manifest.extra == complete[0].manifest.extra
            self.found["fetched"] += 1

    def check(self, before: list[tuple[int, Path]]) -> None:
        """Assert that something readable is there where there was, as new as before or newer."""
        readable = self.readable()
        if before:
            assert readable and readable[0][0] >= before[0][0], (before, readable)

    def readable(self) -> list[tuple[int, Path]]:
        """Return sequence numbers and folders of the checkpoints that are sound in every byte, newest first."""
        sound = []
        for found in list_checkpoints(self.root).complete:
            try:
                sound.append((verify_checkpoint(found.path).sequence, found.path))
            except StorageError:
                continue
        return sound

    def tell(self, patch: pytest.MonkeyPatch, turns: int) -> None:
        """Let so many things happen."""
        for _ in range(turns):
            kind = self.draw.choices(("save", "fail", "resume", "damage", "move", "copy"), (5, 4, 2, 1, 1, 1))[0]
            before = self.readable()
            if kind in ("save", "fail"):
                self.save(patch, kind == "fail")
                self.check(before)
            else:
                getattr(self, kind)()
        self.resume()


def _stories(folder: str, first: int, count: int) -> Counter[str]:
    found = Counter[str]()
    for seed in range(first, first + count):
        place = Path(folder, str(seed))
        with pytest.MonkeyPatch.context() as patch:
            story = Story(place, seed)
            try:
                story.tell(patch, 14)
            except BaseException as error:
                raise AssertionError(f"sequence {seed}: {type(error).__name__}: {error}") from error
        found += story.found
        shutil.rmtree(place, ignore_errors=True)
    return found


def _run(folder: Path, first: int, count: int) -> None:
    (found,) = run_ranks(_stories, 1, str(folder), first, count, timeout_seconds=600)
    for kind in ("saved", "failed", "killed", "resumed", "damaged", "moved", "copied", "fetched"):
        assert found[kind], found
    print(dict(found))


def test_sixteen_sequences_lose_nothing(tmp_path: Path) -> None:
    _run(tmp_path, 0, 16)


@pytest.mark.deep
@pytest.mark.parametrize("block", range(3))
def test_three_hundred_sequences_lose_nothing(tmp_path: Path, block: int) -> None:
    _run(tmp_path, 40 + 100 * block, 100)
