"""The index of a checkpoint: which bytes of which file hold which part of which tensor.

Every rank writes a part of it beside its shard, and a load reads the parts that it needs. `tensors.json` says what the
tensors are; it grows with their number and not with the number of ranks:

    {NAME: {"dtype": "float32", "shape": [7, 3], "fingerprint": "2f6a01c94be8d7e3", "parts": [0, 1]}, ...}

The fingerprint (fingerprint.py) is that of the live tensor's values before they were written, on whatever layout.
`parts` are the first and the last rank that held something of the tensor. `shard-00001-of-00002.json`, the part of rank
1, lists all that rank 1 held, with the file of the rank that wrote it. A rank that resumes on the same layout finds
everything in its own part:

    {NAME: [{"offsets": [4, 0], "sizes": [3, 3], "file": "shard-00001-of-00002.safetensors", "key": KEY}], ...}

In version 1 there were no parts: `tensors.json` had, for each tensor, all "chunks" instead.

What is read is never trusted: names, sizes, offsets and the cover of each tensor by its chunks are checked, and
anything wrong is a StorageError.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.boxes import Box, check_cover, overlap
from paceline.checkpoint.manifest import TABLE_NAME, FileEntry, Manifest, part_name
from paceline.checkpoint.shards import DTYPES, Chunk
from paceline.checkpoint.untrusted import Refused, content, numbers, refusal, table, typed

MAX_DIMENSIONS = 64
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")

Chunks = tuple[Chunk, ...]


@dataclass(frozen=True)
class TensorKind:
    """What a tensor is: dtype by torch's name, global shape, and the ranks whose parts of the index list its chunks.

    The fingerprint is empty where an earlier release saved it, or where ranks held different copies.
    """

    dtype: str
    shape: tuple[int, ...]
    fingerprint: str = ""
    parts: range = range(0)


@dataclass(frozen=True)
class TensorEntry(TensorKind):
    """A tensor and the chunks that cover it exactly once."""

    chunks: Chunks = ()


Index = Mapping[str, TensorEntry]
Wanted = Mapping[str, Sequence[Box]]


def encode_kinds(kinds: Mapping[str, TensorKind]) -> bytes:
    """Return the content of tensors.json."""
    document = {
        name: {
            "dtype": kind.dtype,
            "shape": kind.shape,
            **({"fingerprint": kind.fingerprint} if kind.fingerprint else {}),
            "parts": [kind.parts.start, kind.parts.stop - 1],
        }
        for name, kind in kinds.items()
    }
    return json.dumps(document, separators=(",", ":")).encode()


def encode_part(chunks: Mapping[str, Sequence[Chunk]]) -> bytes:
    """Return the content of a rank's part of the index."""
    document = {name: [chunk._asdict() for chunk in of_tensor] for name, of_tensor in chunks.items()}
    return json.dumps(document, separators=(",", ":")).encode()


def read_index(path: Path, manifest: Manifest) -> Index:
    """Return the tensors in the checkpoint `path` by name, all parts read. Raises StorageError where it is unsound."""
    index = IndexReader(path, manifest)
    wanted = {name: [((0,) * len(kind.shape), kind.shape)] for name, kind in index.kinds.items()}
    found = index.find(wanted)
    return {
        name: TensorEntry(kind.dtype, kind.shape, kind.fingerprint, kind.parts, found[name])
        for name, kind in index.kinds.items()
    }


class IndexReader:
    """What the tensors of a checkpoint are, and where their values lie; parts of the index are read when needed.

    Raises StorageError where a file of the index is not as written, or cannot be true.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.parts_read: set[int] = set()
        with refusal(path, TABLE_NAME):
            document = table(json.loads(self._content(TABLE_NAME)))
            self.kinds = {name: self._kind(name, entry) for name, entry in document.items()}
            self._found: dict[str, dict[Chunk, None]] = {  # ordered sets
                name: dict.fromkeys(_chunks(name, entry, self.kinds[name].shape, manifest.files))
                for name, entry in document.items()
                if "parts" not in entry
            }

    def find(self, wanted: Wanted, near: int = 0) -> dict[str, Chunks]:
        """Return the chunks that cover the boxes `wanted` of each tensor, each box exactly once.

        Parts of the index are read in the order of their distance to rank `near`, until nothing is missing.
        """
        search = _Search(wanted)
        for name, chunks in self._found.items():
            search.take(name, chunks)
        for name in wanted:
            for rank in _outward(self.kinds[name].parts, near):
                if not search.misses(name):
                    break
                if rank not in self.parts_read:
                    self._read_part(rank, search)
        with refusal(self.path, TABLE_NAME):
            found = search.finish()
            _check_files_hold_chunks(self.manifest.files, self.kinds, found)
        return found

    def _read_part(self, rank: int, search: _Search) -> None:
        name = part_name(rank, self.manifest.world_size)
        self.parts_read.add(rank)
        if name not in self.manifest.files and not (self.path / name).exists():
            return  # the rank held nothing, as one does that has joined survivors
        with refusal(self.path, name):
            for tensor, listed in table(json.loads(self._content(name))).items():
                if tensor not in self.kinds:
                    raise Refused(f"{tensor!r} is not in {TABLE_NAME}")
                chunks = _chunks(tensor, {"chunks": listed}, self.kinds[tensor].shape, self.manifest.files)
                self._found.setdefault(tensor, {}).update(dict.fromkeys(chunks))
                search.take(tensor, chunks)

    def _content(self, name: str) -> bytes:
        read = content(self.path / name)
        if name not in self.manifest.files:
            raise Refused("the manifest does not list it")
        if hashlib.sha256(read).hexdigest() != self.manifest.files[name].sha256:
            raise Refused("its sha256 is not the manifest's, so its content changed after it was written")
        return read

    def _kind(self, name: str, entry: Any) -> TensorKind:
        dtype = typed(entry, "dtype", str)
        if dtype not in DTYPES:
            raise Refused(f"{name}: unknown dtype {dtype!r}")
        shape = numbers(typed(entry, "shape", list), f"{name}: shape")
        if len(shape) > MAX_DIMENSIONS:
            raise Refused(f"{name}: {len(shape)} dimensions")
        fingerprint = typed(entry, "fingerprint", str) if "fingerprint" in entry else ""
        if fingerprint and not _FINGERPRINT.fullmatch(fingerprint):
            raise Refused(f"{name}: its fingerprint is not one")
        return TensorKind(dtype, shape, fingerprint, self._parts(name, entry) if "parts" in entry else range(0))

    def _parts(self, name: str, entry: Any) -> range:
        parts = numbers(typed(entry, "parts", list), f"{name}: parts")
        if len(parts) != 2 or not parts[0] <= parts[1] < self.manifest.world_size:
            raise Refused(f"{name}: {parts} are not the first and the last rank that held it")
        return range(parts[0], parts[1] + 1)


class _Search:
    """Chunks for the boxes that are wanted of each tensor, and how many elements are still missing."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._missing = {name: sum(math.prod(sizes) for _, sizes in boxes) for name, boxes in wanted.items()}
        self._found: dict[str, dict[Chunk, list[Box | None]]] = {name: {} for name in wanted}  # of each box wanted

    def take(self, name: str, chunks: Mapping[Chunk, None] | Chunks) -> None:
        """Keep those of the chunks that hold something of the boxes wanted; one that is known counts once."""
        if (found := self._found.get(name)) is None:
            return
        for chunk in chunks:
            shared = [overlap(chunk.box, box) for box in self._wanted[name]]
            if any(shared) and chunk not in found:
                found[chunk] = shared
                self._missing[name] -= sum(math.prod(box[1]) for box in shared if box)

    def misses(self, name: str) -> bool:
        """Return whether some of the tensor's elements have not been found."""
        return self._missing[name] > 0

    def finish(self) -> dict[str, Chunks]:
        """Return what was found. Raises Refused where a box is not covered, or not exactly once."""
        for name, boxes in self._wanted.items():
            for number, box in enumerate(boxes):
                held = [shared[number] for shared in self._found[name].values()]
                check_cover(name, box, [one for one in held if one])
        return {name: tuple(chunks) for name, chunks in self._found.items()}


def _outward(parts: range, near: int) -> Iterator[int]:
    """Yield the numbers in `parts` by their distance to `near`, without listing them all."""
    if not parts:
        return
    up = min(max(near, parts.start), parts.stop - 1)
    down = up - 1
    while up < parts.stop or down >= parts.start:
        if up < parts.stop:
            yield up
        if down >= parts.start:
            yield down
        up, down = up + 1, down - 1


def _chunks(name: str, entry: Any, shape: tuple[int, ...], files: Mapping[str, FileEntry]) -> Chunks:
    return tuple(_chunk(name, chunk, shape, files) for chunk in typed(entry, "chunks", list))


def _chunk(name: str, entry: Any, shape: tuple[int, ...], files: Mapping[str, FileEntry]) -> Chunk:
    offsets = numbers(typed(entry, "offsets", list), f"{name}: offsets")
    sizes = numbers(typed(entry, "sizes", list), f"{name}: sizes")
    if not len(offsets) == len(sizes) == len(shape):
        raise Refused(f"{name}: a chunk has another number of dimensions than the tensor")
    if any(offset + size > length for offset, size, length in zip(offsets, sizes, shape, strict=True)):
        raise Refused(f"{name}: a chunk reaches outside of the tensor")
    file = typed(entry, "file", str)
    if file not in files or not file.endswith(".safetensors"):
        raise Refused(f"{name}: {file!r} is not among the shards")
    return Chunk(offsets, sizes, file, typed(entry, "key", str))


def _check_files_hold_chunks(
    files: Mapping[str, FileEntry], kinds: Mapping[str, TensorKind], found: Mapping[str, Chunks]
) -> None:
    """Raise where chunks need more bytes than their file has, so that no shape can claim memory that no file backs."""
    needed: dict[str, int] = {}
    for name, chunks in found.items():
        for chunk in chunks:
            size = math.prod(chunk.sizes) * DTYPES[kinds[name].dtype][1]
            needed[chunk.file] = needed.get(chunk.file, 0) + size
    for file, size in needed.items():
        if size > files[file].bytes:
            raise Refused(f"{file}: {size} bytes of tensors in a file of {files[file].bytes} bytes")
