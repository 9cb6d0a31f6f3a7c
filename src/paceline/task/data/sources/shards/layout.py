"""The layout of a token shard, and its writer. docs/reference/token-shards.md says the layout in words.

0    8 bytes  b"PACETOK1"
8    u32      bytes of a token: 2 or 4
12   u32      bytes of tokens that one checksum covers: 65,536
16   u64      tokens
24   u64      documents
32   u64      where the document ends begin
40   u64      where the checksums begin
48   u32      CRC-32 of the document ends
52   u32      CRC-32 of the checksums
56   u32      0
60   u32      CRC-32 of the 60 bytes before it
64   tokens, little-endian; then zeros up to a multiple of 8
     u64 per document: how many tokens there are up to its end, the end-of-document token included
     u32 per block of tokens: its CRC-32
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from paceline.durable import publish
from paceline.errors import DamagedData, DataError
from paceline.task.data.sources.tokenizer import Tokens

MAGIC = b"PACETOK1"
HEADER = struct.Struct("<8sIIQQQQIIII")
BLOCK_BYTES = 2**16
DTYPES = {2: "<u2", 4: "<u4"}


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself before its tokens."""

    token_bytes: int
    block_bytes: int
    tokens: int
    documents: int
    ends_at: int
    checksums_at: int
    ends_crc: int
    checksums_crc: int

    @property
    def dtype(self) -> str:
        """The type of a token."""
        return DTYPES[self.token_bytes]

    @property
    def blocks(self) -> int:
        """How many checksums the tokens have."""
        return -(-self.tokens * self.token_bytes // self.block_bytes)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.checksums_at + 4 * self.blocks

    def pack(self) -> bytes:
        """Return the 64 bytes of the header."""
        fields = (self.token_bytes, self.block_bytes, self.tokens, self.documents, self.ends_at, self.checksums_at,
                  self.ends_crc, self.checksums_crc, 0)  # fmt: skip
        content = HEADER.pack(MAGIC, *fields, 0)[:-4]
        return content + struct.pack("<I", zlib.crc32(content))


def read_header(content: bytes, name: str) -> ShardHeader:
    """Return a shard's header. Raises DataError where the bytes are none, or not as they were written."""
    if len(content) < HEADER.size or content[:8] != MAGIC:
        raise DataError(
            f"{name} is not a token shard", f"it begins with {content[:8]!r} and not with {MAGIC!r}",
            "paceline data prepare writes token shards",
        )  # fmt: skip
    (_, *fields, _, crc) = HEADER.unpack(content[: HEADER.size])
    found = zlib.crc32(content[: HEADER.size - 4])
    if found != crc:
        raise damaged(name, 0, HEADER.size, found, crc)
    header = ShardHeader(*fields)
    if header.token_bytes not in DTYPES or header.block_bytes < 1:
        raise DataError(
            f"{name} is of a newer kind", f"its tokens have {header.token_bytes} bytes", "use a newer Paceline"
        )
    return header


def damaged(name: str, start: int, stop: int, found: int, recorded: int) -> DamagedData:
    """Return the error of bytes that are not as they were written."""
    return DamagedData(
        f"{name} is damaged",
        f"its bytes {start:,} to {stop:,} have the CRC-32 {found:08x}, and {recorded:08x} was recorded",
        'copy or prepare it again, or train without them: task.data.on_bad = "skip"',
    )


@dataclass(frozen=True)
class WrittenShard:
    """A shard as it was written. `digest` is a hash of its tokens."""

    file: str
    tokens: int
    documents: int
    bytes: int
    digest: str


class ShardWriter:
    """Writes one shard. Use as a context manager; the file has its name, and is on the disk, after it."""

    def __init__(self, path: Path, token_bytes: int, end_of_document: int) -> None:
        """Write beside `path` first; a file of that name is replaced at the end."""
        self.path, self._beside = path, path.with_name(f".{path.name}.part")
        self.token_bytes = token_bytes
        self.tokens = self.documents = 0
        self._end = np.array([end_of_document], dtype=DTYPES[token_bytes])
        self._ends: list[np.ndarray] = []
        self._checksums: list[int] = []
        self._open_block = b""  # the bytes of the last block, which is not full yet
        self._digest = hashlib.blake2b(digest_size=16)
        self._stream = self._beside.open("wb")
        self._stream.write(bytes(HEADER.size))
        self._result: WrittenShard | None = None

    def add(self, documents: Sequence[Tokens]) -> None:
        """Append documents, each an array of ids without the end-of-document token."""
        if not documents:
            return
        parts = [part for ids in documents for part in (ids, self._end)]
        block = np.concatenate(parts).astype(DTYPES[self.token_bytes]).tobytes()
        ends = self.tokens + np.cumsum([len(ids) + 1 for ids in documents], dtype="<u8")
        self._ends.append(ends)
        self.tokens, self.documents = int(ends[-1]), self.documents + len(documents)
        self._digest.update(block)
        self._stream.write(block)
        self._check(block)

    def result(self) -> WrittenShard:
        """Return what was written, after the `with` block."""
        assert self._result is not None, "the shard is not finished"
        return self._result

    def _check(self, content: bytes) -> None:
        waiting = self._open_block + content
        whole = len(waiting) - len(waiting) % BLOCK_BYTES
        view = memoryview(waiting)
        self._checksums += [zlib.crc32(view[at : at + BLOCK_BYTES]) for at in range(0, whole, BLOCK_BYTES)]
        self._open_block = waiting[whole:]

    def _finish(self) -> None:
        if self._open_block:
            self._checksums.append(zlib.crc32(self._open_block))
        length = self.tokens * self.token_bytes
        self._stream.write(bytes(-length % 8))
        ends = np.concatenate(self._ends).tobytes() if self._ends else b""
        checksums = np.array(self._checksums, dtype="<u4").tobytes()
        self._stream.write(ends + checksums)
        ends_at = HEADER.size + length + -length % 8
        header = ShardHeader(
            self.token_bytes, BLOCK_BYTES, self.tokens, self.documents, ends_at, ends_at + len(ends),
            zlib.crc32(ends), zlib.crc32(checksums),
        )  # fmt: skip
        self._stream.seek(0)
        self._stream.write(header.pack())
        digest = self._digest.hexdigest()
        self._result = WrittenShard(self.path.name, self.tokens, self.documents, header.size, digest)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stream:
            if error is None:
                self._finish()
        if error is None:
            publish(self._beside, self.path)
        else:
            self._beside.unlink(missing_ok=True)
