"""What there is to say of a table: in a line, in notes, for the record, and the first rows as the model sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.spec.task import DataSpec
from paceline.task.data.sources.tables.labels import Labels
from paceline.task.data.sources.tables.store import TextTable

SHOWN_ROWS = 2
SHOWN_CHARACTERS = 60
SHOWN_TOKENS = 8
SHOWN_CLASSES = 6
NOUNS = {"completion": "prompts with completions", "chat": "conversations"}


@dataclass(frozen=True)
class ShownRow:
    """A row as the model sees it: the beginning of its text, its first tokens, how many it has, and what is learnt."""

    text: str
    tokens: tuple[int, ...]
    length: int
    learnt: str

    def __str__(self) -> str:
        more = ", ..." if self.length > len(self.tokens) else ""
        return f"{self.text!r} = {self.length:,} tokens [{', '.join(map(str, self.tokens))}{more}] -> {self.learnt}"


def table_description(table: TextTable) -> str:
    """Return the table in a few words: how many rows of what."""
    corpus, labels = table.corpus, table.labels
    rows = f"{corpus.documents:,}"
    if labels is None:
        return f"{rows} {NOUNS.get(table.columns.kind, 'texts')} of {corpus.what}"
    if labels.kind == "regression":
        return f"{rows} texts with a number, of {corpus.what}"
    return f"{rows} texts of {len(labels.classes)} classes, of {corpus.what}"


def shown_lines(table: TextTable, data: DataSpec) -> list[str]:
    """Return what was seen in a table, how it is tokenised, and its first rows."""
    return [*seen_lines(table), *(f"row {at}: {row}" for at, row in enumerate(first_rows(table, data), 1))]


def seen_lines(table: TextTable) -> list[str]:
    """Return what was seen in a table, and how it is tokenised."""
    meant = _labels_text(table.labels) if table.labels else table.template
    lines = [f"{table.columns.because}; {meant}" if meant else table.columns.because]
    return [*lines, f"tokenizer {table.corpus.tokenizer}: {table.special}"]


def count_lines(table: TextTable) -> list[str]:
    """Return how many rows each class has, by split."""
    counted = ((split, ", ".join(f"{name} {rows:,}" for name, rows in sorted(counts.items())))
               for split, counts in table.counts.items() if counts)  # fmt: skip
    return [f"{split} rows: {told}" for split, told in counted]


def table_notes(table: TextTable, data: DataSpec, source: Any) -> list[str]:
    """Return what there is to note of a table's rows, a sentence each."""
    notes = list(table.told)
    if cut := getattr(source, "cut", 0):
        rows = source.split.documents
        notes.append(f"{cut:,} of {rows:,} rows are longer than seq_len = {data.seq_len:,} and are cut")
    if unlearnt := getattr(source, "unlearnt", 0):
        notes.append(f"{unlearnt:,} rows are left out: nothing of their first {data.seq_len:,} tokens counts")
    return notes


def _labels_text(labels: Labels) -> str:
    if labels.kind == "regression":
        return f"regression, since {labels.because}"
    names = ", ".join(labels.classes[:SHOWN_CLASSES]) + (", ..." if len(labels.classes) > SHOWN_CLASSES else "")
    return f"{labels.kind} into {names}, since {labels.because}"


def table_card(table: TextTable) -> dict[str, object]:
    """Return what a record keeps of a table: above all the names of its classes, in the order of a head's outputs."""
    card: dict[str, object] = {"table": {"kind": table.columns.kind, "columns": list(table.columns.names)}}
    if table.labels is not None:
        card["labels"] = {"kind": table.labels.kind, "classes": list(table.labels.classes), "rows": table.counts}
    return card


def first_rows(
    table: TextTable, data: DataSpec, count: int = SHOWN_ROWS, characters: int = SHOWN_CHARACTERS
) -> list[ShownRow]:
    """Return the first rows for training as the model sees them."""
    split, tokenizer = table.corpus.train, table.corpus.open_tokenizer()
    offsets, tokens, found = split.offsets(), split.open(), []
    labels = table.label_array("train") if table.labels else None
    counted = None if table.labels else table.counted_array("train")
    for row in range(min(count, split.documents)):
        start, stop = int(offsets[row]), int(offsets[row + 1])
        whole = stop - (0 if table.keeps_end else 1)
        whole = whole if labels is None else max(whole, start + 1)  # a text of no token is its end
        kept = min(whole, start + data.seq_len)
        ids = np.asarray(tokens[start:kept])
        if labels is not None and table.labels is not None:
            learnt = _label_text(labels[row], table.labels)
        else:
            assert counted is not None
            learnt = repr(_shortened(tokenizer.decode(ids[counted[start:kept] > 0]), characters))
        text = _shortened(tokenizer.decode(ids[: 4 * characters]), characters)
        found.append(ShownRow(text, tuple(ids[:SHOWN_TOKENS].tolist()), len(ids), learnt))
    return found


def _label_text(label: Any, labels: Labels) -> str:
    if labels.kind == "regression":
        return f"{float(label):g}"
    if labels.kind == "classification":
        return f"{labels.classes[int(label)]} (class {int(label)})"
    return ", ".join(labels.classes[at] for at in np.flatnonzero(label).tolist()) or "none"


def _shortened(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 3] + "..."
