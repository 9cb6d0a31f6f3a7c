"""What the columns of a table are: a text with a label, a prompt with a completion, a conversation, or text alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import DataError, suggestion
from paceline.spec.task import DataSpec

LABEL_NAMES = ("label", "labels", "class", "target", "category")
TEXT_NAMES = ("text", "sentence", "content", "review", "body", "document", "question", "comment")


@dataclass(frozen=True)
class TableColumns:
    """The kind of a table's rows, "labelled", "completion", "chat" or "text", and the columns that are read."""

    kind: str
    names: tuple[str, ...]  # labelled: text, label; completion: prompt, completion; chat: messages; text: text
    because: str


def is_kind_of_table(columns: Sequence[str], data: DataSpec) -> bool:
    """Return whether columns are more than a text: JSONL and Parquet without them are read as documents."""
    if data.labels == "none":
        return False
    pair = {data.prompt_field, data.completion_field} <= set(columns)
    asked = data.labels != "auto" or bool(data.label_field)
    return data.messages_field in columns or pair or asked or bool(_label_among(columns, data) and _text(columns, data))


def columns_meant(columns: Sequence[str], data: DataSpec, name: str) -> TableColumns:
    """Return what the columns of the table `name` are. Raises DataError where that is not clear, naming them."""
    if data.labels in ("auto", "none") and not data.label_field:
        if data.messages_field in columns:
            return TableColumns("chat", (data.messages_field,), f"it has a column '{data.messages_field}'")
        pair = (data.prompt_field, data.completion_field)
        if set(pair) <= set(columns):
            return TableColumns("completion", pair, f"it has columns '{pair[0]}' and '{pair[1]}'")
    label = _label_among(columns, data) if data.labels != "none" else ""
    text = _text(columns, data, label)
    if data.label_field and not label:
        raise DataError(
            f"{name} has no column '{data.label_field}'",
            f"label_field names the column of labels; the table has {_listed(columns)}",
            suggestion(data.label_field, columns),
        )
    if data.labels not in ("auto", "none") and not label:
        raise DataError(
            f"{name} has no column of labels", f"it has {_listed(columns)}, and none of them is called "
            f"{', '.join(LABEL_NAMES)}", f'label_field = "{columns[-1]}"',
        )  # fmt: skip
    if not text:
        raise DataError(
            f"{name} is a table, and which column holds its text is not clear",
            f"it has {_listed(columns)}, and text_field is '{data.text_field}'",
            f'text_field = "{_first_other(columns, label)}"',
        )
    if not label:
        return TableColumns("text", (text,), f"it has no column of labels ({', '.join(LABEL_NAMES)})")
    return TableColumns("labelled", (text, label), f"it has columns '{text}' and '{label}'")


def _label_among(columns: Sequence[str], data: DataSpec) -> str:
    if data.label_field:
        return data.label_field if data.label_field in columns else ""
    return next((name for name in LABEL_NAMES if name in columns), "")


def _text(columns: Sequence[str], data: DataSpec, label: str = "") -> str:
    """Return the column of the text: the one asked for, one with a usual name, or the only one beside the label."""
    label = label or _label_among(columns, data)
    if data.text_field in columns:
        return data.text_field
    if data.text_field != "text":
        return ""  # another was asked for
    if usual := next((name for name in TEXT_NAMES if name in columns and name != label), ""):
        return usual
    others = [name for name in columns if name != label]
    return others[0] if label and len(others) == 1 else ""


def _first_other(columns: Sequence[str], label: str) -> str:
    return next((name for name in columns if name != label), "text")


def _listed(columns: Sequence[str]) -> str:
    return f"the columns {', '.join(columns)}" if columns else "no columns"
