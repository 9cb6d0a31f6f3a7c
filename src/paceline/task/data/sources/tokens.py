"""Token files: a flat file of tokens and a file of document offsets for each split, little-endian, mapped into memory.

`NAME.tokens` holds uint16 (vocabularies of at most 65,536) or uint32, every document followed by the end-of-document
token; `NAME.offsets` holds documents + 1 int64 positions, document d lying in offsets[d]..offsets[d + 1].
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from paceline.errors import DataError
from paceline.task.data.sources.tokenizer import Tokens
from paceline.task.data.storage.watch import WatchedFile

SPLITS = ("train", "validation")
HASH_BLOCK_BYTES = 2**20


class Split(Protocol):
    """The tokens of one split, wherever they lie. `digest` is a hash of what they are."""

    @property
    def name(self) -> str:
        """Which part of the data these tokens are: train or validation."""
        ...

    @property
    def tokens(self) -> int:
        """How many there are."""
        ...

    @property
    def documents(self) -> int:
        """How many documents the tokens make."""
        ...

    @property
    def digest(self) -> str:
        """A hash of the tokens."""
        ...

    def open(self) -> Any:
        """Return the tokens; slices of them are arrays."""
        ...

    def offsets(self) -> Tokens:
        """Return where each document starts, and the end of the last: int64 [documents + 1]."""
        ...

    def windows(self, seq_len: int) -> int:
        """Return how many samples of `seq_len` tokens, each with its next tokens as labels, they make."""
        ...


@dataclass(frozen=True)
class TokenSplit:
    """The tokens of one split on disk. `digest` is a hash of all of them, wherever they lie."""

    folder: str
    name: str
    dtype: str
    tokens: int
    documents: int
    digest: str

    def open(self) -> Tokens:
        """Return the tokens, read-only and mapped: nothing is read until it is used."""
        return _mapped(Path(self.folder) / tokens_name(self.name), self.dtype, self.tokens)

    def watch(self) -> WatchedFile:
        """Return the state of the file of tokens: whoever keeps it open holds it before each read."""
        path = Path(self.folder) / tokens_name(self.name)
        try:
            return WatchedFile(str(path))
        except OSError as error:
            raise DataError(
                f"'{path}' cannot be read", error.strerror or str(error), "start again: its folder is made anew"
            ) from error

    def offsets(self) -> Tokens:
        """Return where each document starts, and the end of the last: int64 [documents + 1]."""
        return _mapped(Path(self.folder) / offsets_name(self.name), "<i8", self.documents + 1)

    def windows(self, seq_len: int) -> int:
        """Return how many samples of `seq_len` tokens, each with its next tokens as labels, the split makes."""
        return max(0, (self.tokens - 1) // seq_len)


def tokens_name(split: str) -> str:
    """Return the name of a split's file of tokens."""
    return f"{split}.tokens"


def offsets_name(split: str) -> str:
    """Return the name of a split's file of document offsets."""
    return f"{split}.offsets"


def dtype_for(vocab: int) -> str:
    """Return the smaller of the two token types that holds ids below `vocab`."""
    return "<u2" if vocab <= 2**16 else "<u4"


def file_digest(path: Path) -> str:
    """Return the hash of a file's bytes. Reads 1 GB in about a second."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        while block := stream.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


class TokenWriter:
    """Writes one split. Use as a context manager; the files are complete and on the disk after it."""

    def __init__(self, folder: Path, split: str, vocab: int, end_of_document: int) -> None:
        """Create the two files in `folder`."""
        self.folder, self.split = folder, split
        self.dtype = dtype_for(vocab)
        self.tokens = self.documents = 0
        self._end = np.array([end_of_document], dtype=self.dtype)
        self._digest = hashlib.blake2b(digest_size=16)
        self._tokens = (folder / tokens_name(split)).open("wb")
        self._offsets = (folder / offsets_name(split)).open("wb")
        self._offsets.write(np.zeros(1, dtype="<i8").tobytes())

    def add(self, documents: Sequence[Tokens]) -> None:
        """Append documents, each an array of ids without the end-of-document token."""
        if not documents:
            return
        parts = [part for ids in documents for part in (ids, self._end)]
        block = np.concatenate(parts).astype(self.dtype).tobytes()
        ends = self.tokens + np.cumsum([len(ids) + 1 for ids in documents], dtype="<i8")
        self._digest.update(block)
        self._tokens.write(block)
        self._offsets.write(ends.tobytes())
        self.tokens, self.documents = int(ends[-1]), self.documents + len(documents)

    def result(self) -> TokenSplit:
        """Return what was written."""
        digest = self._digest.hexdigest()
        return TokenSplit(str(self.folder), self.split, self.dtype, self.tokens, self.documents, digest)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self._tokens, self._offsets):
            with stream:
                if error is None:
                    stream.flush()
                    os.fsync(stream.fileno())


def _mapped(path: Path, dtype: str, count: int) -> Tokens:
    """Return a file's numbers, mapped. Raises DataError where it is not there, or is too short for them."""
    if count == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    try:
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    except (OSError, ValueError) as error:
        because = error.strerror or str(error) if isinstance(error, OSError) else (
            f"it has {path.stat().st_size:,} bytes, and {count * np.dtype(dtype).itemsize:,} belong to it")  # fmt: skip
        raise DataError(
            f"'{path}' cannot be read", because, "remove its folder from the cache: it is made again at the next start"
        ) from error
