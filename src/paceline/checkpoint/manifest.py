"""The manifest of a checkpoint: its step, its files with their digests, and what the run adds.

`manifest.json` is written last and makes a checkpoint complete. It is plain JSON and small: it grows with the number of
files, up to three for each rank that saved, and with nothing else.

    {"format": "paceline-checkpoint", "version": 2, "sha256": HEX, "body": {
        "step": 100, "sequence": 3, "created": "2026-01-31T12:00:00+00:00", "world_size": 2,
        "files": {"shard-00000-of-00002.safetensors": {"bytes": 1234, "sha256": HEX}, ..., "tensors.json": {...}},
        "extra": {...}}}

Its `sha256` is the digest of the body in canonical form (keys sorted, no spaces, ASCII). `sequence` counts the
checkpoints of a folder in the order of their publication: a run that went back to an earlier step continues it, so the
newest checkpoint is the one with the highest sequence, not the highest step. Which tensors the files hold is told by
the index (index.py). Version 1 had the whole index in `tensors.json`; it is still read.

What is read is never trusted: anything wrong is a StorageError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.untrusted import Refused, content, count, digest, refusal, table, typed

MANIFEST_NAME = "manifest.json"
TABLE_NAME = "tensors.json"
FORMAT = "paceline-checkpoint"
VERSION = 2
READABLE = (1, VERSION)

_FILE_NAME = re.compile(r"shard-[0-9]{5,}-of-[0-9]{5,}(\.(safetensors|json)|-unchanged\.safetensors)")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its length and digest."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself; `extra` is the caller's JSON. `read_index` says which tensors it holds."""

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


def shard_name(rank: int, world_size: int) -> str:
    """Return the name of the file that holds the tensors' values which a rank wrote."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def unchanged_name(rank: int, world_size: int) -> str:
    """Return the name of the file with those values of a rank that the checkpoint before had too."""
    return f"shard-{rank:05d}-of-{world_size:05d}-unchanged.safetensors"


def part_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's part of the index."""
    return f"shard-{rank:05d}-of-{world_size:05d}.json"


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of manifest.json. Raises ValueError or TypeError where `extra` is not JSON (NaN included)."""
    body = asdict(manifest)
    document = {"format": FORMAT, "version": VERSION, "sha256": digest(body), "body": body}
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint folder `path`. Raises StorageError where it is missing, cut or altered."""
    with refusal(path, MANIFEST_NAME):
        return _decode(json.loads(content(path / MANIFEST_NAME)))


def _decode(document: Any) -> Manifest:
    """Return the manifest in a parsed document; every field is checked before it is used."""
    if table(document).get("format") != FORMAT:
        raise Refused(f"it does not say format {FORMAT!r}")
    if document.get("version") not in READABLE:
        raise Refused(f"version {document.get('version')!r} is none of {READABLE}, which this release reads")
    body = typed(document, "body", dict)
    if document.get("sha256") != digest(body):
        raise Refused("its content does not match its digest: it was altered or damaged")
    files = {name: _file(name, entry) for name, entry in typed(body, "files", dict).items()}
    return Manifest(
        step=count(body, "step"),
        sequence=count(body, "sequence"),
        created=typed(body, "created", str),
        world_size=count(body, "world_size"),
        files=files,
        extra=typed(body, "extra", dict),
    )


def _file(name: str, entry: Any) -> FileEntry:
    if name != TABLE_NAME and not _FILE_NAME.fullmatch(name):
        raise Refused(f"{name!r} is not the name of a shard")
    sha256 = typed(entry, "sha256", str)
    if not _DIGEST.fullmatch(sha256):
        raise Refused(f"{name}: its sha256 is not one")
    return FileEntry(count(entry, "bytes"), sha256)
