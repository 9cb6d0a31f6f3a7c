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

Above INLINE_RANKS ranks that saved, files are listed in `files-00000.json` and so on, each for about as many ranks as
there are lists: a rank that loads reads the list or two that it needs, and nothing of the size of the world. That is
version 3. Its manifest lists the table and the lists alone, and says `"ranks_in_a_list": 128`.

A long file's digest is that of its pieces' digests (files/pieces.py); its entry then says `"piece_bytes": 4194304`, and
`"piece_digest": "blake3"` where those are of BLAKE3. A checkpoint with such a file is of version 4, with lists or
without, and of version 5 with BLAKE3.

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
READABLE = (1, VERSION, VERSION_OF_LISTS, VERSION_OF_PIECES, VERSION_OF_BLAKE3)
PIECES = range(2**8, 2**30 + 1)  # the lengths of pieces that are read
INLINE_RANKS = 64  # of a world whose files the manifest itself lists

_FILE_NAME = re.compile(r"shard-([0-9]{5,})-of-([0-9]{5,})(\.(safetensors|json)|-unchanged\.safetensors)")
_LIST_NAME = re.compile(r"files-[0-9]{5,}\.json")
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

    @property
    def lists(self) -> tuple[str, ...]:
        """Return the names of the files that list others."""
        return tuple(self.files.own_lists) if isinstance(self.files, ListedFiles) else ()

    def share(self, rank: int, size: int) -> dict[str, FileEntry]:
        """Return the files that one of `size` ranks checks for all: about as many each, all of them together."""
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

    def __init__(self, path: Path, own: Mapping[str, FileEntry], ranks_in_a_list: int, world_size: int) -> None:
        self.path, self.own, self.world_size = path, own, world_size
        self.own_lists = sorted(name for name in own if _LIST_NAME.fullmatch(name))
        self._ranks, self._read = ranks_in_a_list, dict[int, dict[str, FileEntry]]()

    def __getitem__(self, name: str) -> FileEntry:
        match = _FILE_NAME.fullmatch(name)
        return self.own[name] if match is None else self._list(int(match[1]) // self._ranks)[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        for number in range(self._count):
            yield from self._list(number)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def lists_read(self) -> int:
        """How many lists have been read."""
        return len(self._read)

    @property
    def _count(self) -> int:
        return -(-self.world_size // self._ranks)

    def _list(self, number: int) -> dict[str, FileEntry]:
        if number not in self._read and 0 <= number < self._count:
            name = list_name(number)
            with refusal(self.path, name):
                self._read[number] = self._checked(name, number)
        return self._read.get(number, {})

    def _checked(self, name: str, number: int) -> dict[str, FileEntry]:
        if name not in self.own:
            raise Refused("the manifest does not list it")
        read = content(self.path / name)
        if hashlib.sha256(read).hexdigest() != self.own[name].sha256:
            raise Refused("its sha256 is not the manifest's, so its content changed after it was written")
        files = {file: _file(file, entry) for file, entry in table(json.loads(read)).items()}
        for file in files:
            match = _FILE_NAME.fullmatch(file)
            if match is None or int(match[2]) != self.world_size or int(match[1]) // self._ranks != number:
                raise Refused(f"{file!r} is not of its ranks")
        return files


def list_name(number: int) -> str:
    """Return the name of a list of files."""
    return f"files-{number:05d}.json"


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
    """Return how many ranks have their files in one list: 128 of 16,384; 0 where the manifest itself lists all."""
    return math.isqrt(world_size - 1) + 1 if world_size > INLINE_RANKS else 0


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
    of_a_list = ranks_in_a_list(manifest.world_size)
    more = {"ranks_in_a_list": of_a_list} if of_a_list else {}
    version = max(of_listed, version_of(manifest.files.values()), VERSION_OF_LISTS if of_a_list else VERSION)
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
        if not 0 < ranks <= world_size:
            raise Refused(f"{ranks} ranks in a list, of {world_size}")
        files = ListedFiles(path, files, ranks, world_size)
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
