"""The manifest of a checkpoint and its index: which bytes of which file hold which part of which tensor.

`manifest.json` is written last and makes a checkpoint complete. It is plain JSON and small:

    {"format": "paceline-checkpoint", "version": 1, "sha256": HEX, "body": {
        "step": 100, "sequence": 3, "created": "2026-01-31T12:00:00+00:00", "world_size": 2,
        "files": {"shard-00000-of-00002.safetensors": {"bytes": 1234, "sha256": HEX}, ..., "tensors.json": {...}},
        "extra": {...}}}

Its `sha256` is the digest of the body in canonical form (keys sorted, no spaces, ASCII). `sequence` counts the
checkpoints of a folder in the order of their publication: a run that went back to an earlier step continues it, so the
newest checkpoint is the one with the highest sequence, not the highest step. `tensors.json` is the index, one of the
files whose digest the manifest holds:

    {NAME: {"dtype": "float32", "shape": [7, 3], "fingerprint": "2f6a01c94be8d7e3", "chunks": [
        {"offsets": [0, 0], "sizes": [4, 3], "file": "shard-...", "key": NAME_IN_FILE}, ...]}, ...}

The fingerprint (fingerprint.py) is that of the live tensor's values before they were written, on whatever layout.

What is read is never trusted: names, sizes, offsets and the cover of each tensor by its chunks are checked, and
anything wrong is a StorageError.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import StorageError

MANIFEST_NAME = "manifest.json"
INDEX_NAME = "tensors.json"
FORMAT = "paceline-checkpoint"
VERSION = 1
MAX_JSON_BYTES = 2**30
MAX_DIMENSIONS = 64

# torch's name of a dtype -> (its name in a safetensors header, bytes per element). There is none for complex128: files
# hold its real and imaginary parts as a last dimension of two, and the index says what they are.
DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1), "uint8": ("U8", 1),
    "complex128": ("F64", 16), "complex64": ("C64", 8),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "bool": ("BOOL", 1),
}  # fmt: skip

IN_PARTS = ("complex128",)

_SHARD_NAME = re.compile(r"shard-[0-9]{5}-of-[0-9]{5}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class FileEntry:
    """One safetensors file: its length and digest."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor, stored under `key` in `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: dtype by torch's name, global shape, and the chunks that cover it exactly once.

    The fingerprint is empty where an earlier release saved it, or where ranks held different copies.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    fingerprint: str = ""


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


Index = Mapping[str, TensorEntry]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of manifest.json. Raises ValueError or TypeError where `extra` is not JSON (NaN included)."""
    body = asdict(manifest)
    document = {"format": FORMAT, "version": VERSION, "sha256": _digest(body), "body": body}
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def encode_index(index: Index) -> bytes:
    """Return the content of tensors.json."""
    table = {
        name: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            **({"fingerprint": entry.fingerprint} if entry.fingerprint else {}),
            "chunks": [vars(chunk) for chunk in entry.chunks],
        }
        for name, entry in index.items()
    }
    return json.dumps(table, separators=(",", ":")).encode()


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint folder `path`. Raises StorageError where it is missing, cut or altered."""
    with _refusal(path, MANIFEST_NAME):
        return _decode(json.loads(_content(path / MANIFEST_NAME)))


def read_index(path: Path, manifest: Manifest) -> Index:
    """Return the tensors in the checkpoint `path` by name. Raises StorageError where the index is not as written."""
    with _refusal(path, INDEX_NAME):
        content = _content(path / INDEX_NAME)
        if INDEX_NAME not in manifest.files:
            raise _Refused("the manifest does not list it")
        if hashlib.sha256(content).hexdigest() != manifest.files[INDEX_NAME].sha256:
            raise _Refused("its sha256 is not the manifest's, so its content changed after it was written")
        index = {name: _tensor(name, entry, manifest.files) for name, entry in _table(json.loads(content)).items()}
        _check_files_hold_chunks(manifest.files, index)
        return index


def stored_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a tensor in a file, whose own is `shape`."""
    return (*shape, 2) if dtype in IN_PARTS else tuple(shape)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes per element of a dtype in DTYPES."""
    return DTYPES[dtype][1]


class _Refused(ValueError):
    """The manifest says something that cannot be."""


@contextmanager
def _refusal(path: Path, name: str) -> Iterator[None]:
    """Turn whatever reading and checking the file raises into a StorageError about the checkpoint."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        missing = isinstance(error, FileNotFoundError)
        because = f"{name} is missing, so the save was never completed" if missing else f"{name}: {error}"
        raise StorageError(f"{path} is not a complete checkpoint", because, "use an earlier checkpoint") from error


def _content(file: Path) -> bytes:
    if file.stat().st_size > MAX_JSON_BYTES:
        raise _Refused(f"it is larger than {MAX_JSON_BYTES} bytes")
    return file.read_bytes()


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def _decode(document: Any) -> Manifest:
    """Return the manifest in a parsed document; every field is checked before it is used."""
    if _table(document).get("format") != FORMAT:
        raise _Refused(f"it does not say format {FORMAT!r}")
    if document.get("version") != VERSION:
        raise _Refused(f"version {document.get('version')!r} is not {VERSION}, the one this release reads")
    body = _typed(document, "body", dict)
    if document.get("sha256") != _digest(body):
        raise _Refused("its content does not match its digest: it was altered or damaged")
    files = {name: _file(name, entry) for name, entry in _typed(body, "files", dict).items()}
    return Manifest(
        step=_count(body, "step"),
        sequence=_count(body, "sequence"),
        created=_typed(body, "created", str),
        world_size=_count(body, "world_size"),
        files=files,
        extra=_typed(body, "extra", dict),
    )


def _table(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise _Refused(f"it is a {type(document).__name__}, not a table")
    return document


def _typed(holder: Any, key: str, kind: type) -> Any:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, kind):
        raise _Refused(f"'{key}' is not a {kind.__name__}")
    return value


def _count(holder: Any, key: str) -> int:
    return _numbers([_typed(holder, key, int)], key)[0]


def _numbers(values: list[Any], what: str) -> tuple[int, ...]:
    """Return the list as a tuple of whole numbers from 0 to 2^63 - 1."""
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise _Refused(f"{what}: {value!r} is not a count")
    return tuple(values)


def _file(name: str, entry: Any) -> FileEntry:
    if name != INDEX_NAME and not _SHARD_NAME.fullmatch(name):
        raise _Refused(f"{name!r} is not the name of a shard")
    digest = _typed(entry, "sha256", str)
    if not _DIGEST.fullmatch(digest):
        raise _Refused(f"{name}: its sha256 is not one")
    return FileEntry(_count(entry, "bytes"), digest)


def _tensor(name: str, entry: Any, files: Mapping[str, FileEntry]) -> TensorEntry:
    dtype = _typed(entry, "dtype", str)
    if dtype not in DTYPES:
        raise _Refused(f"{name}: unknown dtype {dtype!r}")
    shape = _numbers(_typed(entry, "shape", list), f"{name}: shape")
    if len(shape) > MAX_DIMENSIONS:
        raise _Refused(f"{name}: {len(shape)} dimensions")
    chunks = tuple(_chunk(name, chunk, shape, files) for chunk in _typed(entry, "chunks", list))
    _check_cover(name, shape, chunks)
    fingerprint = _typed(entry, "fingerprint", str) if "fingerprint" in entry else ""
    if fingerprint and not _FINGERPRINT.fullmatch(fingerprint):
        raise _Refused(f"{name}: its fingerprint is not one")
    return TensorEntry(dtype, shape, chunks, fingerprint)


def _chunk(name: str, entry: Any, shape: tuple[int, ...], files: Mapping[str, FileEntry]) -> Chunk:
    offsets = _numbers(_typed(entry, "offsets", list), f"{name}: offsets")
    sizes = _numbers(_typed(entry, "sizes", list), f"{name}: sizes")
    if not len(offsets) == len(sizes) == len(shape):
        raise _Refused(f"{name}: a chunk has another number of dimensions than the tensor")
    if any(offset + size > length for offset, size, length in zip(offsets, sizes, shape, strict=True)):
        raise _Refused(f"{name}: a chunk reaches outside of the tensor")
    file = _typed(entry, "file", str)
    if file not in files or file == INDEX_NAME:
        raise _Refused(f"{name}: {file!r} is not among the shards")
    return Chunk(offsets, sizes, file, _typed(entry, "key", str))


def _check_cover(name: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> None:
    """Raise unless the chunks cover the tensor exactly once: volumes add up and no two overlap.

    A sweep along the longest dimension, so that shards along one dimension cost n log n.
    """
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise _Refused(f"{name}: its chunks do not add up to the tensor")
    if not shape:
        return
    along = max(range(len(shape)), key=lambda dimension: shape[dimension])
    open_ends: list[tuple[int, int]] = []
    filled = [index for index, chunk in enumerate(chunks) if math.prod(chunk.sizes)]
    for index in sorted(filled, key=lambda index: chunks[index].offsets[along]):
        chunk = chunks[index]
        del open_ends[: bisect_right(open_ends, (chunk.offsets[along], len(chunks)))]
        if any(_overlap(chunk, chunks[other]) for _, other in open_ends):
            raise _Refused(f"{name}: two chunks overlap")
        insort(open_ends, (chunk.offsets[along] + chunk.sizes[along], index))


def _overlap(one: Chunk, two: Chunk) -> bool:
    pairs = zip(one.offsets, one.sizes, two.offsets, two.sizes, strict=True)
    return all(start < other + length and other < start + size for start, size, other, length in pairs)


def _check_files_hold_chunks(files: Mapping[str, FileEntry], index: Index) -> None:
    """Raise where chunks need more bytes than their file has, so that no shape can claim memory that no file backs."""
    needed = dict.fromkeys(files, 0)
    for entry in index.values():
        for chunk in entry.chunks:
            needed[chunk.file] += math.prod(chunk.sizes) * dtype_bytes(entry.dtype)
    for name, size in needed.items():
        if size > files[name].bytes:
            raise _Refused(f"{name}: {size} bytes of tensors in a file of {files[name].bytes} bytes")
