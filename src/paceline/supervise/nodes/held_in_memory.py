"""The parts of a run's state that nodes hold in memory, and who reads which of them when a node is lost. Torch-free."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.lock import try_lock
from paceline.system.this_machine import RAM_DISK

PIECES_VARIABLE = "PACELINE_PIECES"
PREFIX = "paceline-pieces-"
_NAME = re.compile(r"step-(\d+)\.rank-(\d+)\.of-(\d+)")


@dataclass(frozen=True)
class HeldPieces:
    """What nodes hold of one moment between them: the step, and which files each rank of a world reads."""

    step: int
    files: Mapping[int, Sequence[str]] = field(default_factory=dict)


class PiecesFolder:
    """A node's folder for parts of the state in its RAM disk, which goes with its supervisor."""

    def __init__(self, node: int) -> None:
        self.path: Path | None = None
        if RAM_DISK.is_dir() and os.access(RAM_DISK, os.W_OK):
            _clear()
            made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{node}-", dir=RAM_DISK))  # its user's alone
            self._lock = os.open(made / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try_lock(self._lock)
            # Locked before others see it: a supervisor that starts at the same moment would take it for a dead one's.
            self.path = made.rename(made.with_name(made.name.removeprefix(".")))

    def environ(self) -> dict[str, str]:
        """Return what the environment of the node's ranks says of the folder."""
        return {PIECES_VARIABLE: str(self.path)} if self.path else {}

    def listed(self) -> list[str]:
        """Return the files that are there."""
        return sorted(map(str, self.path.glob("step-*"))) if self.path else []

    def close(self) -> None:
        """Give the memory back."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self.path = None


def whole_of(held: Mapping[int, Sequence[str]], blocks: Mapping[int, range]) -> HeldPieces | None:
    """Return the newest moment of which nodes hold the parts of all ranks, and who is to read them; None without one.

    `held` has the files of each node, `blocks` the ranks of the next world on each. A rank reads what is on its node.
    """
    found: dict[tuple[int, int], dict[int, list[tuple[int, str]]]] = {}
    for node, files in held.items():
        for file in files if node in blocks else ():
            known = _NAME.fullmatch(Path(file).name)
            if known:
                step, rank, world = map(int, known.groups())
                found.setdefault((step, world), {}).setdefault(rank, []).append((node, file))
    for (step, world), parts in sorted(found.items(), reverse=True):
        if set(parts) == set(range(world)):
            return HeldPieces(step, _spread(parts, blocks))
    return None


def _spread(parts: Mapping[int, Sequence[tuple[int, str]]], blocks: Mapping[int, range]) -> dict[int, list[str]]:
    """Return which files each rank reads: about as many as any other."""
    files: dict[int, list[str]] = {rank: [] for block in blocks.values() for rank in block}
    for rank in sorted(parts):
        node, file = min(parts[rank], key=lambda pair: min(len(files[one]) for one in blocks[pair[0]]))
        files[min(blocks[node], key=lambda one: len(files[one]))].append(file)
    return {rank: each for rank, each in files.items() if each}


def _clear() -> None:
    """Remove the folders of supervisors that are gone."""
    for folder in RAM_DISK.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or one that is being removed
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            is_free = try_lock(lock)
            os.close(lock)
            if is_free:
                shutil.rmtree(folder, ignore_errors=True)
