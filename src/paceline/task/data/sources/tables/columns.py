"""What the columns of a table are: a text with a label, a prompt with a completion, a conversation, or text alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import DataError, suggestion
from paceline.spec.task import DataSpec
from paceline.task.data.sources.tables.chat.messages import TOOLS_FIELD

LABEL_NAMES = ("label", "labels", "class", "target", "category")
# Of tables that are nothing else (CSV, TSV, JSON): a JSONL of documents may well have such a field beside its text.
MORE_LABEL_NAMES = ("sentiment", "rating", "stars", "polarity", "emotion", "intent", "topic", "genre", "spam",
                    "is_spam", "toxic", "gold_label", "label_text", "y", "score")  # fmt: skip
TEXT_NAMES = ("text", "sentence", "content", "review", "body", "document", "question", "comment", "message", "tweet",
              "utterance", "headline", "title", "description", "abstract", "review_text", "sms", "query")  # fmt: skip
ID_NAMES = ("id", "idx", "index", "guid", "uid", "uuid", "unnamed: 0")  # of rows: nothing to learn
A_SENTENCE = 4  # words in the name of a column, from which on the first line is taken for a row
NUMBERS = "docs/tutorials/bring/table-of-numbers.md"
NAMELESS = "column {}"  # what a column without a name is called
MESSAGES_NAMES = ("conversations", "conversation", "dialogue", "dialog", "turns")
# A question, what it is about where there is such a column, and the answer: one turn of a conversation.
TURNS = (("instruction", "output"), ("instruction", "response"), ("prompt", "response"), ("question", "answer"),
         ("query", "response"), ("input", "output"))  # fmt: skip
CONTEXTS = {"instruction": ("input", "context")}


@dataclass(frozen=True)
class TableColumns:
    """The kind of a table's rows, "labelled", "completion", "chat" or "text", and the columns that are read.

    Those of a chat are one of messages, or those of a single turn: what is asked, perhaps about what, and the answer.
    """

    kind: str
    names: tuple[str, ...]  # labelled: text, label or labels; completion: prompt, completion; chat: messages; text
    because: str


def asked_by_dots(data: DataSpec) -> tuple[str, ...]:
    """Return the names of columns asked for that may be those of fields in columns, such as "meta.text"."""
    asked = (
        data.text_field,
        data.label_field,
        *data.label_fields,
        data.prompt_field,
        data.completion_field,
        data.messages_field,
    )
    return tuple(name for name in asked if "." in name)


def is_kind_of_table(columns: Sequence[str], data: DataSpec) -> bool:
    """Return whether columns are more than a text: JSONL and Parquet without them are read as documents."""
    if data.labels == "none":
        return False
    pair = {data.prompt_field, data.completion_field} <= set(columns)
    asked = data.labels != "auto" or bool(data.label_field or data.label_fields)
    talk = bool(_messages(columns, data) or _turn(columns, data))
    return talk or pair or asked or bool(_label_among(columns, data) and _text(columns, data))


def columns_meant(columns: Sequence[str], data: DataSpec, name: str) -> TableColumns:
    """Return what the columns of the table `name` are. Raises DataError where that is not clear, naming them."""
    if data.label_fields:
        return _one_for_each_class(columns, data, name)
    label = _label_among(columns, data, (*LABEL_NAMES, *MORE_LABEL_NAMES)) if data.labels != "none" else ""
    text = _text(columns, data, label)
    if data.labels in ("auto", "none") and not data.label_field:
        if messages := _messages(columns, data):
            beside = f", and '{TOOLS_FIELD}' for its assistants" if TOOLS_FIELD in columns else ""
            return TableColumns("chat", (messages,), f"it has a column '{messages}'{beside}")
        pair = (data.prompt_field, data.completion_field)
        if set(pair) <= set(columns):
            return TableColumns("completion", pair, f"it has columns '{pair[0]}' and '{pair[1]}'")
        if not (label and text) and (turn := _turn(columns, data)):
            return TableColumns("chat", turn, f"it has columns {_quoted(turn)}")
    if data.label_field and not label:
        raise DataError(
            f"{name} has no column '{data.label_field}'",
            f"label_field names the column of labels; the table has {_listed(columns)}",
            suggestion(data.label_field, columns),
        )
    if data.labels not in ("auto", "none") and not label:
        raise DataError(
            f"{name} has no column of labels", f"it has {_listed(columns)}, and none of them is called "
            f"{', '.join(LABEL_NAMES)}", f'label_field = "{columns[-1]}"' if columns else "rows with named columns",
        )  # fmt: skip
    if not text:
        raise _unclear(columns, data, label, name)
    unread = _meaningful(columns, text, label)
    left = f"; not read: {', '.join(unread)}" if unread else ""
    if not label:
        hint = ""
        if unread and data.labels != "none":
            one = f'label_field = "{unread[0]}" takes it for the labels'
            hint = (
                f" ({one})"
                if len(unread) == 1
                else " (label_field says which of them holds labels, if one does; label_fields, if each is a class)"
            )
        return TableColumns("text", (text,), f"it has no column of labels ({', '.join(LABEL_NAMES)}){left}{hint}")
    return TableColumns("labelled", (text, label), f"it has columns '{text}' and '{label}'{left}")


def _one_for_each_class(columns: Sequence[str], data: DataSpec, name: str) -> TableColumns:
    """Return the columns of a table whose labels are in a column for each class."""
    fields = data.label_fields
    if data.label_field or data.labels not in ("auto", "multi_label") or len(set(fields)) != len(fields):
        raise DataError(
            "label_fields names a column for each class, of which a row may have several",
            "a column is named twice" if len(set(fields)) != len(fields) else
            f"label_field = '{data.label_field}' and labels = '{data.labels}' say otherwise",
            "label_fields alone, each column once",
        )  # fmt: skip
    for field in fields:
        if field not in columns:
            raise DataError(
                f"{name} has no column '{field}'",
                f"label_fields names the columns of labels; the table has {_listed(columns)}",
                suggestion(field, columns),
            )
    others = [column for column in columns if column not in fields]
    text = _text(others, data, fields[0])
    if not text:
        raise _unclear(others, data, fields[0], name)
    unread = _meaningful(others, text)
    left = f"; not read: {', '.join(unread)}" if unread else ""
    return TableColumns(
        "labelled", (text, *fields), f"label_fields names a column for each of {len(fields)} classes{left}"
    )


def _messages(columns: Sequence[str], data: DataSpec) -> str:
    """Return the column of conversations, "" for none."""
    if data.messages_field in columns:
        return data.messages_field
    asked = data.messages_field != "messages" or data.text_field in columns
    return "" if asked else _named(MESSAGES_NAMES, columns)


def _turn(columns: Sequence[str], data: DataSpec) -> tuple[str, ...]:
    """Return the columns of a single turn, none where there is a text of its own."""
    if data.text_field in columns:
        return ()
    for asked, answered in TURNS:
        if {asked, answered} <= set(columns):
            return (asked, *[name for name in CONTEXTS.get(asked, ()) if name in columns][:1], answered)
    return ()


def _label_among(columns: Sequence[str], data: DataSpec, names: Sequence[str] = LABEL_NAMES) -> str:
    if data.label_field:
        return data.label_field if data.label_field in columns else ""
    return _named(names, columns)


def _text(columns: Sequence[str], data: DataSpec, label: str = "") -> str:
    """Return the column of the text: the one asked for, one with a usual name, or the only one beside the label."""
    label = label or _label_among(columns, data)
    if data.text_field in columns:
        return data.text_field
    if data.text_field != "text":
        return ""  # another was asked for
    others = [name for name in columns if name != label]
    if usual := _named(TEXT_NAMES, others):
        return usual
    others = _meaningful(others)
    return others[0] if label and len(others) == 1 else ""


def _named(names: Sequence[str], columns: Sequence[str]) -> str:
    """Return the first of the columns by one of the names, in their order, whatever its letters' case."""
    found = {_plain(column): column for column in reversed(columns)}
    return next((found[name] for name in names if name in found), "")


def _plain(column: str) -> str:
    """Return a column's name as usual names are written: small letters, "_" for blanks and hyphens."""
    return re.sub(r"[\s-]+", "_", column.strip().lower())


def _like_a_text(columns: Sequence[str]) -> str:
    """Return the first column that has a usual name of a text as a word in its own, "" for none: "Issue Text"."""
    words = {column: set(re.findall(r"[^\W_]+", column.lower())) for column in columns}
    return next((column for column, found in words.items() if found & set(TEXT_NAMES)), "")


def _meaningful(columns: Sequence[str], *read: str) -> list[str]:
    """Return the columns but those that are read, those that number rows, and those without a name."""
    others = [name for name in columns if name not in read and name.lower() not in ID_NAMES]
    return [name for name in others if name not in _nameless(columns)]


def _nameless(columns: Sequence[str]) -> set[str]:
    """Return what those of the columns are called that have no name."""
    return {NAMELESS.format(number) for number in range(1, len(columns) + 2)}


def _unclear(columns: Sequence[str], data: DataSpec, label: str, name: str) -> DataError:
    """Return the error of a table whose text is not clear: its first line may be a row, or not be split."""
    if not columns:
        return DataError(f"{name} is a table without columns", "its first row names none", "rows with named columns")
    because = f"it has {_listed(columns)}, and text_field is '{data.text_field}'"
    sentence = any(len(column.split()) >= A_SENTENCE for column in columns if column not in _nameless(columns))
    if sentence and not label:
        names = ",".join(["text", "label", *(f"column{at}" for at in range(3, len(columns) + 1))][: len(columns)])
        because += "; these look like a row"
        hint = f"the names of the columns as the first line, such as {names}"
    elif len(columns) == 1:
        hint = f'text_field = "{columns[0]}"; several columns are told apart by one of , ; | and tabs'
    else:
        others = _meaningful(columns, label) or list(columns)
        others = [_like_a_text(others) or others[0]]
        more = "" if label else ", and label_field for the labels, where there are any"
        hint = f'text_field = "{others[0]}"{more}; columns of numbers are read by a data set of your own: {NUMBERS}'
    return DataError(f"{name} is a table, and which column holds its text is not clear", because, hint)


def _listed(columns: Sequence[str]) -> str:
    return f"the columns {', '.join(columns)}" if columns else "no columns"


def _quoted(names: Sequence[str]) -> str:
    return f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"
