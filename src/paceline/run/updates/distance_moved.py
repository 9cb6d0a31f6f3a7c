"""How far a model has moved from the weights that it started from, block by block, on any layout.

Each rank reads the starting weights of its own parts again, and holds them against what it has.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.run.process.world import World
from paceline.spec.journal.kinds import MovedRecord
from paceline.spec.task import ModelSpec, Task
from paceline.task.models.build import check_names
from paceline.task.models.held import held_part
from paceline.task.models.huggingface.experts import Stored
from paceline.task.models.huggingface.names import PREFIX

BLOCK = re.compile(r"(.*?\.\d+)\.")  # the name of a repeated block: all up to its number
PIECE_ELEMENTS = 2**24  # of the starting weights that are held at a time


@dataclass
class _Sums:
    """Sums over elements of a tensor: squares of differences, squares of starting weights, how many."""

    moved: float = 0.0
    started: float = 0.0
    count: int = 0

    def add(self, other: _Sums) -> None:
        self.moved, self.started, self.count = (
            self.moved + other.moved, self.started + other.started, self.count + other.count,
        )  # fmt: skip


def moved(model: nn.Module, task: Task, world: World, step: int) -> MovedRecord | str | None:
    """Return how far the model is from its starting weights; None where it has none, or in words why it is not known.

    Beside adapters only those starting weights count that are trained too: the frozen base cannot move, what its
    `base_dtype` rounds is no movement, and it may be large. Every rank calls it.
    """
    if not isinstance(task.model, ModelSpec) or not task.model.starts_from:
        return None
    began = time.perf_counter()
    sums, fresh, because = _of_rank(model, task.model, trained_only=not task.adapter.is_none)
    if refused := world.first_told(because):
        return str(refused)
    names = world.union(sums)
    if not names:
        return None
    own = [sums.get(name, (_Sums(), 0)) for name in names]
    parts = [[each.moved, each.started, each.count, size, size > 0] for each, size in own]
    table = iter(world.sum([float(value) for part in parts for value in part]))
    whole: dict[str, _Sums] = {}
    sizes: dict[str, int] = {}
    for name in names:
        distance, started, count, size, holders = itertools.islice(table, 5)
        if holders:  # a tensor without an element has none
            whole[name], sizes[name] = _Sums(distance, started, int(count)), int(size / holders)
    return _record(whole, sizes, len(world.union(fresh)), step, time.perf_counter() - began)


def _of_rank(
    model: nn.Module, spec: ModelSpec, trained_only: bool
) -> tuple[dict[str, tuple[_Sums, int]], list[str], str]:
    """Return the sums of this rank's parts by name, with the size of each whole tensor; fresh names; why not."""
    try:
        targets, stored, fitted = check_names(model, spec.starts_from, spec.fresh)
        fresh = {*fitted.fresh, *(fitted.longer or ())}
        sums = {
            name: (_sums(stored, name, target), math.prod(target.shape))
            for name, target in targets.items()
            if name not in fresh and isinstance(target, nn.Parameter) and (target.requires_grad or not trained_only)
        }
        return sums, sorted(fresh), ""
    except PacelineError as error:  # the files may be gone since
        return {}, [], f"{error.what}: {error.because}"


@torch.no_grad()
def _sums(stored: Stored, name: str, target: Tensor) -> _Sums:
    """Return the sums of the part of a tensor that this rank has, a piece of its rows at a time."""
    local, offsets, sizes = held_part(target)
    found = _Sums(count=local.numel())
    rows = max(1, PIECE_ELEMENTS // max(1, math.prod(sizes[1:])))
    for at in range(0, sizes[0] if local.numel() and sizes else 0, rows):
        few = min(rows, sizes[0] - at)
        started = stored.part(name, (offsets[0] + at, *offsets[1:]), (few, *sizes[1:])).to(local.device).double()
        found.started += float(started.square().sum())
        found.moved += float((local[at : at + few].double() - started).square().sum())
    return found


def _record(whole: dict[str, _Sums], sizes: dict[str, int], fresh: int, step: int, seconds: float) -> MovedRecord:
    """Return the record of sums over all ranks; what several ranks hold counts once."""
    blocks: dict[str, _Sums] = {}
    for name, sums in whole.items():
        copies = sums.count / sizes[name]
        once = _Sums(sums.moved / copies, sums.started / copies, sizes[name])
        blocks.setdefault(_block_of(name), _Sums()).add(once)
    ordered = sorted(blocks.items(), key=lambda item: _place(item[0]))
    table = {
        name: {"distance": _distance(sums), "norm": math.sqrt(sums.started), "parameters": sums.count}
        for name, sums in ordered
    }
    total = _Sums()
    for of_block in blocks.values():
        total.add(of_block)
    return MovedRecord(step, table, _distance(total), fresh, seconds)


def _distance(sums: _Sums) -> float:
    return math.sqrt(sums.moved / sums.started) if sums.started else math.nan


def _block_of(name: str) -> str:
    own = name.removeprefix(PREFIX)
    found = BLOCK.match(own)
    return found[1] if found else own.rpartition(".")[0] or own


def _place(name: str) -> list[tuple[int, int, str]]:
    """Return what orders blocks: by name, and by their number as a number."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in name.split(".")]
