"""Tokenised data that are read as they lie: folders of token shards and Megatron's data sets, local or remote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, DataError
from paceline.spec.task import DataSpec
from paceline.task.data.sources.cache import cache_root
from paceline.task.data.sources.shards.folder import ShardedSplit, read_index, splits_of, tokenizer_of
from paceline.task.data.sources.shards.megatron import megatron_splits, prefix_of, refuse_without_ends
from paceline.task.data.sources.shards.source import PackedShards, ShardSource
from paceline.task.data.sources.tokenizer import OWN, ByteTokenizer, Tokenizer, load_tokenizer
from paceline.task.data.storage.bytes import Storage
from paceline.task.data.storage.remote import is_remote
from paceline.units import format_count

OF_TEXT = ("document_tokens", "score_min", "score_max", "max_bytes", "include")


@dataclass(frozen=True)
class TokenSet:
    """Tokens in two splits. `what` names them for people, `text_bytes` is 0 where nobody counted the text's."""

    what: str
    vocab: int
    train: ShardedSplit
    validation: ShardedSplit
    text_bytes: int
    fingerprint: str
    storage: Storage
    tokenizer: Tokenizer | None = None
    card: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return self.train.tokens + self.validation.tokens

    @property
    def documents(self) -> int:
        """Documents of both splits."""
        return self.train.documents + self.validation.documents

    def sources(self, data: DataSpec) -> tuple[ShardSource | PackedShards, ShardSource | PackedShards | None]:
        """Return the samples as `data.rows` makes them: (train, validation or None).

        Raises DataError where `train` has none, ConfigError for options that only the making of tokens can follow.
        """
        if late := options_of_text(data, OF_TEXT):
            raise ConfigError(
                f"task.data.{late[0]} with tokens that are made already", "documents are chosen as tokens are made",
                f"paceline data prepare SOURCE OUT --set task.data.{late[0]}=...",
            )  # fmt: skip
        packed = data.rows == "packed"

        def source(split: ShardedSplit) -> ShardSource | PackedShards:
            kind = PackedShards if packed else ShardSource
            skip = data.on_bad == "skip"
            return kind(split, self.vocab, data.seq_len, data.cross_documents, skip, self.storage.notices)

        enough = self.validation.tokens > 1 if packed else self.validation.windows(data.seq_len)
        return source(self.train), source(self.validation) if enough else None


def options_of_text(data: DataSpec, names: Sequence[str]) -> list[str]:
    """Return those of the options that choose documents, and that the data set: a score of 0 is one."""
    plain = DataSpec()
    return [name for name in names if getattr(data, name) != getattr(plain, name)]


def storage_of(data: DataSpec) -> Storage:
    """Return how files of the data are opened."""
    return Storage(cache_root(data), data.cache_limit)


def open_token_set(data: DataSpec, kind: str, path: str) -> TokenSet:
    """Return the tokens of a folder of shards, or of Megatron's files. Raises DataError where they cannot be read."""
    storage = storage_of(data)
    path = path if is_remote(path) else str(Path(path).expanduser())
    if kind == "megatron":
        return _open_megatron(data, prefix_of(path), storage)
    index = read_index(path, storage)
    splits = splits_of(path, index, storage)
    what = f"{format_count(index.tokens('train') + index.tokens('validation'))} tokens in {_name(path)}"
    tokenizer = tokenizer_of(path, index, storage)
    _refuse_other_tokenizer(data, path, tokenizer)
    size = int(index.card.get("bytes", 0))
    return TokenSet(what, index.vocab, splits["train"], splits["validation"], size, index.fingerprint, storage,
                    tokenizer, index.card)  # fmt: skip


def _refuse_other_tokenizer(data: DataSpec, path: str, own: Tokenizer) -> None:
    """Raise ConfigError where the data name a tokenizer, or the model's folder has one, and shards are of another."""
    if data.tokenizer in OWN:
        return
    from paceline.task.data.rows.one_tokenizer import unlike

    if differs := unlike(own.to_json(), load_tokenizer(data.tokenizer).to_json()):
        raise ConfigError(
            f"the tokens in '{path}' were made with another tokenizer than '{data.tokenizer}'", differs,
            f"tokens made with it: paceline data prepare SOURCE OUT --set task.data.tokenizer={data.tokenizer}",
        )  # fmt: skip


def _open_megatron(data: DataSpec, prefix: str, storage: Storage) -> TokenSet:
    tokenizer = None if data.tokenizer in ("bytes", "bpe") else load_tokenizer(data.tokenizer)
    vocab = data.arguments.get("vocab", tokenizer.vocab if tokenizer else None)
    if not isinstance(vocab, int) or vocab < 1:
        raise DataError(
            f"the vocabulary of '{prefix}' is not known", "Megatron's files do not say how many token ids there are",
            'task.data.tokenizer = "PATH/tokenizer.json", or task.data.arguments = { vocab = 50257 }',
        )  # fmt: skip
    splits = megatron_splits(prefix, data.validation_fraction, storage)
    if data.rows == "packed" or not data.cross_documents:
        refuse_without_ends(splits["train"], prefix)
    what = f"{format_count(sum(split.tokens for split in splits.values()))} tokens in {_name(prefix)}"
    by_bytes = ByteTokenizer() if vocab == ByteTokenizer.vocab and tokenizer is None else None
    return TokenSet(what, vocab, splits["train"], splits["validation"], 0, splits["train"].digest, storage,
                    tokenizer or by_bytes)  # fmt: skip


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path
