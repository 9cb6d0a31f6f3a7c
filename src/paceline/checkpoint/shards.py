"""Safetensors files, read slice by slice and written piece by piece.

Of a tensor on a device no more than a few PIECE_BYTES are on the host at once while it is written.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the header's length, little endian; a JSON header
{name: {"dtype", "shape", "data_offsets": [begin, end]}}, padded with spaces to a multiple of 8; then the data,
without gaps. Tensors are laid out by descending element size, which keeps each of them aligned.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.files.flushes import Flushes
from paceline.checkpoint.files.pieces import compare_in_pieces, write_in_pieces
from paceline.checkpoint.files.threads import Hands
from paceline.checkpoint.manifest import FileEntry
from paceline.errors import StorageError

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
PIECE_BYTES = 32 * 2**20
OVERLAP_BYTES = 2**20  # below, handing a piece to the hashing thread costs more than it saves


class Chunk(NamedTuple):
    """A rectangular part of a tensor, stored under `key` in `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str

    @property
    def box(self) -> Box:
        """Return where the part lies in the whole."""
        return self.offsets, self.sizes


@dataclass(frozen=True)
class TensorToWrite:
    """One tensor to write; `load` is called when its turn comes and its result is dropped after."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        """Return the length of the tensor's data."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "float32"; the caller checks that DTYPES has it."""
    return str(dtype).removeprefix("torch.")


def stored_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a tensor in a file, whose own is `shape`."""
    return (*shape, 2) if dtype in IN_PARTS else tuple(shape)


def write_shard(path: Path, entries: Sequence[TensorToWrite], flushes: Flushes) -> FileEntry:
    """Write a shard of a checkpoint and return its length and digest; the disk has it when the flushes are made.

    Raises OSError.
    """
    expected = sum(entry.bytes for entry in entries)
    return write_in_pieces(path, _content(_in_order(entries)), flushes, expected)


def compare_shard(path: Path, entries: Sequence[TensorToWrite]) -> None:
    """Raise StorageError where a shard, as its disk gives it back, is not what `write_shard` wrote of these entries.

    And where it is, but a load could not read it. Raises OSError where it cannot be read at all.
    """
    ordered = _in_order(entries)
    compare_in_pieces(path, _content(ordered))
    _check_readable(path, ordered)


def _content(ordered: Sequence[TensorToWrite]) -> Iterator[memoryview]:
    return chain([memoryview(_header(ordered, None))], _pieces_of(ordered))


def _check_readable(path: Path, entries: Sequence[TensorToWrite]) -> None:
    """Raise StorageError where a load would not find every tensor in a shard: safetensors reserves some names."""
    try:
        with safe_open(path, framework="pt") as opened:
            for entry in entries:
                stored = opened.get_slice(entry.key)
                if tuple(stored.get_shape()) != stored_shape(entry.dtype, entry.shape):
                    raise SafetensorError(f"'{entry.key}' has another shape there")
    except (SafetensorError, UnicodeError) as error:
        raise StorageError(
            f"{path} holds every byte and cannot be read by safetensors",
            str(error),
            "give tensors names of plain text other than '__metadata__', and fewer of them to a rank",
        ) from error


def write_plain(path: Path, entries: Sequence[TensorToWrite], metadata: dict[str, str]) -> FileEntry:
    """Write a safetensors file for others to read, flushed to disk; return its length and the sha256 of its bytes.

    No more of the tensors is in memory than the one whose turn it is. A second thread hashes the very bytes that are
    written. Raises OSError.
    """
    ordered = _in_order(entries)
    digest = hashlib.sha256()
    with path.open("xb") as file, Hands(1, "digest") as hashing:
        for piece in chain([memoryview(_header(ordered, metadata))], _pieces_of(ordered)):
            if len(piece) < OVERLAP_BYTES:
                digest.update(piece)
                file.write(piece)
                continue
            hashed = hashing.submit(digest.update, piece)
            file.write(piece)
            hashed.result()
        file.flush()
        os.fsync(file.fileno())
        return FileEntry(file.tell(), digest.hexdigest())


def write_file(path: Path, content: bytes, flushes: Flushes) -> FileEntry:
    """Write a new file and return its length and digest; the disk has it when the flushes are made. Raises OSError."""
    file = path.open("xb")
    flushes.add(file)
    file.write(content)
    file.flush()
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())


def _in_order(entries: Sequence[TensorToWrite]) -> list[TensorToWrite]:
    ordered = sorted(entries, key=lambda entry: (-DTYPES[entry.dtype][1], entry.key))
    assert len({entry.key for entry in ordered}) == len(ordered), "keys repeat"
    return ordered


def _header(ordered: Sequence[TensorToWrite], metadata: dict[str, str] | None) -> bytes:
    table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for entry in ordered:
        end = begin + entry.bytes
        shape = stored_shape(entry.dtype, entry.shape)
        table[entry.key] = {"dtype": DTYPES[entry.dtype][0], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces_of(entries: Iterable[TensorToWrite]) -> Iterator[memoryview]:
    for entry in entries:
        yield from _pieces(entry)


def _pieces(entry: TensorToWrite) -> Iterator[memoryview]:
    """Yield the tensor's bytes in order, from the host's memory, at most PIECE_BYTES at a time."""
    tensor = entry.load().detach()
    assert dtype_name(tensor.dtype) == entry.dtype, f"{entry.key}: {tensor.dtype} is not {entry.dtype}"
    assert tuple(tensor.shape) == entry.shape, f"{entry.key}: {tuple(tensor.shape)} is not {entry.shape}"
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    if not tensor.is_contiguous():
        tensor = tensor.cpu().contiguous()  # on the host, where a second copy is cheaper than on the device
    flat = tensor.reshape(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), PIECE_BYTES):
        yield flat[begin : begin + PIECE_BYTES].cpu().numpy().data


class ShardReader:
    """Reads parts of the tensors in a checkpoint's shards. Files stay mapped, not open, until it is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shards: dict[str, Any] = {}

    def read(self, chunk: Chunk, dtype: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Return the part of a chunk that begins at `offsets` and has the shape `lengths`.

        It may be a view of the mapped file: copy it. Raises StorageError naming the file where that does not hold
        what the manifest says.
        """
        try:
            if chunk.file not in self._shards:
                self._shards[chunk.file] = safe_open(self.path / chunk.file, framework="pt")
            stored = self._shards[chunk.file].get_slice(chunk.key)
            found = (stored.get_dtype(), tuple(stored.get_shape()))
            if found != (DTYPES[dtype][0], stored_shape(dtype, chunk.sizes)):
                raise self._error(chunk, f"it holds {found[0]}{list(found[1])}, not {dtype}{list(chunk.sizes)}")
            if tuple(lengths) == chunk.sizes:
                part = self._shards[chunk.file].get_tensor(chunk.key)
            else:
                part = stored[tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))]
            # A file's numbers lie at multiples of 8 bytes, and torch's complex ones must at multiples of 16.
            return torch.view_as_complex(part.clone()) if dtype in IN_PARTS else part
        except (OSError, SafetensorError) as error:
            raise self._error(chunk, str(error)) from error

    def _error(self, chunk: Chunk, because: str) -> StorageError:
        return StorageError(
            f"cannot read '{chunk.key}' from {self.path / chunk.file}", because, "use an earlier checkpoint"
        )
