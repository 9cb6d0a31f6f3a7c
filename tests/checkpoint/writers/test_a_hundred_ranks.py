"""A save of a hundred ranks, which threads of the test are: all that a save does, in lists of ten ranks."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from paceline.checkpoint import KeptPlan, load_checkpoint, read_manifest, save, verify_checkpoint
from paceline.checkpoint.manifest import INLINE_RANKS, list_name, ranks_in_a_list
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.snapshot import Part, Snapshot

RANKS, HALF = 100, 50
SHAPES = {"rows": (2 * RANKS, 4), "copied rows": (HALF, 2), "whole": (3, 5), "of the last": (7,)}


def full(name: str, step: int) -> torch.Tensor:
    count = torch.Size(SHAPES[name]).numel()
    return (torch.arange(count, dtype=torch.float32) + 1000 * step).view(SHAPES[name])


def held_by(rank: int, step: int) -> Snapshot:
    """Return what a rank holds: two rows, one of which rank + 50 has a copy, a whole tensor, and the last one more."""
    boxes = {"rows": (2 * rank, 2), "copied rows": (rank % HALF, 1), "whole": (0, 3)}
    boxes |= {"of the last": (0, 7)} if rank == RANKS - 1 else {}
    values = {}
    for name, (first, rows) in boxes.items():
        rest = SHAPES[name][1:]
        part = Part(name, "float32", SHAPES[name], (first, *(0 for _ in rest)), (rows, *rest))
        values[part] = full(name, step)[first : first + rows].clone()
    return Snapshot(step, values, {"step": step})


class RanksOnThreads(Ranks):
    """One of the ranks, on a thread of its own. It counts the bytes that it is told."""

    here = threading.local()
    table: ClassVar[list[Any]] = [None] * RANKS
    meeting = threading.Barrier(RANKS)
    on_the_way: ClassVar[defaultdict[tuple[int, int], queue.Queue[torch.Tensor]]] = defaultdict(queue.Queue)
    making = threading.Lock()

    def __init__(self, group: object = None, alone: bool = False) -> None:
        self.group, self.alone, self.rank, self.size = None, False, self.here.rank, RANKS

    device = torch.device("cpu")  # type: ignore[assignment]

    def everywhere(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        self.table[self.rank] = value
        self.meeting.wait(60)
        found = list(self.table)
        self.meeting.wait(60)
        return found

    def rows(self, row: bytes) -> list[bytes]:
        """Nobody tells the first rank of everybody."""
        raise AssertionError(f"{len(row)} bytes of every rank")

    def collect(self, value: Any) -> list[Any]:
        """The same of objects."""
        raise AssertionError(f"{value} of every rank")

    def swap(self, content: torch.Tensor, to: int | None, source: int | None) -> torch.Tensor:
        """Send bytes to one rank and return those of another."""
        found = torch.empty(0, dtype=torch.uint8)
        if to is not None:
            self._way(self.rank, to).put(content)
        if source is not None:
            found = self._way(source, self.rank).get(timeout=60)
        self.here.heard += len(found)
        return found

    def _way(self, source: int, to: int) -> queue.Queue[torch.Tensor]:
        with self.making:
            return self.on_the_way[source, to]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank."""
        return [any(each) for each in zip(*self.everywhere(flags), strict=True)]

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums."""
        return [sum(each) % 2**64 for each in zip(*self.everywhere(numbers), strict=True)]

    def from_first(self, what: str, function: Any) -> Any:
        """Return what the first rank's call returns."""
        return self.everywhere(function() if self.rank == 0 else None)[0]


def test_a_hundred_ranks_save_and_one_process_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "Ranks", RanksOnThreads)
    heard: dict[int, list[int]] = {}
    failed: list[BaseException] = []

    def be(rank: int) -> None:
        RanksOnThreads.here.rank, RanksOnThreads.here.heard = rank, 0
        kept, told = KeptPlan(), []
        try:
            for step in (1, 2):
                before = RanksOnThreads.here.heard
                save.publish(save.write(tmp_path, held_by(rank, step), kept=kept), keep_last=1)
                told.append(RanksOnThreads.here.heard - before)
        except BaseException as error:
            failed.append(error)
            RanksOnThreads.meeting.abort()
        heard[rank] = told

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]

    (path,) = tmp_path.iterdir()
    found, each = read_manifest(path), ranks_in_a_list(RANKS)
    assert RANKS > INLINE_RANKS and each == 10 and found.world_size == RANKS
    assert set(found.lists()) == {list_name(number) for number in range(RANKS // each)}
    verify_checkpoint(path)
    blank = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    assert load_checkpoint(path, blank)["step"] == 2
    assert all(torch.equal(values, full(name, 2)) for name, values in blank.items())
    written = sum((path / name).stat().st_size for name in found.files if name.endswith(".safetensors"))
    values = sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())
    assert values <= written < values + 1000 * RANKS, "each part once, with a header for each file"
    assert max(again for _, again in heard.values()) <= 2500 and sum(again == 0 for _, again in heard.values()) >= HALF
    assert max(first for first, _ in heard.values()) < 20_000, "of what a hundred ranks hold"
