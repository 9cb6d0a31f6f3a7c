"""The first reading of a table: what its columns and labels are, how many rows there are, and where to split them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import DamagedData, DataError
from paceline.spec.task import DataSpec
from paceline.task.data.sources.cache import document_identity, tokenizer_identity
from paceline.task.data.sources.documents import Damaged
from paceline.task.data.sources.held_out import document_hash, split_limit, split_value
from paceline.task.data.sources.listing import CorpusFiles
from paceline.task.data.sources.reading.arrow import UnreadableValue
from paceline.task.data.sources.reading.nested import fields_of
from paceline.task.data.sources.scores import asks_scores, is_wanted
from paceline.task.data.sources.tables.chat.messages import A_TEXT
from paceline.task.data.sources.tables.chat.own_template import own_templates
from paceline.task.data.sources.tables.chat.parts import TextPart
from paceline.task.data.sources.tables.chat.writer import RowWriter, writer_of
from paceline.task.data.sources.tables.columns import TableColumns, asked_by_dots, columns_meant
from paceline.task.data.sources.tables.labels import Labels, LabelSurvey, is_of_class, label_value
from paceline.task.data.sources.tables.records import TableRecord, columns_of, label_names, read_records
from paceline.units import plural


class TableRow(NamedTuple):
    """A row as a model learns the row: its origin in words, its parts of text, and its label or None."""

    origin: str
    segments: list[TextPart]
    label: object
    held_out: bool | None  # as its file's name says; None where none does

    def content(self) -> bytes:
        """Return bytes that stand for the row."""
        return json.dumps([[tuple(each) for each in self.segments], self.label]).encode("utf-8", "surrogatepass")

    def text(self) -> bytes:
        """Return the row's text."""
        return "".join(segment.text for segment in self.segments).encode()


class RowReader:
    """Reads the rows of a table, with segments and label of each; a second reading gives the same rows."""

    def __init__(self, data: DataSpec, listing: CorpusFiles, name: str) -> None:
        """Raises DataError where it is not clear what the columns are."""
        self.data, self.listing = data, listing
        self.columns: TableColumns = columns_meant(columns_of(listing, asked_by_dots(data)), data, name)
        dialogue = self.columns.kind in ("chat", "completion")
        self.writer: RowWriter | None = writer_of(data, self.columns) if dialogue else None

    def rows(self, damaged: Damaged) -> Iterator[TableRow]:
        """Yield the rows in order, up to `data.max_bytes` of text. What is damaged goes to `damaged`."""
        left = self.data.max_bytes or float("inf")
        for record in read_records(self.listing, damaged, asked_by_dots(self.data)):
            try:
                if not self._is_wanted(record):
                    continue
                row = self._row(record)
            except DamagedData as error:
                damaged.found(error)
                continue
            left -= len(row.text())
            if left < 0:
                return
            yield row

    def _is_wanted(self, record: TableRecord) -> bool:
        """Return whether a row's score is asked for. Of CSV, whose values are texts, a text that is a number is one."""
        values, name = record.values, self.data.score_field
        if asks_scores(self.data) and isinstance(score := values.get(name), str):
            with contextlib.suppress(ValueError):
                values = {**values, name: float(score)}
        return is_wanted(values, self.data, record.origin)

    def _row(self, record: TableRecord) -> TableRow:
        held_out = {"validation": True, "train": False}.get(record.split)
        where = record.origin
        if self.writer is not None:
            segments = self.writer.segments(record.values, where, record.filled)
            if not any(segment.counted and segment.text for segment in segments):
                raise DamagedData(f"{where} has nothing to learn", "what would be learnt is empty", "a text there")
            return _checked(TableRow(where, segments, None, held_out))
        column, *labels = self.columns.names
        for name in self.columns.names:
            if name not in record.values:
                raise DamagedData(
                    f"{where} has no column '{name}'", f"it has {', '.join(record.values) or 'none'}",
                    "tables of the same columns, or include, which names those to read",
                )  # fmt: skip
        text = record.values.get(column)
        if not isinstance(text, str):
            raise _no_text(where, column, text)
        return _checked(TableRow(where, [TextPart(text, True)], self._label(record, labels), held_out))

    def _label(self, record: TableRecord, columns: list[str]) -> object:
        """Return a row's label, None where there is none: the classes it has, where each has a column."""
        where, values = record.origin, record.values
        if self.data.label_fields:
            return tuple(name for name in columns if is_of_class(values.get(name), where, name))
        several = self.data.labels == "multi_label"
        return label_value(values.get(columns[0]), where, columns[0], several) if columns else None


def _no_text(where: str, column: str, value: object) -> DamagedData:
    """Return what is wrong with a row whose text is no text, and how its column becomes one."""
    what, holds = f"{where} has no text", f"its column '{column}' holds"
    if isinstance(value, UnreadableValue):
        return DamagedData(what, f"{holds} {value}", "write the column as strings in UTF-8")
    if isinstance(value, dict):
        texts = fields_of(value, column)
        hint = f'text_field = "{texts[0]}"' if texts else "a column for the text itself"
        return DamagedData(what, f"{holds} fields of its own: {', '.join(map(str, value)) or 'none'}", hint)
    return DamagedData(what, f"{holds} {json.dumps(value, default=str)[:40]}", A_TEXT)


def _checked(row: TableRow) -> TableRow:
    """Return the row. Raises DamagedData for half of a surrogate pair, which JSON may hold and UTF-8 may not."""
    for what, text in (("its text", "".join(part.text for part in row.segments)), ("its label", str(row.label))):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DamagedData(
                f"{row.origin}: {what} is not valid Unicode", f"character {error.start:,} is half of a surrogate pair",
                "write it again without lone surrogates",
            ) from error  # fmt: skip
    return row


@dataclass(frozen=True)
class TableSurvey:
    """What the first reading finds. `identity` stands for everything that decides the tokens."""

    reader: RowReader
    labels: Labels | None
    names: tuple[str, ...]  # of class numbers, where the table says them
    content: str
    rows: int
    bytes: int
    limit: int  # of split values, below which rows are held out
    named_splits: bool
    damaged: Damaged

    def is_held_out(self, row: TableRow) -> bool:
        """Return whether a row is held out: as its file's name says, or by a hash of its text."""
        if self.named_splits:
            return bool(row.held_out)
        return split_value(document_hash(row.text())) < self.limit

    def identity(self) -> list[object]:
        """Return plain data that say what is made of which rows."""
        data, columns = self.reader.data, self.reader.columns
        labels = [self.labels.kind, self.labels.are_hot, *self.labels.classes] if self.labels else []
        template = [data.template, own_templates(data.tokenizer)] if columns.kind in ("chat", "completion") else []
        limit = [data.document_tokens] if data.document_tokens else []
        tokenizer = tokenizer_identity(data) if self.labels else document_identity(data)
        return [self.content, tokenizer, data.validation_fraction, self.named_splits, columns.kind,
                columns.names, columns.because, labels, template, *limit]  # fmt: skip


def survey_table(data: DataSpec, listing: CorpusFiles) -> TableSurvey:
    """Return what the first reading of a table finds. Raises DataError where it holds no rows or unclear labels."""
    name = listing.what
    reader = RowReader(data, listing, name)
    damaged = Damaged(data.on_bad == "skip")
    labelled = reader.columns.kind == "labelled"
    seen = LabelSurvey(reader.columns.names[1]) if labelled else None
    digest = hashlib.blake2b(digest_size=16)
    rows = size = 0
    splits: set[bool | None] = set()
    values = []
    for row in reader.rows(damaged):
        digest.update(document_hash(row.content()))
        rows, size = rows + 1, size + len(row.text())
        splits.add(row.held_out)
        values.append(split_value(document_hash(row.text())))
        if seen is not None and row.held_out is not True:  # classes are those that are trained on
            seen.see(row.label)
    named = True in splits
    if not rows or splits == {True}:
        left = f"; {damaged.count:,} rows were left out, the first: {damaged.first}" if damaged.count else ""
        found = "all of them called after a validation" if rows else "and no row found"
        read = f"{plural(len(listing.files), 'file')} read, {found}{left}"
        raise DataError(f"{name} holds no rows to train on", read, "name other data")
    names = data.label_fields or (label_names(listing, seen.column) if seen is not None else ())
    labels = seen.decide(data, name, names) if seen is not None else None
    limit = 0 if named else split_limit(values, data.validation_fraction)
    if not named and max(values) < limit:
        raise DataError(
            f"no row of {name} is left to train on", f"its {rows:,} rows are held out: they are all of one text"
            if len(set(values)) == 1 else f"its {rows:,} rows are held out", "validation_fraction = 0",
        )  # fmt: skip
    return TableSurvey(reader, labels, names, digest.hexdigest(), rows, size, limit, named, damaged)
