"""The manifest of a checkpoint: the step, the files with digests, and what the run adds.

`manifest.json` is written last and makes a checkpoint complete. It is plain JSON and small: it lists the files, up to
three for each rank that saved.

    {"format": "paceline-checkpoint", "version": 2, "sha256": HEX, "body": {
        "step": 100, "sequence": 3, "created": "2026-01-31T12:00:00+00:00", "world_size": 2,
        "files": {"shard-00000-of-00002.safetensors": {"bytes": 1234, "sha256": HEX}, ..., "tensors.json": {...}},
        "extra": {...}}}

Its `sha256` is the digest of the body in canonical form (keys sorted, no spaces, ASCII). `sequence` counts the
checkpoints of a folder in the order of their publication: a run that went back to an earlier step continues it, so the
newest checkpoint is the one with the highest sequence, not the highest step. Which tensors the files hold is told by
the index (index.py). Version 1 had the whole index in `tensors.json`; it is still read.

Above INLINE_RANKS ranks that saved, files are listed in `files-00000.json` and so on, each for at most MOST_IN_A_LIST
ranks: a rank that loads reads the list or two that it needs, and nothing of the size of the world. That is version 3.
Its manifest lists the table and the lists alone, and says `"ranks_in_a_list": 32`.

Where there are more than MOST_IN_A_LIST such lists, lists of lists have them, `lists-1-00000.json` and so on, and the
manifest has the uppermost ones alone: of 16,384 ranks 16, each of 32 lists of 32 ranks. That is version 6; its manifest
says `"lists_in_a_list": 32` as well.

A long file's digest is that of its pieces' digests (files/pieces.py); its entry then says `"piece_bytes": 4194304`, and
`"piece_digest": "blake3"` where those are of BLAKE3. A checkpoint with such a file is of version 4, with lists or
without, and of version 5 with BLAKE3; version 6 may have either.

What is read is never trusted: anything wrong is a StorageError.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.digests import KINDS, SHA256
from paceline.checkpoint.untrusted import Refused, content, count, digest, refusal, table, typed

MANIFEST_NAME = "manifest.json"
TABLE_NAME = "tensors.json"
FORMAT = "paceline-checkpoint"
VERSION = 2
VERSION_OF_LISTS = 3
VERSION_OF_PIECES = 4
VERSION_OF_BLAKE3 = 5
VERSION_OF_LISTS_OF_LISTS = 6
READABLE = (1, VERSION, VERSION_OF_LISTS, VERSION_OF_PIECES, VERSION_OF_BLAKE3, VERSION_OF_LISTS_OF_LISTS)
PIECES = range(2**8, 2**30 + 1)  # the lengths of pieces that are read
INLINE_RANKS = 64  # of a world whose files the manifest itself lists
MOST_IN_A_LIST = 32  # ranks whose files are in one list, and lists in a list of lists

_FILE_NAME = re.compile(r"shard-([0-9]{5,})-of-([0-9]{5,})(\.(safetensors|json)|-unchanged\.safetensors)")
_LIST_NAME = re.compile(r"(?:files|lists-([1-9]))-([0-9]{5,})\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its length and digest, which is of its pieces' digests where these have a length."""

    bytes: int
    sha256: str
    piece_bytes: int = 0
    piece_digest: str = SHA256


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself; `extra` is the caller's JSON. `read_index` says which tensors it holds.

    `files` may be read as they are asked for: asking may then raise StorageError.
    """

    step: int
    sequence: int
    created: str
    world_size: int
    files: Mapping[str, FileEntry]
    extra: Mapping[str, Any]

    @property
    def total_bytes(self) -> int:
        """Return the length of all files but the manifest."""
        return sum(entry.bytes for entry in self.files.values())

    def lists(self) -> Iterator[str]:
        """Yield the names of all lists of files; a list of lists comes before the lists in it."""
        return self.files.lists() if isinstance(self.files, ListedFiles) else iter(())

    def share(self, rank: int, size: int) -> dict[str, FileEntry]:
        """Return the files that one of `size` ranks checks for all: about as many each, together all but some lists.

        A list that stands in a list of lists is nobody's: who looks up a file in it holds it against its digest.
        """
        if not isinstance(self.files, ListedFiles):
            return {name: self.files[name] for name in sorted(self.files) if self._checker(name, size) == rank}
        saved = range(rank * self.world_size // size, (rank + 1) * self.world_size // size)
        share = dict(self.files.own) if rank == 0 else {}
        for other in saved:
            for name in files_of(other, self.world_size):
                if name in self.files:
                    share[name] = self.files[name]
        return share

    def _checker(self, name: str, size: int) -> int:
        """Return which of `size` ranks checks a file: who is where its writer was, and the first one the table."""
        match = _FILE_NAME.fullmatch(name)
        return min(size - 1, ((int(match[1]) + 1) * size - 1) // max(1, self.world_size)) if match else 0


class ListedFiles(Mapping[str, FileEntry]):
    """The files of a checkpoint whose manifest names lists of them: a list is read when one of its files is asked for.

    `own` are those that the manifest has itself. Raises StorageError where a list is not as it was written.
    """

    def __init__(self, path: Path, own: Mapping[str, FileEntry], world_size: int, ranks: int, lists: int = 0) -> None:
        """`ranks` have their files in one list; `lists` are in a list of lists, 0 where the manifest has them all."""
        self.path, self.own, self.world_size = path, own, world_size
        self._ranks, self._lists, self._counts = ranks, lists, list_counts(world_size, ranks, lists)
        self._read: dict[tuple[int, int], dict[str, FileEntry]] = {}

    def __getitem__(self, name: str) -> FileEntry:
        if match := _FILE_NAME.fullmatch(name):
            return self._list(0, int(match[1]) // self._ranks)[name]
        match = _LIST_NAME.fullmatch(name)
        if match is None or name in self.own or not self._lists:
            return self.own[name]
        return self._list(int(match[1] or 0) + 1, int(match[2]) // self._lists)[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        for level in reversed(range(len(self._counts))):
            yield from self._in_lists(level)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def bytes_read(self) -> int:
        """The length of the lists that have been read."""
        return sum(self[list_name(number, level)].bytes for level, number in [*self._read])

    def lists(self) -> Iterator[str]:
        """Yield the names of all lists. One of lists is read once all of those beside it have been yielded."""
        yield from sorted(name for name in self.own if _LIST_NAME.fullmatch(name))
        for level in reversed(range(1, len(self._counts))):
            yield from self._in_lists(level)

    def _in_lists(self, level: int) -> Iterator[str]:
        for number in range(self._counts[level]):
            yield from self._list(level, number)

    def _list(self, level: int, number: int) -> dict[str, FileEntry]:
        at = level, number
        if at not in self._read and level < len(self._counts) and number < self._counts[level]:
            name = list_name(number, level)
            with refusal(self.path, name):
                self._read[at] = self._checked(name, level, number)
        return self._read.get(at, {})

    def _checked(self, name: str, level: int, number: int) -> dict[str, FileEntry]:
        above = self.own if level + 1 == len(self._counts) else self._list(level + 1, number // self._lists)
        if name not in above:
            raise Refused("no list above it has it, nor has the manifest")
        read = content(self.path / name)
        if hashlib.sha256(read).hexdigest() != above[name].sha256:
            raise Refused("its sha256 is not the one told of it, so its content changed after it was written")
        files = {file: _file(file, entry) for file, entry in table(json.loads(read)).items()}
        for file in files:
            if not (self._is_of_list(file, level, number) if level else self._is_of_ranks(file, number)):
                raise Refused(f"{file!r} is not of its {'lists' if level else 'ranks'}")
        return files

    def _is_of_ranks(self, file: str, number: int) -> bool:
        match = _FILE_NAME.fullmatch(file)
        return match is not None and int(match[2]) == self.world_size and int(match[1]) // self._ranks == number

    def _is_of_list(self, file: str, level: int, number: int) -> bool:
        below = range(number * self._lists, min((number + 1) * self._lists, self._counts[level - 1]))
        match = _LIST_NAME.fullmatch(file)
        return match is not None and int(match[2]) in below and file == list_name(int(match[2]), level - 1)


def list_name(number: int, level: int = 0) -> str:
    """Return the name of a list of ranks' files (level 0), or of lists of the level below."""
    return f"lists-{level}-{number:05d}.json" if level else f"files-{number:05d}.json"


def files_of(rank: int, world_size: int) -> tuple[str, str, str]:
    """Return the names of a rank's shard, of its part of the index, and of the file of what has not changed."""
    return shard_name(rank, world_size), part_name(rank, world_size), unchanged_name(rank, world_size)


def shard_name(rank: int, world_size: int) -> str:
    """Return the name of the file that holds the tensors' values which a rank wrote."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def unchanged_name(rank: int, world_size: int) -> str:
    """Return the name of the file with those values of a rank that the checkpoint before had too."""
    return f"shard-{rank:05d}-of-{world_size:05d}-unchanged.safetensors"


def part_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's part of the index."""
    return f"shard-{rank:05d}-of-{world_size:05d}.json"


def ranks_in_a_list(world_size: int) -> int:
    """Return how many ranks have their files in one list: 16 of 256; 0 where the manifest itself lists all."""
    return min(MOST_IN_A_LIST, math.isqrt(world_size - 1) + 1) if world_size > INLINE_RANKS else 0


def lists_in_a_list(world_size: int) -> int:
    """Return how many lists are in a list of lists; 0 where the manifest has them all."""
    ranks = ranks_in_a_list(world_size)
    return MOST_IN_A_LIST if ranks and world_size > ranks * MOST_IN_A_LIST else 0


def list_counts(world_size: int, ranks: int, lists: int) -> tuple[int, ...]:
    """Return how many lists there are of ranks' files, of such lists, and so on, up to those that the manifest has.

    Example: (512, 16) of 16,384 ranks with 32 `ranks` in a list and 32 `lists` in one of lists.
    """
    counts = [-(-world_size // ranks)]
    while lists and counts[-1] > lists:
        counts.append(-(-counts[-1] // lists))
    return tuple(counts)


def encode_list(files: Mapping[str, FileEntry]) -> bytes:
    """Return what a list of files holds."""
    return json.dumps(_plain(files), separators=(",", ":")).encode()


def version_of(files: Iterable[FileEntry]) -> int:
    """Return the version of a checkpoint with such files: of releases that know their digests."""
    kinds = {entry.piece_digest for entry in files if entry.piece_bytes}
    return VERSION_OF_BLAKE3 if kinds - {SHA256} else VERSION_OF_PIECES if kinds else VERSION


def encode_manifest(manifest: Manifest, of_listed: int = VERSION) -> bytes:
    """Return what manifest.json holds, of whose files some may be lists of others.

    `of_listed` is the version that the lists' files take. Raises ValueError or TypeError where `extra` is not JSON (NaN
    included).
    """
    of_a_list, of_lists = ranks_in_a_list(manifest.world_size), lists_in_a_list(manifest.world_size)
    more = {"ranks_in_a_list": of_a_list} if of_a_list else {}
    more |= {"lists_in_a_list": of_lists} if of_lists else {}
    of_list = VERSION_OF_LISTS_OF_LISTS if of_lists else VERSION_OF_LISTS if of_a_list else VERSION
    version = max(of_listed, version_of(manifest.files.values()), of_list)
    body = {
        "step": manifest.step, "sequence": manifest.sequence, "created": manifest.created,
        "world_size": manifest.world_size, **more, "files": _plain(manifest.files), "extra": manifest.extra,
    }  # fmt: skip
    document = {"format": FORMAT, "version": version, "sha256": digest(body), "body": body}
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _plain(files: Mapping[str, FileEntry]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, entry in files.items():
        of_pieces = {"piece_bytes": entry.piece_bytes} if entry.piece_bytes else {}
        kind = {"piece_digest": entry.piece_digest} if entry.piece_digest != SHA256 else {}
        found[name] = {"bytes": entry.bytes, "sha256": entry.sha256, **of_pieces, **kind}
    return found


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint folder `path`. Raises StorageError where it is missing, cut or altered."""
    with refusal(path, MANIFEST_NAME):
        return _decode(json.loads(content(path / MANIFEST_NAME)), path)


def _decode(document: Any, path: Path) -> Manifest:
    """Return the manifest in a parsed document; every field is checked before it is used."""
    if table(document).get("format") != FORMAT:
        raise Refused(f"it does not say format {FORMAT!r}")
    if document.get("version") not in READABLE:
        raise Refused(f"version {document.get('version')!r} is none of {READABLE}, which this release reads")
    body = typed(document, "body", dict)
    if document.get("sha256") != digest(body):
        raise Refused("its content does not match its digest: it was altered or damaged")
    files: Mapping[str, FileEntry] = {name: _file(name, entry) for name, entry in typed(body, "files", dict).items()}
    if document["version"] == VERSION_OF_LISTS or "ranks_in_a_list" in body:
        ranks, world_size = count(body, "ranks_in_a_list"), count(body, "world_size")
        lists = count(body, "lists_in_a_list") if "lists_in_a_list" in body else 0
        if not 0 < ranks <= world_size or lists == 1:
            raise Refused(f"{ranks} ranks in a list, of {world_size}, and {lists} lists in one of lists")
        files = ListedFiles(path, files, world_size, ranks, lists)
    return Manifest(
        step=count(body, "step"),
        sequence=count(body, "sequence"),
        created=typed(body, "created", str),
        world_size=count(body, "world_size"),
        files=files,
        extra=typed(body, "extra", dict),
    )


def _file(name: str, entry: Any) -> FileEntry:
    if name != TABLE_NAME and not _FILE_NAME.fullmatch(name) and not _LIST_NAME.fullmatch(name):
        raise Refused(f"{name!r} is not the name of a shard")
    sha256 = typed(entry, "sha256", str)
    if not _DIGEST.fullmatch(sha256):
        raise Refused(f"{name}: its sha256 is not one")
    piece_bytes = count(entry, "piece_bytes") if "piece_bytes" in entry else 0
    if piece_bytes and piece_bytes not in PIECES:
        raise Refused(f"{name}: pieces of {piece_bytes} bytes")
    kind = typed(entry, "piece_digest", str) if "piece_digest" in entry else SHA256
    if kind not in KINDS or (kind != SHA256 and not piece_bytes):
        raise Refused(f"{name}: digests of kind {kind!r} of pieces of {piece_bytes} bytes")
    return FileEntry(count(entry, "bytes"), sha256, piece_bytes, kind)
