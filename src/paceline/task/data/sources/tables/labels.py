"""Labels of a table: what they are, classes in a stable order, numbers or several at once, seen from their values."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DamagedData, DataError, suggestion
from paceline.spec.task import DataSpec

_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_CODE = re.compile(r"[-+]?0\d+")  # "007" is another class than "7", and keeps its name
OTHER_LABELS = 'label_field names another column; labels = "classification" takes each value for a class'
SEPARATOR = "|"  # of several labels in one field of text
OTHER_SEPARATORS = (";", ",", "/", "\t")  # that tables have in its place
MOST_DISTINCT = 100_000  # values that are counted one by one
NO_VALUE = ("nan", "n/a", "#n/a", "<na>", "null")  # what programs write where there is no value
FEW = 20  # classes that any table may have, however few its rows
WHOLE_NUMBERS = 1000  # classes at most that are taken for such without being told


@dataclass(frozen=True)
class Labels:
    """What the labels are: their kind, the classes in order ("" of none for numbers), and why they are taken so."""

    kind: str  # classification, regression or multi_label
    classes: tuple[str, ...]
    because: str
    # Whether each row says of every class by 0 or 1 whether it has it. Fingerprints of sources are of the rest.
    are_hot: bool = field(default=False, repr=False)

    @property
    def outputs(self) -> int:
        """How many numbers a head gives for a row."""
        return len(self.classes) or 1

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the labels of so many rows."""
        return (rows, len(self.classes)) if self.kind == "multi_label" else (rows,)

    @property
    def dtype(self) -> str:
        """How labels are kept on disk."""
        return {"classification": "<i8", "regression": "<f8", "multi_label": "|u1"}[self.kind]


def label_value(value: object, where: str, field: str, several: bool = False) -> object:
    """Return a label as it was meant: a text, a whole number, a number or a tuple of those.

    Numbers and truth values written as text stay text. Raises DamagedData for one that is empty or is no label. Where
    a field of text is known to hold `several` labels, an empty one is of a row that has none of them.
    """
    if several and isinstance(value, str) and not value.strip():
        return ""
    if isinstance(value, list | tuple):
        return tuple(label_value(each, where, field) for each in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        value = value.strip()
    if value is None or value == "" or (isinstance(value, str) and value.lower() in NO_VALUE):
        told = f"'{value}', which stands for no value" if value else "nothing"
        raise DamagedData(f"{where} has an empty label", f"its column '{field}' holds {told}", _LEAVE_OUT)
    if isinstance(value, float) and not math.isfinite(value):
        raise DamagedData(f"{where} has no label", f"its column '{field}' holds {value}", _LEAVE_OUT)
    if not isinstance(value, str | int | float):
        told = json.dumps(value, default=str)[:40]
        raise DamagedData(f"{where} has no label", f"its column '{field}' holds {told}", "a text, a number or a list")
    return value


def is_of_class(value: object, where: str, field: str) -> bool:
    """Return whether a row is of the class that a column of 0 and 1 stands for. Raises DamagedData for other values."""
    found = label_value(value, where, field)
    number = {"true": 1.0, "false": 0.0}.get(str(found).lower(), None if isinstance(found, tuple) else _number(found))
    if number not in (0.0, 1.0):
        told = json.dumps(value, default=str)[:40]
        raise DamagedData(f"{where}: '{field}' is neither 0 nor 1", f"it is {told}, in a column of label_fields",
                          "0 or 1 in every row; label_field, for a column that holds the label itself")  # fmt: skip
    return number == 1.0


_LEAVE_OUT = 'a label for every row, or on_bad = "skip", which leaves such rows out and counts them'


@dataclass
class LabelSurvey:
    """Sees the labels of all rows, and says then what they are."""

    column: str
    counts: Counter[Any] = field(default_factory=Counter)
    rows: int = 0
    lists: int = 0
    too_many: bool = False
    lengths: set[int] = field(default_factory=set)  # of lists, up to two of them
    only_0_and_1: bool = True  # in lists

    def see(self, value: object) -> None:
        """Take note of a row's label, as `label_value` gave it."""
        self.rows += 1
        several = value if isinstance(value, tuple) else (value,)
        if isinstance(value, tuple):
            self.lists += 1
            if len(self.lengths) < 2:
                self.lengths.add(len(value))
            self.only_0_and_1 = self.only_0_and_1 and all(each in (0, 1) for each in value)
        if len(self.counts) < MOST_DISTINCT:
            self.counts.update(several)
        else:
            self.too_many = True

    def decide(self, data: DataSpec, name: str, names: tuple[str, ...] = ()) -> Labels:
        """Return what the labels of the table `name` are. `names` are those of class numbers, where the table says.

        Raises DataError where that is not clear, is not what `data.labels` says, or there is but one class and nothing
        said that they are classes: a test set may well have rows of one.
        """
        if 0 < self.lists < self.rows:
            raise DataError(
                f"the labels of {name} are lists and single values",
                f"{self.lists:,} of {self.rows:,} rows have a list in '{self.column}'",
                "lists in every row, or in none",
            )  # fmt: skip
        if self.lists and data.labels not in ("auto", "multi_label"):
            raise DataError(
                f"labels = '{data.labels}' of a table whose labels are lists", f"'{self.column}' holds several labels",
                'labels = "multi_label"',
            )  # fmt: skip
        if self.lists or data.labels == "multi_label":
            return self._several(data, name, names)
        numbers = _numbers(self.counts)
        kind, because = self._kind(data, numbers, name, bool(names))
        if kind == "regression":
            if numbers is None:
                text = next(value for value in self.counts if _number(value) is None)
                pointed = str(text).replace(",", ".")
                comma = pointed != str(text) and _number(pointed) is not None
                raise DataError(
                    "labels = 'regression' of a table whose labels are no numbers",
                    f"'{self.column}' holds {text!r}",
                    f"numbers with a decimal point: {pointed}" if comma else 'labels = "classification"',
                )  # fmt: skip
            return Labels(kind, (), because)
        return Labels(kind, self._classes(data, self.counts, names, name), because)

    def _kind(self, data: DataSpec, numbers: list[float] | None, name: str, named: bool) -> tuple[str, str]:
        if data.labels != "auto":
            return data.labels, "task.data.labels says so"
        distinct = len(self.counts)
        values = "value" if distinct == 1 else "different values"
        told = f"{distinct:,} {values} in {self.rows:,} rows of '{self.column}'"
        if named:
            return "classification", f"the table names its classes: {told}"
        if numbers is not None:
            if not all(number.is_integer() for number in numbers):
                return "regression", f"'{self.column}' holds fractions"
            if distinct > WHOLE_NUMBERS or self.too_many or distinct > max(FEW, self.rows // 2):
                return "regression", f"{told}, all whole numbers"
            return "classification", f"{told}, all whole numbers (labels = 'regression' takes them as numbers)"
        if self.too_many or distinct > max(FEW, self.rows // 2):
            raise DataError(f"the labels of {name} hardly repeat", told, self._instead())
        return "classification", told

    def _instead(self) -> str:
        if all(isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value) for value in self.counts):
            return "write numbers with a decimal point: these have a comma"
        if self.column == "target":
            return 'objective = "seq2seq" if they are texts to be written (it says what else to write); ' + OTHER_LABELS
        return OTHER_LABELS

    def _several(self, data: DataSpec, name: str, names: tuple[str, ...]) -> Labels:
        counts: Counter[object] = Counter()
        for value, times in self.counts.items():
            counts.update(dict.fromkeys(_split(value), times))
        if not self.lists:
            self._refuse_unsplit(name)
        if self.lists and not names and self.only_0_and_1 and len(self.lengths) == 1 and max(self.lengths) > 1:
            classes = tuple(map(str, range(max(self.lengths))))
            because = f"they are lists of 0 and 1, one for each of {len(classes)} classes"
            return Labels("multi_label", classes, because, are_hot=True)
        if self.lists and any(isinstance(value, float) and not value.is_integer() for value in counts):
            shown = next(value for value in counts if isinstance(value, float) and not value.is_integer())
            raise DataError(
                f"the labels of {name} are lists of fractions", f"'{self.column}' holds {shown} in one of them, and "
                "lists are of classes", "lists of names or of class numbers, or of 0 and 1 for each class",
            )  # fmt: skip
        because = "they are lists" if self.lists else f"labels are split at '{SEPARATOR}'"
        because = "they are columns of 0 and 1" if data.label_fields else because
        return Labels("multi_label", self._classes(data, counts, names, name), because)

    def _refuse_unsplit(self, name: str) -> None:
        """Raise DataError where labels are together by another sign: each combination would be a class of its own."""
        texts = [value for value in self.counts if isinstance(value, str)]
        if any(SEPARATOR in text for text in texts):
            return
        for sign in OTHER_SEPARATORS:
            parts = {part.strip() for text in texts for part in text.split(sign)}
            if any(sign in text for text in texts) and len(parts) <= len(texts):
                raise DataError(
                    f"labels = 'multi_label' of {name}, and no label in '{self.column}' has a '{SEPARATOR}'",
                    f"labels are split at '{SEPARATOR}', and these seem to be split at {sign!r}: "
                    + repr(next(text for text in texts if sign in text)),
                    f"write them as {next(text for text in texts if sign in text).replace(sign, SEPARATOR)!r}",
                )

    def _classes(self, data: DataSpec, counts: Counter[object], names: tuple[str, ...], name: str) -> tuple[str, ...]:
        seen = ordered_classes(counts)
        # Rows may be of one class alone where columns say which there are, and in a test set.
        may_be_one = data.label_fields or (data.labels != "auto" and not data.validation_fraction)
        if not seen or not may_be_one:
            check_classes(seen, self.column, name)
        return names or seen


def check_classes(seen: Collection[str], column: str, name: str) -> None:
    """Raise DataError where the rows of a table, of which these classes are seen, leave nothing to tell apart."""
    if len(seen) < 2:
        raise DataError(
            f"the labels of {name} are of one class only", f"every row of '{column}' is {next(iter(seen))!r}"
            if seen else "no row has a label", "rows of at least two classes: there is nothing to tell apart",
        )  # fmt: skip


def ordered_classes(values: Any) -> tuple[str, ...]:
    """Return the names of classes in an order that does not depend on the rows': by number, or by text."""
    numbers = _numbers(values)
    if numbers is None or any(isinstance(value, str) and _CODE.fullmatch(value) for value in values):
        return tuple(sorted({str(value) for value in values}))
    return tuple(_number_name(number) for number in sorted(set(numbers)))


def encode_label(value: Any, labels: Labels, places: dict[str, int], where: str) -> npt.NDArray[Any] | int | float:
    """Return a label as numbers. Raises DataError for a class that is not known, naming the place."""
    if labels.kind == "regression":
        number = _number(value)
        assert number is not None, "seen when the labels were surveyed"
        return number
    if labels.kind == "classification":
        return _place(value, places, where)
    if labels.are_hot:
        if len(value) != len(labels.classes):  # a row for validation: those for training are all alike
            raise DataError(f"{where} has {len(value)} labels", f"rows for training have {len(labels.classes)}",
                            "0 or 1 for each class in every row")  # fmt: skip
        if other := [each for each in value if each not in (0, 1)]:
            raise DataError(f"{where} has the label {other[0]}", "rows for training have 0 or 1 for each class",
                            "0 or 1 for each class in every row")  # fmt: skip
        return np.array(value, dtype=np.uint8)
    row = np.zeros(len(labels.classes), dtype=np.uint8)
    for part in _split(value):
        row[_place(part, places, where)] = 1
    return row


def places_of(labels: Labels, names: tuple[str, ...]) -> dict[str, int]:
    """Return the place of each class by what a table may say: its name, or its number where `names` are given."""
    if names:
        return {**{name: at for at, name in enumerate(names)}, **{str(at): at for at in range(len(names))}}
    return {name: at for at, name in enumerate(labels.classes)}


def _place(value: object, places: dict[str, int], where: str) -> int:
    number = _number(value)
    name = str(value) if str(value) in places or number is None else _number_name(number)
    if name not in places:
        known = list(places)
        raise DataError(
            f"{where} is of the class '{name}'", f"no row for training is: its classes are {', '.join(known[:10])}",
            f"{suggestion(name, known)}; or leave the row out",
        )  # fmt: skip
    return places[name]


def _split(value: object) -> list[object]:
    parts = value.split(SEPARATOR) if isinstance(value, str) else value if isinstance(value, tuple) else (value,)
    return [part.strip() if isinstance(part, str) else part for part in parts if part != ""]


def _numbers(values: Any) -> list[float] | None:
    """Return the values as numbers, None where one of them is none."""
    found = [_number(value) for value in values]
    return None if any(number is None for number in found) else [number for number in found if number is not None]


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in value else None


def _number_name(number: float) -> str:
    return str(int(number)) if number.is_integer() else repr(number)
