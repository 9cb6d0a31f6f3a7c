"""Megatron's indexed data sets: PREFIX.bin holds tokens, PREFIX.idx says where sequences and documents begin.

The layout is that of `megatron/core/datasets/indexed_dataset.py` of NVIDIA/Megatron-LM:

    0    9 bytes  b"MMIDIDX\\0\\0"
    9    u64      version: 1
    17   u8       type of a token: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16
    18   u64      sequences
    26   u64      document indices: documents + 1
    34   i32 per sequence: its tokens
         i64 per sequence: where it begins in PREFIX.bin, in bytes
         i64 per document index: the sequence that the document begins with; the last one is the number of sequences
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.errors import DataError
from paceline.task.data.sources.shards.folder import ShardedSplit
from paceline.task.data.sources.shards.tokens_in_files import TokenPart, TokenParts
from paceline.task.data.sources.tokenizer import Tokens
from paceline.task.data.sources.tokens import SPLITS
from paceline.task.data.storage.bytes import Storage

MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
PROBES, PROBE_BYTES = 64, 4096  # pieces of PREFIX.bin whose content goes into the fingerprint
LOOKED_AT = 16  # documents whose last tokens are looked at


@dataclass(frozen=True)
class MegatronIndex:
    """What PREFIX.idx holds: the type of tokens, and after how many tokens each document ends."""

    dtype: str
    tokens: int
    ends: Tokens
    digest: str


def prefix_of(path: str) -> str:
    """Return the path without `.bin` or `.idx`."""
    return path[:-4] if path.endswith((".bin", ".idx")) else path


def read_megatron_index(prefix: str, storage: Storage) -> MegatronIndex:
    """Return the index of a data set. Raises DataError where it is none or does not fit its tokens."""
    name = f"{prefix}.idx"
    content = storage.read_all(name)
    if len(content) < HEAD.size or content[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{name} is no index of Megatron's", f"it begins with {content[:9]!r} and not with {MAGIC!r}",
            "name the prefix of PREFIX.bin and PREFIX.idx, as Megatron's preprocess_data.py writes them",
        )  # fmt: skip
    _, version, code, sequences, indices = HEAD.unpack(content[: HEAD.size])
    if version != 1 or code not in DTYPES:
        raise DataError(
            f"{name} is of a kind that is not read", f"version {version}, token type {code}",
            f"version 1 with a token type of {', '.join(map(str, DTYPES))}",
        )  # fmt: skip
    wanted = HEAD.size + 12 * sequences + 8 * indices
    if len(content) < wanted:
        raise DataError(
            f"{name} is cut short", f"it has {len(content):,} bytes, and {wanted:,} belong to it", "copy it again"
        )
    lengths = np.frombuffer(content, "<i4", sequences, HEAD.size).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", sequences, HEAD.size + 4 * sequences)
    documents = np.frombuffer(content, "<i8", indices, HEAD.size + 12 * sequences)
    ends = np.cumsum(lengths)
    size = np.dtype(DTYPES[code]).itemsize
    if sequences and not np.array_equal(pointers, (ends - lengths) * size):
        raise DataError(
            f"{name} does not name its sequences in a row", "other tokens lie between them, or their order differs",
            "write the data set again with Megatron's merge_datasets.py or preprocess_data.py",
        )  # fmt: skip
    if indices and (documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any()):
        raise DataError(f"{name} is damaged", "its documents do not cover its sequences", "copy or write it again")
    if (lengths < 0).any():
        raise DataError(f"{name} is damaged", "a sequence of it has less than no tokens", "copy or write it again")
    begins = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    of_documents = begins[documents[1:]]  # of a document without sequences: where the one before it ends
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return MegatronIndex(DTYPES[code], int(ends[-1]) if sequences else 0, of_documents, digest)


@dataclass(frozen=True)
class OpensMegatron:
    """Opens the documents first..last of a data set."""

    prefix: str
    first: int
    last: int
    storage: Storage

    def __call__(self) -> tuple[TokenParts, Callable[[], Tokens]]:
        index = read_megatron_index(self.prefix, self.storage)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), index.ends])
        begin, end = int(starts[self.first]), int(starts[self.last])
        file = self.storage.open(f"{self.prefix}.bin")
        part = TokenPart(file, begin * np.dtype(index.dtype).itemsize, end - begin, index.dtype)
        return TokenParts([part]), lambda: starts[self.first : self.last + 1] - begin


def megatron_splits(prefix: str, validation_fraction: float, storage: Storage) -> dict[str, ShardedSplit]:
    """Return the splits of a data set. The last documents are held out: files of Megatron's cannot be cut elsewhere.

    Raises DataError where PREFIX.bin is not as long as PREFIX.idx says.
    """
    index = read_megatron_index(prefix, storage)
    file, size = storage.open(f"{prefix}.bin"), index.tokens * np.dtype(index.dtype).itemsize
    if file.size != size:
        raise DataError(
            f"{file.name} does not belong to its index", f"it has {file.size:,} bytes, and {size:,} are expected",
            "copy both files again",
        )  # fmt: skip
    content = hashlib.blake2b(f"{index.digest} {size}".encode(), digest_size=16)
    for start in np.unique(np.linspace(0, max(0, size - PROBE_BYTES), PROBES).astype(np.int64)).tolist():
        content.update(file.read(start, min(size, start + PROBE_BYTES)).tobytes())
    documents = len(index.ends)
    held_out = max(1, round(validation_fraction * documents)) if validation_fraction and documents > 1 else 0
    starts = np.concatenate([np.zeros(1, dtype=np.int64), index.ends])
    bounds = (0, documents - held_out, documents)
    found = {}
    for name, first, last in zip(SPLITS, bounds[:-1], bounds[1:], strict=True):
        digest = f"{content.hexdigest()} {first} {last}"
        opens = OpensMegatron(prefix, first, last, storage)
        found[name] = ShardedSplit(name, index.dtype, int(starts[last] - starts[first]), last - first, digest, opens)
    return found


def refuse_without_ends(split: ShardedSplit, prefix: str) -> None:
    """Raise DataError where documents do not end with one token: what tells them apart would take their last for it."""
    offsets, tokens = split.offsets(), split.open()
    ends = offsets[1:][np.diff(offsets) > 0]
    if not len(ends):
        return
    some = ends[np.unique(np.linspace(0, len(ends) - 1, LOOKED_AT).astype(np.int64))]
    last = [int(tokens[end - 1 : end][0]) for end in some.tolist()]
    if len(set(last)) > 1:
        one, other = list(dict.fromkeys(last))[:2]
        raise DataError(
            f"the documents of '{prefix}' do not end with an end-of-document token",
            f"one ends with token {one} and another with {other}, and documents are to be told apart",
            "preprocess_data.py --append-eod writes it; or rows = 'windows' with cross_documents = true",
        )
