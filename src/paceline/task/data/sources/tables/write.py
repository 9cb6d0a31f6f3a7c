"""The second reading of a table: rows tokenised, labels as numbers, and what there is to tell of both."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import DataError
from paceline.spec.task import DataSpec
from paceline.task.data.sources.documents import LIST_DOCUMENTS, Damaged
from paceline.task.data.sources.held_out import document_hash
from paceline.task.data.sources.manifest import write_manifest
from paceline.task.data.sources.tables.chat.parts import encode_segments
from paceline.task.data.sources.tables.labels import Labels, encode_label, places_of
from paceline.task.data.sources.tables.survey import TableRow, TableSurvey
from paceline.task.data.sources.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    is_own,
    load_tokenizer,
    special_text,
    train_bpe,
)
from paceline.task.data.sources.tokens import SPLITS, TokenWriter

LABELS, COUNTED, TABLE = ".labels", ".counted", "table.json"
LIST_ROWS = min(LIST_DOCUMENTS, 1024)  # tokenised at a time


class RowTokens:
    """Makes tokens of rows: a labelled text as its tokenizer has it, other rows with marks of the tokens that count."""

    def __init__(self, tokenizer: Tokenizer, labelled: bool, *, own: bool) -> None:
        """`own` says whether the tokenizer is Paceline's, whose labelled texts end with the end-of-document token.

        What another tokenizer gives, such as [CLS] and [SEP] around a text, is what its model is given anywhere else.
        """
        self.tokenizer = tokenizer
        self.keeps_end = own or not labelled
        self.labelled = labelled

    def of(self, rows: list[TableRow]) -> list[tuple[Any, Any]]:
        """Return of each row its ids, and 1 for those that count."""
        if not self.labelled:
            return encode_segments(self.tokenizer, [row.segments for row in rows])
        texts = [row.text() for row in rows]
        if not self.keeps_end:
            assert isinstance(self.tokenizer, FileTokenizer)
            return [(ids, None) for ids in self.tokenizer.encode_around(texts)]
        return [(ids, None) for ids in self.tokenizer.encode(texts)]


def write_table(data: DataSpec, survey: TableSurvey, key: str, folder: Path) -> None:
    """Tokenise all rows into `folder`; the manifest comes last. Raises DataError where they changed meanwhile."""
    tokenizer = _tokenizer(data, survey)
    labels, suffix = survey.labels, LABELS if survey.labels else COUNTED
    maker = RowTokens(tokenizer, labels is not None, own=is_own(data.tokenizer))
    places = places_of(labels, survey.names) if labels else {}
    digest = hashlib.blake2b(digest_size=16)
    counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(TokenWriter(folder, split, tokenizer.vocab, tokenizer.end_of_document))
            for split in SPLITS
        }
        others = {split: stack.enter_context((folder / f"{split}{suffix}").open("wb")) for split in SPLITS}
        for rows in _in_lists(survey.reader.rows(Damaged(data.on_bad == "skip"))):
            made = maker.of(rows)
            for row, (whole, marks) in zip(rows, made, strict=True):
                ids = whole[: data.document_tokens or None]
                digest.update(document_hash(row.content()))
                split = SPLITS[survey.is_held_out(row)]
                writers[split].add([ids])
                if labels is None:
                    counted = marks[: len(ids)]
                    end = counted[-1] if len(counted) else 1  # of a row that is cut its end is not learnt
                    others[split].write(counted.tobytes() + bytes([end if len(ids) == len(whole) else 0]))
                else:
                    label = encode_label(row.label, labels, places, row.origin)
                    _count(counts[split], labels, label)
                    others[split].write(np.asarray(label, dtype=labels.dtype).tobytes())
        for stream in others.values():
            stream.flush()
            os.fsync(stream.fileno())
    if digest.hexdigest() != survey.content:
        raise DataError(
            f"'{data.source}' changed while it was read", "its second reading gave other rows than its first",
            "wait until nothing writes to it",
        )  # fmt: skip
    _write_told(folder, survey, tokenizer, maker, counts)
    splits = [writers[split].result() for split in SPLITS]
    names = [TABLE, *(f"{split}{suffix}" for split in SPLITS)]
    write_manifest(folder, key, tokenizer, survey.rows, survey.bytes, splits, names)


def _tokenizer(data: DataSpec, survey: TableSurvey) -> Tokenizer:
    def training_texts() -> Iterator[bytes]:
        for row in survey.reader.rows(Damaged(data.on_bad == "skip")):
            if not survey.is_held_out(row):
                yield row.text()

    if data.tokenizer == "bytes":
        return ByteTokenizer()
    return train_bpe(training_texts(), data.vocab) if data.tokenizer == "bpe" else load_tokenizer(data.tokenizer)


def _in_lists(rows: Iterator[TableRow]) -> Iterator[list[TableRow]]:
    while batch := list(itertools.islice(rows, LIST_ROWS)):
        yield batch


def _count(counts: Counter[str], labels: Labels, label: Any) -> None:
    if labels.kind == "classification":
        counts[labels.classes[label]] += 1
    elif labels.kind == "multi_label":
        counts.update(labels.classes[at] for at in np.flatnonzero(label).tolist())


def _write_told(
    folder: Path, survey: TableSurvey, tokenizer: Tokenizer, maker: RowTokens, counts: dict[str, Counter[str]]
) -> None:
    columns, labels, writer = survey.reader.columns, survey.labels, survey.reader.writer
    told = {
        "kind": columns.kind,
        "columns": columns.names,
        "because": columns.because,
        "labels": labels and {"kind": labels.kind, "classes": labels.classes, "because": labels.because},
        "counts": {split: dict(counts[split]) for split in SPLITS},
        "keeps_end": maker.keeps_end,
        "pad": tokenizer.pad if isinstance(tokenizer, FileTokenizer) else 0,
        "template": writer.told if writer else "",
        "special": special_text(tokenizer),
        "told": list(_told(survey, counts)),
    }
    with (folder / TABLE).open("w", encoding="utf-8") as stream:
        json.dump(told, stream, ensure_ascii=False)
        stream.flush()
        os.fsync(stream.fileno())


def _told(survey: TableSurvey, counts: dict[str, Counter[str]]) -> Iterator[str]:
    """Yield what a user would want to know of the rows and might not expect."""
    if survey.named_splits:
        yield "held out are the files that are called after a validation"
    labels = survey.labels
    if labels is None or labels.kind == "regression":
        return
    train, held_out = counts["train"], counts["validation"]
    unseen = [name for name in labels.classes if not train[name]]
    if unseen:
        yield f"no row for training is of the class {', '.join(map(repr, unseen[:5]))}: it cannot be learnt"
    if labels.kind == "classification" and held_out:
        name, _ = train.most_common(1)[0]
        yield f"always saying {name!r} would be right for {held_out[name] / held_out.total():.1%} of the held-out rows"
