"""Whether files are what was written: read in full by several threads, piece by piece and file by file."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.past_caches import read_into
from paceline.checkpoint.files.pieces import AHEAD, HANDS
from paceline.checkpoint.files.threads import Hands, at_once
from paceline.checkpoint.manifest import FileEntry
from paceline.errors import StorageError

READ_BYTES = 2**18  # at a time: it stays in the cache


def verify_files(path: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise StorageError naming the first of the files in `path` whose content is not what was written.

    Several pieces of them are read at once: one core hashes more slowly than a disk reads.
    """
    pending: deque[_Piece] = deque()
    count = HANDS * at_once()
    with contextlib.ExitStack() as opened, Hands(count, "verify") as hands:
        for piece in _pieces(path, files, hands, opened):
            pending.append(piece)
            if len(pending) > AHEAD * count:
                pending.popleft().take()
        for piece in pending:
            piece.take()


@dataclass
class _File:
    """A file that is read, and what has been learnt of it."""

    path: Path
    entry: FileEntry
    content: Any
    digest: PiecesDigest

    def check(self) -> None:
        """Close the file. Raises StorageError where its content is not what was written."""
        self.content.close()
        if self.digest.hexdigest() != self.entry.sha256:
            because = "its sha256 is not the manifest's, so its content changed after it was written"
            raise StorageError(f"{self.path} is damaged", because, "use an earlier checkpoint")


@dataclass
class _Piece:
    file: _File
    future: Future[bytes]
    is_last: bool

    def take(self) -> None:
        """Wait for the piece's digest; after the last one look at the file's. Raises StorageError."""
        with _told(self.file.path):
            digest = self.future.result()
        if self.file.entry.piece_bytes:
            self.file.digest.add(digest)
        else:
            self.file.digest.is_(digest)
        if self.is_last:
            self.file.check()


def _pieces(path: Path, files: Mapping[str, FileEntry], hands: Hands, opened: contextlib.ExitStack) -> Iterator[_Piece]:
    """Yield the pieces of all files, each on its way to its digest."""
    for name, entry in files.items():
        with _told(path / name):
            content = opened.enter_context((path / name).open("rb", buffering=0))
            length = os.fstat(content.fileno()).st_size
        file = _File(path / name, entry, content, PiecesDigest(entry.piece_bytes))
        step = entry.piece_bytes or max(1, length)
        for at in range(0, max(1, length), step):
            _ask_ahead(content.fileno(), at + step, step)
            future = hands.submit(_digest, content.fileno(), at, min(step, length - at))
            yield _Piece(file, future, at + step >= length)


class PiecesDigest:
    """The digest of a file from those of its pieces, or from its bytes as they come; plain where pieces have none."""

    def __init__(self, piece_bytes: int = 0) -> None:
        self._piece_bytes, self._held = piece_bytes, 0
        self._whole, self._piece = hashlib.sha256(), hashlib.sha256()
        self._known = b""

    def add(self, digest: bytes) -> None:
        """Take the digest of the next piece."""
        self._whole.update(digest)

    def is_(self, digest: bytes) -> None:
        """Take the digest of the whole file."""
        self._known = digest

    def update(self, content: bytes) -> None:
        """Take the next bytes."""
        if not self._piece_bytes:
            self._whole.update(content)
            return
        rest = memoryview(content)
        while rest:
            part = rest[: self._piece_bytes - self._held]
            self._piece.update(part)
            self._held, rest = self._held + len(part), rest[len(part) :]
            if self._held == self._piece_bytes:
                self._end_piece()

    def hexdigest(self) -> str:
        """Return the digest of what was taken."""
        if self._held:
            self._end_piece()
        return (self._known or self._whole.digest()).hex()

    def _end_piece(self) -> None:
        self.add(self._piece.digest())
        self._piece, self._held = hashlib.sha256(), 0


def _digest(descriptor: int, at: int, length: int) -> bytes:
    """Return the digest of a part of a file; of fewer bytes where the file has become shorter."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
    end = at + length
    while at < end and (count := read_into(descriptor, at, buffer[: min(READ_BYTES, end - at)])):
        digest.update(buffer[:count])
        at += count
    return digest.digest()


def _ask_ahead(descriptor: int, at: int, length: int) -> None:
    """Have the disk read on, where it can be told: one that is asked for a piece at a time waits between them."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice alone
            os.posix_fadvise(descriptor, at, length * AHEAD, os.POSIX_FADV_WILLNEED)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot read {path}", str(error), "use an earlier checkpoint") from error
