"""A look at tokenised data: how much there is, how long documents are, how well they fill samples, what they say."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError
from paceline.spec.task import DataSpec
from paceline.task.data.order.permutation import sample_ids
from paceline.task.data.prepare.card import length_quantiles
from paceline.task.data.rows.kept_rows import rows_of_split
from paceline.task.data.sources.cache import Say, open_corpus
from paceline.task.data.sources.named import TOKEN_KINDS, kind_of_source
from paceline.task.data.sources.shards.opened import open_token_set
from paceline.task.data.sources.tables.store import open_table
from paceline.task.data.sources.tables.tell import count_lines, first_rows, seen_lines, table_card, table_description
from paceline.task.data.sources.tokenizer import Tokenizer, special_text
from paceline.task.data.sources.tokens import Split

HASHED = 1_000_000  # documents at most that are held against each other
SHOWN_CHARACTERS = 300
SEED = 0


@dataclass(frozen=True)
class SplitFacts:
    """What one split holds. Shares are of 1.

    `duplicates` is the share of documents that equal an earlier one, among the first `hashed`. `padded` is the share of
    padding where each document is padded to the longest, `packed` where samples are rows of packed documents, and
    `cut` the share of documents that the ends of samples cut where they run on.
    """

    tokens: int
    documents: int
    samples: int
    lengths: dict[str, float]
    duplicates: float
    hashed: int
    padded: float
    packed: float
    cut: float


@dataclass(frozen=True)
class Inspected:
    """What was found in data."""

    source: str
    what: str
    tokenizer: str
    vocab: int
    seq_len: int
    fingerprint: str
    splits: dict[str, SplitFacts]
    samples: list[str]  # of a table its first rows, as the model sees them
    told: list[str] = field(default_factory=list)  # what was seen in a table, and which files are not read
    card: dict[str, Any] = field(default_factory=dict)


def inspect(data: DataSpec, samples: int = 3, say: Say | None = None) -> Inspected:
    """Return what tokenised data hold; text is tokenised into the cache first. Raises the errors of reading them."""
    kind, path = kind_of_source(data.source)
    tokenizer: Tokenizer | None
    train: Split
    validation: Split
    if kind in TOKEN_KINDS:
        found = open_token_set(data, kind, path)
        train, validation, tokenizer, vocab = found.train, found.validation, found.tokenizer, found.vocab
        name, what, card = found.tokenizer.name if found.tokenizer else "unknown", found.what, found.card
        digest = found.fingerprint
    elif kind == "table":
        return _inspect_table(data, samples, say)
    elif kind in ("text", "hf"):
        corpus = open_corpus(data, say)
        train, validation, tokenizer, vocab = corpus.train, corpus.validation, corpus.open_tokenizer(), corpus.vocab
        name, what, card = corpus.tokenizer, corpus.what, {}
        digest = corpus.key
    else:
        raise ConfigError(
            f"'{data.source}' is no text", "data inspect looks at texts, tables, tokens and images",
            "name a file or a folder of these; `paceline plan` says what else the data are",
        )  # fmt: skip
    splits = {split.name: _split_facts(split, data.seq_len) for split in (train, validation)}
    texts = [] if tokenizer is None else _sample_texts(train, tokenizer, samples)
    told = [] if tokenizer is None else [f"tokenizer {tokenizer.name}: {special_text(tokenizer)}"]
    told += list(map(str, corpus.skipped)) if kind not in TOKEN_KINDS else []
    return Inspected(data.source, what, name, vocab, data.seq_len, digest, splits, texts, told, card)


def _inspect_table(data: DataSpec, samples: int, say: Say | None) -> Inspected:
    """Return what a table holds: its first rows are shown as the model sees them."""
    table = open_table(data, say)
    corpus = table.corpus
    splits = {split.name: _split_facts(split, data.seq_len) for split in (corpus.train, corpus.validation)}
    rows = list(map(str, first_rows(table, data, samples, SHOWN_CHARACTERS)))
    told = [*seen_lines(table), *count_lines(table), *table.told, *map(str, corpus.skipped)]
    what, card = table_description(table), table_card(table)
    return Inspected(
        data.source, what, corpus.tokenizer, corpus.vocab, data.seq_len, corpus.key, splits, rows, told, card
    )


def _split_facts(split: Split, seq_len: int) -> SplitFacts:
    offsets = split.offsets()
    lengths = np.diff(offsets)
    total = int(lengths.sum())
    duplicates, hashed = _duplicates(split, offsets)
    longest = int(lengths.max()) if len(lengths) else 0
    rows = len(rows_of_split(split, seq_len).firsts) - 1
    cut = ((offsets[:-1] // seq_len) != ((offsets[1:] - 1) // seq_len)).mean() if len(lengths) else 0.0
    return SplitFacts(
        tokens=split.tokens,
        documents=split.documents,
        samples=split.windows(seq_len),
        lengths=length_quantiles(lengths),
        duplicates=duplicates,
        hashed=hashed,
        padded=1 - total / (longest * len(lengths)) if total else 0.0,
        packed=1 - (total - 1) / (rows * seq_len) if rows else 0.0,
        cut=float(cut),
    )


def _duplicates(split: Split, offsets: npt.NDArray[Any]) -> tuple[float, int]:
    """Return the share of documents that equal an earlier one, and among how many of the first it was looked for."""
    tokens, count = split.open(), min(HASHED, split.documents)
    seen = set()
    for start, stop in zip(offsets[:count].tolist(), offsets[1 : count + 1].tolist(), strict=True):
        seen.add(hashlib.blake2b(np.ascontiguousarray(tokens[start:stop]).data, digest_size=16).digest())
    return (1 - len(seen) / count if count else 0.0), count


def _sample_texts(split: Split, tokenizer: Tokenizer, samples: int) -> list[str]:
    """Return the beginnings of some documents, drawn as an order of samples is."""
    if not split.documents:
        return []
    offsets, tokens = split.offsets(), split.open()
    chosen = sample_ids(SEED, np.arange(min(samples, split.documents)), split.documents)
    texts = []
    for document in chosen.tolist():
        start, stop = int(offsets[document]), int(offsets[document + 1])
        texts.append(tokenizer.decode(tokens[start : min(stop, start + SHOWN_CHARACTERS)])[:SHOWN_CHARACTERS])
    return texts
