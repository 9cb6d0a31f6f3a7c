"""Reading documents: text, JSONL and Parquet files as one stream of UTF-8 texts, in a fixed order.

Every defect is a DamagedData that names the file and the line, row or byte. It ends the reading, or is counted where
the spec says that what is damaged is left out: nothing is skipped silently. A file that cannot be read now (a storage
that fails, a permission) is a DataError, which always ends the reading: documents must not depend on the weather.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from paceline.errors import DamagedData, DataError, MissingExtra
from paceline.spec.import_paths import scheme_of
from paceline.spec.task import DataSpec
from paceline.task.data.sources.files import kind_of
from paceline.task.data.sources.held_out import document_hash, split_value
from paceline.task.data.sources.listing import CorpusFiles, File
from paceline.task.data.sources.reading.arrow import (
    UnreadableValue,
    arrow_rows,
    check_column,
    named_text,
    parquet_rows,
    plain_rows,
)
from paceline.task.data.sources.reading.nested import MISSING, fields_of, type_of, value_of
from paceline.task.data.sources.reading.unpacked import opened
from paceline.task.data.sources.scores import asks_scores, is_wanted, no_score, refuse_scores

BOM = b"\xef\xbb\xbf"
LONE_FILE_PIECE_BYTES = 16 * 2**10  # a corpus of one text file is cut, so that a part of it can be held out
PIECE_BYTES = 4 * 2**20  # and a large file is, so that memory stays bounded
LOOKED_AT_BYTES = 4096  # of a file, for signs of UTF-16
LIST_BYTES, LIST_DOCUMENTS = 4 * 2**20, 4096  # what is tokenised at a time


class Document(NamedTuple):
    """One document: where it is from, for people, and its text in UTF-8."""

    origin: str
    text: bytes
    held_out: bool | None = None  # as its file's name says; None where a hash of its text decides

    def is_held_out(self, limit: int) -> bool:
        """Return whether the document is held out: as its file's name says, else by its split value, below `limit`."""
        return split_value(document_hash(self.text)) < limit if self.held_out is None else self.held_out


class Damaged:
    """What is done about documents that are damaged: the first one is raised, or all are counted."""

    def __init__(self, skip: bool) -> None:
        self.skip, self.count, self.first = skip, 0, ""

    def found(self, error: DamagedData) -> None:
        """Raise the error, or count it."""
        if not self.skip:
            raise error
        self.count += 1
        self.first = self.first or f"{error.what}: {error.because}"


OF_WORDS = (  # labels of which are learnt by a few lines of one's own
    "labels of words are read by a data set of your own with a collate, and learnt by an objective of your own: "
    "docs/guide/task/data.md, 'Your own data'"
)
OF_TABLES = {"prompt", "messages", "conversations", "instruction", "question"}  # columns that no text is


def read_documents(data: DataSpec, listing: CorpusFiles, damaged: Damaged | None = None) -> Iterator[Document]:
    """Yield the corpus's documents in order, without empty ones. Stops at `data.max_bytes`, cutting the last one.

    `damaged` counts what is left out where `data.on_bad` is "skip".
    """
    left = data.max_bytes or float("inf")
    damaged = damaged or Damaged(data.on_bad == "skip")
    for file in listing.files:
        for document in read_file(data, listing, file, damaged):
            if len(document.text) >= left:
                text = document.text[: int(left)].decode("utf-8", "ignore").encode()  # drops half a character
                if text:
                    yield document._replace(text=text)
                return
            if document.text:
                yield document
                left -= len(document.text)


def in_lists(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents in lists of a few megabytes."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= LIST_BYTES or len(batch) >= LIST_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def read_file(data: DataSpec, listing: CorpusFiles, file: File, damaged: Damaged) -> Iterator[Document]:
    """Yield one file's documents. What is damaged goes to `damaged`; a file that breaks off ends there.

    Raises DataError for a file that cannot be read now.
    """
    try:
        for document in _documents_of(data, listing, file, damaged):
            yield document if file.held_out is None else document._replace(held_out=file.held_out)
    except DamagedData as error:
        damaged.found(error)


def _documents_of(data: DataSpec, listing: CorpusFiles, file: File, damaged: Damaged) -> Iterator[Document]:
    kind = kind_of(file.name) or "text"
    if kind == "jsonl":
        return _read_jsonl(file, data, damaged)
    if kind in ("parquet", "arrow"):
        return _read_table(file, kind, data, damaged)
    asked = scheme_of(data.source)[0] == "text" or bool(data.include)
    if kind in ("csv", "tsv") or (kind == "json" and not asked):
        raise DataError(
            f"{file.path} is a table, and no text", "its rows would be learnt with their commas and quotes",
            'source = "table:PATH", with text_field for the column of texts'
            + ("; or text: before the path" if kind == "json" else ""),
        )  # fmt: skip
    refuse_scores(data, file.path)
    if listing.kind == "stdlib":
        return _read_stdlib(file)
    return _read_text(file, LONE_FILE_PIECE_BYTES if listing.kind == "file" else PIECE_BYTES, damaged)


def _read_stdlib(file: File) -> Iterator[Document]:
    """Yield one source file, but the four in other encodings that the library keeps to test its own compiler."""
    with opened(file) as stream:
        text = stream.read().removeprefix(BOM)
    try:
        text.decode()
    except UnicodeDecodeError:
        return
    yield Document(file.name, text)


def _read_text(file: File, piece_bytes: int, damaged: Damaged) -> Iterator[Document]:
    """Yield a text file in pieces of at most `piece_bytes`, cut after blank lines or line ends where there are any."""
    with opened(file) as stream:
        offset, block = 0, stream.read(piece_bytes)
        while block:
            end = _cut(block) if len(block) == piece_bytes else len(block)
            piece = block[:end]
            if (wrong := _why_not_text(file, piece, offset)) is not None:
                damaged.found(wrong)
            elif offset:
                yield Document(f"{file.name} at byte {offset:,}", piece)
            else:
                yield Document(file.name, piece.removeprefix(BOM))
            offset += end
            block = block[end:] + stream.read(piece_bytes - (len(block) - end))


def _why_not_text(file: File, piece: bytes, offset: int) -> DamagedData | None:
    """Return what is wrong with a piece of a text file that begins at `offset`, None where it is UTF-8."""
    try:
        piece.decode()
    except UnicodeDecodeError as error:
        is_utf_16 = not offset and piece.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return DamagedData(
            f"{file.path} is not UTF-8 text",
            f"byte {offset + error.start:,} is 0x{piece[error.start]:02x}: "
            + ("it begins with the mark of UTF-16" if is_utf_16 else error.reason),
            f"convert it (iconv -f {'UTF-16' if is_utf_16 else 'LATIN1'} -t UTF-8), or leave it out with include "
            "patterns",
        )
    first = piece[:LOOKED_AT_BYTES]
    if any(len(half) > 3 and half.count(0) > 0.9 * len(half) for half in (first[::2], first[1::2])) and not offset:
        return DamagedData(
            f"{file.path} is not UTF-8 text", "every second byte is 0: it is UTF-16 without its mark",
            "convert it (iconv -f UTF-16LE -t UTF-8, or UTF-16BE), or leave it out with include patterns",
        )  # fmt: skip
    return None


def _cut(block: bytes) -> int:
    """Return where to end a piece: after the last blank line of its second half, else line end, else character."""
    half = len(block) // 2
    for mark in (b"\n\n", b"\n"):
        at = block.rfind(mark, half)
        if at >= 0:
            return at + len(mark)
    at = len(block) - 1
    while at > half and block[at] & 0xC0 == 0x80:  # a continuation byte: the character began before it
        at -= 1
    return max(at, 1)


def _read_jsonl(file: File, data: DataSpec, damaged: Damaged) -> Iterator[Document]:
    """Yield the text field of each line's object whose score is asked for; blank lines are allowed."""
    with opened(file) as stream:
        for number, line in enumerate(stream, 1):
            line = line.removeprefix(BOM) if number == 1 else line
            yield from _of_record(line, file, f"line {number:,}", data, damaged)


def read_lines(file: File, start: int, stop: int, data: DataSpec, damaged: Damaged) -> Iterator[Document]:
    """Yield the documents of those lines of a JSONL file that begin in the bytes start..stop.

    The lines of all parts of a file are its lines, each once, wherever it is cut.
    """
    with opened(file) as stream:
        at = max(0, start - 1)
        stream.seek(at)
        if start:
            at += len(stream.readline())  # of the line before; nothing but its end where one begins at `start`
        while at < stop and (line := stream.readline()):
            text = line if at else line.removeprefix(BOM)
            for document in _of_record(text, file, f"byte {at:,}", data, damaged):
                yield document if file.held_out is None else document._replace(held_out=file.held_out)
            at += len(line)


def _of_record(
    record: bytes | dict[str, object], file: File, place: str, data: DataSpec, damaged: Damaged
) -> Iterator[Document]:
    """Yield the document of a line of JSON or of a row, unless it is blank, damaged, or of another score."""
    if isinstance(record, bytes) and not record.strip():
        return
    where = f"{file.path}, {place}"
    try:
        found = parse_record(record, where) if isinstance(record, bytes) else record
        document = Document(f"{file.name} {place.replace(',', '')}", _text_of(found, data.text_field, where))
        wanted = is_wanted(found, data, where)
    except DamagedData as error:
        damaged.found(error)
    else:
        if wanted:
            yield document


def parse_record(line: bytes, where: str) -> object:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DamagedData(
            f"{where} is not UTF-8 text",
            f"byte {error.start:,} of the line is 0x{line[error.start]:02x}: {error.reason}",
            "write the file again in UTF-8",
        ) from error
    except json.JSONDecodeError as error:
        raise DamagedData(
            f"{where} is not JSON",
            f"{error.msg} at column {error.colno:,}",
            "put one complete JSON object on each line",
        ) from error
    except RecursionError as error:
        raise DamagedData(f"{where} cannot be read", "its JSON is nested too deeply", "flatten the record") from error
    except ValueError as error:  # a number of thousands of digits
        raise DamagedData(f"{where} cannot be read", str(error).split(";")[0], "write such numbers as texts") from error


def _is_of_words(record: Mapping[str, object]) -> bool:
    """Return whether a record is a list of words beside lists of as many labels."""
    lists = [value for value in record.values() if isinstance(value, list)]
    words = [each for each in lists if all(isinstance(word, str) for word in each)]
    return len(lists) > 1 and len({len(each) for each in lists}) == 1 and bool(words)


def _text_of(record: object, field: str, where: str) -> bytes:
    """Return the record's text in UTF-8. Raises DamagedData where it is missing or not a string."""
    if not isinstance(record, dict):
        whole = "; of a file that is one array: name it .json" if isinstance(record, list) else ""
        raise DamagedData(
            f"{where} is not an object", f"it is {_kind(record)}", f'write {{"{field}": "..."}} on each line{whole}'
        )
    text = value_of(record, field)
    if text is MISSING:
        texts = [name for name, value in record.items() if isinstance(value, str)] or list(record)
        near = named_text(field, texts, record) if record else "the record is empty"
        if {"chosen", "rejected"} <= set(record):
            near = 'pairs of answers are read by source = "paceline.task.data.pairs:preference_pairs"'
        elif OF_TABLES & set(record):  # as a part of a mixture, which is not looked into before it is read
            near = f'prompts and conversations are read by source = "table:..."; as texts: {near}'
        elif _is_of_words(record):
            near = OF_WORDS
        raise DamagedData(f"{where} has no field '{field}'", "text_field names the field that holds the text", near)
    if not isinstance(text, str):
        strings = [name for name, value in record.items() if isinstance(value, str)]
        strings = list(fields_of(text, field)) if isinstance(text, dict) else strings
        near = f"text_field = one of: {', '.join(strings)}" if strings else "write the text as a string"
        near = OF_WORDS if _is_of_words(record) else near
        raise DamagedData(f"{where}: field '{field}' is not text", f"it is {_kind(text)}", near)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DamagedData(
            f"{where}: field '{field}' is not valid Unicode",
            f"character {error.start:,} is half of a surrogate pair",
            "write the text again without lone surrogates",
        ) from error


def _kind(value: object) -> str:
    """Return a JSON value's kind for people."""
    if isinstance(value, UnreadableValue):
        return str(value)
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")


def _read_table(file: File, kind: str, data: DataSpec, damaged: Damaged) -> Iterator[Document]:
    """Yield a string column's values, of rows whose score is asked for. Needs the extra 'parquet'."""
    field = data.text_field
    columns = [field, data.score_field] if asks_scores(data) else [field]
    try:
        import pyarrow as arrow
    except ImportError as error:
        raise MissingExtra("pyarrow", "parquet", f"reading {file.name}") from error
    with opened(file) as stream:
        try:
            schema, batches = parquet_rows(stream, columns) if kind == "parquet" else arrow_rows(stream)
            check_column(schema, field, file.path)
            if missing := [name for name in columns if type_of(schema, name) is None]:
                raise no_score(missing[0], file.path)
            records = (record for batch in batches for record in plain_rows(batch, columns))
            for row, record in enumerate(records):
                yield from _of_record(record, file, f"row {row:,}", data, damaged)
        except (arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the system, which reads the file; those of damaged pages have no number
            name = "a readable Parquet file" if kind == "parquet" else "a readable Arrow file"
            raise DamagedData(
                f"{file.path} is not {name}", str(error).splitlines()[0], "write or download it again"
            ) from error
