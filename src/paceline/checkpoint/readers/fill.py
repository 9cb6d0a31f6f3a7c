"""Fills tensors from the shards of a checkpoint, in one pass over the files that this rank checks.

Their bytes are read once, come into place, and are hashed there while they are in the processor's cache, and their
fingerprints taken. After that come files that other ranks check, and parts that do not lie in memory as in the file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import sub
from pathlib import Path
from typing import NamedTuple

import torch

from paceline.checkpoint.boxes import Box, overlap
from paceline.checkpoint.files.copies import Copies, host_bytes
from paceline.checkpoint.files.destinations import Destination, Destinations, ignored
from paceline.checkpoint.files.places import OpenShards
from paceline.checkpoint.files.read_back import verify_files
from paceline.checkpoint.fingerprint import (
    HeldPart,
    PartSums,
    PlaceWeights,
    SumOfPart,
    WordArray,
    local_part,
    part_sums,
    sums_by_name,
    within,
)
from paceline.checkpoint.index import Chunks, TensorKind
from paceline.checkpoint.manifest import FileEntry
from paceline.checkpoint.shards import DTYPES, Chunk, ShardReader, stored_shape
from paceline.cluster.here.collector import collector_at_rest

Kinds = Mapping[str, TensorKind]


class Needed(NamedTuple):
    """What a part of a tensor needs of a chunk: the rectangle that begins at `begin` of the chunk goes to `target`."""

    name: str
    dtype: str
    place: Box
    chunk: Chunk
    begin: tuple[int, ...]
    target: torch.Tensor


def fill(
    path: Path, held: Mapping[str, HeldPart], kinds: Kinds, chunks: Mapping[str, Chunks],
    checks: Mapping[str, FileEntry], takes_sums: bool,
) -> PartSums:  # fmt: skip
    """Read what this rank holds of tensors into place, and all files that the rank `checks`; return sums of the parts.

    Raises StorageError where a file of these is not what was written, or another cannot be read. The tensors then hold
    what was read until then.
    """
    with OpenShards(path) as opened:
        with collector_at_rest():
            needed = sorted(_needed(held, kinds, chunks), key=lambda one: one.chunk.file)
            sums = _SumsAsRead(held if takes_sums else {})
            straight, later = _shared_out(needed, opened, checks, sums)
        if checks:
            verify_files(path, checks, straight)
        _copy(path, later, opened)
    return sums.taken(held if takes_sums else ())


@contextmanager
def emptied_where_it_fails(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Where a load fails leave nothing of it: floating tensors hold no numbers then, and others zero.

    What was half loaded, or from a damaged file, would train on unseen where somebody goes on without it.
    """
    try:
        yield
    except BaseException:
        for tensor in tensors.values():
            local = local_part(tensor)[0]
            local.fill_(math.nan) if local.is_floating_point() or local.is_complex() else local.zero_()
        raise


def _needed(held: Mapping[str, HeldPart], kinds: Kinds, chunks: Mapping[str, Chunks]) -> Iterator[Needed]:
    """Yield what each part of this rank's tensors needs of each chunk."""
    for name, of_tensor in chunks.items():
        local, places = held[name]
        for chunk in of_tensor:
            for place in places:
                shared = overlap(chunk.box, place)
                if shared is not None:
                    begin = tuple(map(sub, shared[0], chunk.offsets))
                    yield Needed(name, kinds[name].dtype, place, chunk, begin, within(local, place, shared))


def _shared_out(
    needed: Sequence[Needed], opened: OpenShards, checks: Container[str], sums: _SumsAsRead
) -> tuple[dict[str, Destinations], list[Needed]]:
    """Return what is read while its file is checked, by file, and what comes later."""
    straight: dict[str, list[tuple[Destination, Needed]]] = defaultdict(list)
    later = []
    for one in needed:
        lies = _lies(one, opened) if one.chunk.file in checks else None
        room = host_bytes(one.target)
        if lies is None or room is None or room.size != lies[2] - lies[1]:
            later.append(one)
        else:
            to = Destination(lies[1], room.data, *sums.of(one, room))
            straight[one.chunk.file].append((to, one))
    apart: dict[str, list[Destination]] = defaultdict(list)
    for file, pairs in straight.items():
        end = 0
        for to, one in sorted(pairs, key=lambda pair: pair[0].begin):
            if to.begin < end:  # an index may have two tensors lie in one place
                later.append(one)
            else:
                apart[file].append(to)
                end = to.end
    return {file: Destinations(parts) for file, parts in apart.items()}, later


def _lies(one: Needed, opened: OpenShards) -> tuple[int, int, int] | None:
    """Return a file's descriptor and where in it a part lies; None where it does not lie there in one piece.

    And where the file does not hold what the index says: what is wrong is told by who reads it in the other way.
    """
    found = opened.find(one.chunk.file, one.chunk.key)
    shape = stored_shape(one.dtype, one.chunk.sizes)
    if found is None or (found[1].dtype, found[1].shape) != (DTYPES[one.dtype][0], shape):
        return None
    begin = (*one.begin, 0) if len(shape) > len(one.begin) else one.begin
    lies = found[1].rows(begin, stored_shape(one.dtype, one.target.shape))
    return None if lies is None else (found[0], *lies)


def _copy(path: Path, later: Sequence[Needed], opened: OpenShards) -> None:
    """Read parts into place, or copy them out of the mapped file, by several threads."""
    shards = ShardReader(path)
    with Copies() as copies:
        for one in later:
            lies = _lies(one, opened) if copies.reads(one.target) else None
            if lies is None or not copies.begin_reading(one.target, *lies):
                copies.begin(one.target, shards.read(one.chunk, one.dtype, one.begin, tuple(one.target.shape)))


class _SumsAsRead:
    """The sums of the parts on this rank, which are taken as their bytes come, or else of the whole part at the end."""

    def __init__(self, held: Mapping[str, HeldPart]) -> None:
        self._parts = {
            (name, place): local for name, (local, places) in held.items() for place in places if 0 not in place[1]
        }
        self._weights = PlaceWeights()
        self._under_way: dict[tuple[str, Box], SumOfPart] = {}

    def of(self, one: Needed, room: WordArray) -> tuple[Callable[[int, int], None], int]:
        """Return what takes the sum of bytes that come into what is needed, whose room it is; and a row's bytes."""
        part = one.name, one.place
        local = self._parts.get(part)
        content = room if local is one.target or local is None else host_bytes(local)
        if local is None or content is None:
            return ignored, 1
        if (taking := self._under_way.get(part)) is None:
            taking = self._under_way[part] = SumOfPart(local, content, one.place[0], self._weights)
        if local is one.target:
            return taking.add, taking.row_bytes
        add, lies = taking.add, one.target.data_ptr() - local.data_ptr()
        return lambda begin, end: add(lies + begin, lies + end), taking.row_bytes if not lies % taking.row_bytes else 1

    def taken(self, names: Iterable[str]) -> PartSums:
        """Return the sums of all parts, of which all are there now."""
        found = {part: total for part, each in self._under_way.items() if (total := each.whole()) is not None}
        rest = [part for part in self._parts if part not in found]
        found |= zip(rest, part_sums([(self._parts[part], part[1][0]) for part in rest]), strict=True)
        return sums_by_name(names, found, found.values())
