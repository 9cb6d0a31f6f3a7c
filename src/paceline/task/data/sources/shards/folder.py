"""A folder of token shards: `shards.json` says what belongs to it, `tokenizer.json` how its tokens are read.

Nothing else counts as part of it. Shards are never changed: more data are more shards, and a new `shards.json`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.durable import write_text
from paceline.errors import DataError
from paceline.spec.model_folder import TOKENIZER
from paceline.task.data.sources.shards.layout import HEADER, ShardHeader, WrittenShard, damaged, read_header
from paceline.task.data.sources.shards.tokens_in_files import Checksums, TokenPart, TokenParts
from paceline.task.data.sources.tokenizer import Tokenizer, Tokens, from_json
from paceline.task.data.sources.tokens import SPLITS
from paceline.task.data.storage.bytes import ByteFile, Storage, as_words, beside, named_inside

INDEX = "shards.json"
FORMAT = "paceline token shards 1"


@dataclass(frozen=True)
class ShardIndex:
    """What `shards.json` holds. `card` says where the data are from and how they were made."""

    tokenizer: str
    vocab: int
    end_of_document: int
    splits: dict[str, tuple[WrittenShard, ...]]
    card: dict[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens in their order, and of how they are split."""
        parts = [[split, *(shard.digest for shard in self.splits.get(split, ()))] for split in SPLITS]
        return hashlib.blake2b(json.dumps([self.vocab, parts]).encode(), digest_size=16).hexdigest()

    def tokens(self, split: str) -> int:
        """Return how many tokens a split has."""
        return sum(shard.tokens for shard in self.splits.get(split, ()))

    def documents(self, split: str) -> int:
        """Return how many documents a split has."""
        return sum(shard.documents for shard in self.splits.get(split, ()))


def write_index(folder: Path, index: ShardIndex) -> None:
    """Write `shards.json`, in place of an older one. Raises OSError."""
    content = {"format": FORMAT, "fingerprint": index.fingerprint, **asdict(index)}
    write_text(folder / INDEX, json.dumps(content, indent=1) + "\n")


def read_index(path: str, storage: Storage) -> ShardIndex:
    """Return the index of a folder, which may be a URL. Raises DataError where there is none, or a damaged one."""
    name = beside(path, INDEX)
    try:
        content = json.loads(storage.read_all(name))
        if content["format"] != FORMAT:
            raise DataError(
                f"{name} is of another kind", f"its format is '{content['format']}'", f"'{FORMAT}' is read here"
            )
        splits = {split: tuple(WrittenShard(**shard) for shard in content["splits"].get(split, ())) for split in SPLITS}
        index = ShardIndex(
            str(content["tokenizer"]), int(content["vocab"]), int(content["end_of_document"]), splits, content["card"]
        )
        if index.fingerprint != content["fingerprint"]:
            raise ValueError("its fingerprint is not that of its shards")
    except (ValueError, KeyError, TypeError) as error:
        because = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{name} is damaged", because, "copy or prepare the folder again") from error
    for shard in (each for shards in splits.values() for each in shards):
        named_inside(path, shard.file)
    return index


@dataclass(frozen=True)
class ShardedSplit:
    """One split of a folder of shards, or of other files of tokens: read like a TokenSplit."""

    name: str
    dtype: str
    tokens: int
    documents: int
    digest: str
    opens: Callable[[], tuple[TokenParts, Callable[[], Tokens]]]

    def open(self) -> TokenParts:
        """Return the tokens; nothing is read until it is used."""
        return self.opens()[0]

    def offsets(self) -> Tokens:
        """Return where each document starts, and the end of the last: int64 [documents + 1]."""
        return self.opens()[1]()

    def windows(self, seq_len: int) -> int:
        """Return how many samples of `seq_len` tokens, each with its next tokens as labels, the split makes."""
        return max(0, (self.tokens - 1) // seq_len)


@dataclass(frozen=True)
class OpensShards:
    """Opens the shards of a split. Another process that receives it opens them again."""

    path: str
    shards: tuple[WrittenShard, ...]
    storage: Storage

    def __call__(self) -> tuple[TokenParts, Callable[[], Tokens]]:
        paths = [beside(self.path, shard.file) for shard in self.shards]
        files = [self.storage.open(path, head_bytes=HEADER.size, is_checked=True) for path in paths]
        opened = [OpenShard(file, shard) for file, shard in zip(files, self.shards, strict=True)]
        return TokenParts([shard.part for shard in opened]), lambda: _joined([shard.ends() for shard in opened])


class OpenShard:
    """One shard: its tokens and where its documents end."""

    def __init__(self, file: ByteFile, shard: WrittenShard | None = None) -> None:
        """Read the header. Raises DataError where the file is no shard, damaged, or not the one that is meant."""
        self.file = file
        self.header = header = read_header(file.read(0, min(HEADER.size, file.size)).tobytes(), file.name)
        if file.size != header.size:
            raise DataError(
                f"{file.name} is cut short" if file.size < header.size else f"{file.name} is too long",
                f"it has {file.size:,} bytes, and its header says {header.size:,}",
                "copy or prepare it again",
            )
        if shard is not None and (shard.tokens, shard.documents, shard.bytes) != (
            header.tokens, header.documents, header.size
        ):  # fmt: skip
            raise DataError(
                f"{file.name} is another shard than {INDEX} says",
                f"it has {header.tokens:,} tokens in {header.documents:,} documents, and {INDEX} says "
                f"{shard.tokens:,} in {shard.documents:,}",
                "copy or prepare the folder again",
            )
        recorded = self._words(header.checksums_at, header.size, "<u4", header.checksums_crc)
        start, length = HEADER.size, header.tokens * header.token_bytes
        checks = Checksums(file, start, start + length, header.block_bytes, recorded)
        self.part = TokenPart(file, start, header.tokens, header.dtype, checks)

    def ends(self) -> Tokens:
        """Return how many tokens there are up to the end of each document: int64 [documents]."""
        header: ShardHeader = self.header
        return self._words(header.ends_at, header.checksums_at, "<i8", header.ends_crc)

    def _words(self, start: int, stop: int, dtype: str, recorded: int) -> Tokens:
        content = np.ascontiguousarray(self.file.read(start, stop))
        if (found := zlib.crc32(content.data)) != recorded:
            raise damaged(self.file.name, start, stop, found, recorded)
        return as_words(content, dtype)


def _joined(ends: list[Tokens]) -> Tokens:
    """Return where documents start over all shards, and the end of the last."""
    begins = np.cumsum([0, *(int(each[-1]) if len(each) else 0 for each in ends)], dtype=np.int64)
    moved = [each + begin for each, begin in zip(ends, begins[:-1], strict=True)]
    return np.concatenate([np.zeros(1, dtype=np.int64), *moved])


def splits_of(path: str, index: ShardIndex, storage: Storage) -> dict[str, ShardedSplit]:
    """Return the splits of a folder by their names."""
    found = {}
    for name in SPLITS:
        shards = index.splits[name]
        digest = hashlib.blake2b("".join(shard.digest for shard in shards).encode(), digest_size=16).hexdigest()
        dtype = "<u2" if index.vocab <= 2**16 else "<u4"
        opens = OpensShards(path, shards, storage)
        found[name] = ShardedSplit(name, dtype, index.tokens(name), index.documents(name), digest, opens)
    return found


def tokenizer_of(path: str, index: ShardIndex, storage: Storage) -> Tokenizer:
    """Return the tokenizer that wrote a folder's tokens."""
    return from_json(storage.read_all(beside(path, TOKENIZER)).decode(), index.tokenizer)


def with_more(index: ShardIndex, more: dict[str, tuple[WrittenShard, ...]]) -> ShardIndex:
    """Return the index with further shards, which come after those that are there."""
    return replace(index, splits={split: index.splits[split] + more.get(split, ()) for split in SPLITS})
