"""The cache of tables: rows are read, split and tokenised once, whoever asks first.

    CACHE/tables/KEY/   train.tokens train.offsets validation.tokens validation.offsets tokenizer.json manifest.json
                        table.json, and of each split SPLIT.labels (a label per row) or SPLIT.counted (a byte per token)

KEY is a hash of the rows, the tokenizer, the split and what is made of labels; the rest is as for texts (cache.py).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.spec.task import DataSpec
from paceline.task.data.sources.cache import Say, cache_root, signature_of
from paceline.task.data.sources.cache_folders import (
    build_folder,
    hash_of,
    index_path,
    lock_of,
    write_atomically,
    written_to,
)
from paceline.task.data.sources.listing import CorpusFiles
from paceline.task.data.sources.manifest import Corpus, load_corpus
from paceline.task.data.sources.scores import asks_scores
from paceline.task.data.sources.tables.chat.own_template import writing_identity
from paceline.task.data.sources.tables.columns import TableColumns
from paceline.task.data.sources.tables.labels import Labels
from paceline.task.data.sources.tables.listing import list_table
from paceline.task.data.sources.tables.survey import survey_table
from paceline.task.data.sources.tables.write import COUNTED, LABELS, TABLE, write_table
from paceline.units import format_data

FORMAT = 4  # raise it when the same rows would give other files
CHOICES = ("text_field", "labels", "label_field", "label_fields", "prompt_field", "completion_field", "messages_field",
           "template")  # fmt: skip


@dataclass(frozen=True)
class TextTable:
    """A tokenised table on disk: its tokens, what its columns and labels are, and what there is to tell of it.

    `keeps_end` says whether the end-of-document token is a part of a row, `pad` which token fills rows up. `counts` are
    rows of each class by split. `told` are sentences for people.
    """

    corpus: Corpus
    columns: TableColumns
    labels: Labels | None
    counts: dict[str, dict[str, int]]
    keeps_end: bool
    pad: int
    template: str
    special: str
    told: tuple[str, ...]

    def label_array(self, split: str) -> npt.NDArray[Any]:
        """Return the labels of a split's rows, mapped."""
        assert self.labels is not None, "a table of labels"
        rows = self.corpus.train.documents if split == "train" else self.corpus.validation.documents
        return _mapped(Path(self.corpus.folder) / f"{split}{LABELS}", self.labels.dtype, self.labels.shape(rows))

    def counted_array(self, split: str) -> npt.NDArray[np.uint8]:
        """Return 1 for each token of a split that counts, mapped."""
        tokens = self.corpus.train.tokens if split == "train" else self.corpus.validation.tokens
        return _mapped(Path(self.corpus.folder) / f"{split}{COUNTED}", "|u1", (tokens,))


def open_table(data: DataSpec, say: Say | None = None) -> TextTable:
    """Return the tokenised table of `data`, from the cache, or built into it first.

    Raises DataError for rows that cannot be read, StorageError for a cache that cannot be written.
    """
    listing = list_table(data)
    root = cache_root(data)
    signature = _signature(data, listing)
    table = _find(root, signature)
    if table is None:
        with written_to(root), lock_of(root, signature) as alone:
            table = _find(root, signature) or _build(data, listing, root, signature, alone, say)
    corpus = dataclasses.replace(table.corpus, what=listing.what, skipped=listing.skipped)
    return dataclasses.replace(table, corpus=corpus)


def _signature(data: DataSpec, listing: CorpusFiles) -> str:
    """Return a hash of everything that decides the table, taking a file's size and time for its content."""
    chosen = [getattr(data, name) for name in CHOICES]
    chosen += ["chosen"] if asks_scores(data) or data.document_tokens else []  # earlier releases looked at neither
    return hash_of([FORMAT, "table", signature_of(data, listing), *chosen, writing_identity(data.tokenizer)])


def _build(data: DataSpec, listing: CorpusFiles, root: Path, signature: str, alone: bool, say: Say | None) -> TextTable:
    survey = survey_table(data, listing)
    key = hash_of([FORMAT, survey.identity()])
    final = root / "tables" / key
    table = load_table(final)
    if table is None:
        if say:
            say(f"tokenising {survey.rows:,} rows of {listing.what}, {format_data(survey.bytes)}, into {final}")
        write = functools.partial(write_table, data, survey, key)
        table = build_folder(final, signature, alone, write, load_table)
    left_out, first = survey.damaged.count, survey.damaged.first
    index = {"key": key, "left_out": left_out, "left_out_first": first}
    same = [signature]
    if data.labels == "auto" and table.labels is not None:  # settled, the data name what was seen: the same table
        same.append(_signature(dataclasses.replace(data, labels=table.labels.kind), listing))
    for each in same:
        write_atomically(index_path(root, each), json.dumps(index))
    return _with_left_out(table, left_out, first)


def load_table(folder: Path) -> TextTable | None:
    """Return the table in `folder`, or None where there is none, or one that is not as it was written."""
    corpus = load_corpus(folder)
    if corpus is None:
        return None
    try:
        told = json.loads((folder / TABLE).read_text("utf-8"))
        columns = TableColumns(told["kind"], tuple(told["columns"]), told["because"])
        given = told["labels"]
        labels = given and Labels(given["kind"], tuple(given["classes"]), given["because"])
        return TextTable(corpus, columns, labels, told["counts"], told["keeps_end"], told["pad"], told["template"],
                     told["special"], tuple(told["told"]))  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _with_left_out(table: TextTable, left_out: int, first: str) -> TextTable:
    corpus = dataclasses.replace(table.corpus, left_out=left_out, left_out_first=first)
    return dataclasses.replace(table, corpus=corpus)


def _find(root: Path, signature: str) -> TextTable | None:
    """Return the table that the index names for the signature, or None if it must be built (again)."""
    try:
        index = json.loads(index_path(root, signature).read_text())
        key, left_out, first = str(index["key"]), int(index["left_out"]), str(index["left_out_first"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    table = load_table(root / "tables" / key)
    return _with_left_out(table, left_out, first) if table else None


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if 0 in shape:  # an empty file cannot be mapped
        return np.zeros(shape, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=shape).view(np.ndarray)
