"""Foreign models train as in a loop of plain torch, or are refused with a reason: the table, and a slice of it anew."""

from __future__ import annotations

import json
from typing import Any

import pytest
from foreign_catalogue import ROWS, Foreign
from foreign_held import AXES, look
from write_foreign import ALL, PAGE, RECORD, page, verdict

FOUND = {record["name"]: record for record in json.loads(RECORD.read_text(encoding="utf-8"))}
AGAIN = "run tests/foreign/write_foreign.py again"


def test_the_table_has_every_row_and_none_is_silently_different() -> None:
    assert list(FOUND) == [row.name for row in ALL], AGAIN
    assert PAGE.read_text(encoding="utf-8") == page(list(FOUND.values())), AGAIN
    families = [row for row in ROWS if row.kind == "Hugging Face"]
    assert len(families) >= 20
    assert len(ROWS) - len(families) >= 25
    assert [name for name, record in FOUND.items() if verdict(record) == "silent"] == []


@pytest.mark.parametrize("name", FOUND)
def test_every_closed_axis_has_a_reason(name: str) -> None:
    closed = FOUND[name].get("closed", {})
    assert all(closed[axis] for axis in AXES if axis in closed)
    assert "refused" not in FOUND[name] or FOUND[name]["refused"]


def told_by(record: dict[str, Any]) -> tuple[str, Any]:
    """Return what the table says of a program: its verdict, and the axes that are open to it."""
    return verdict(record), record.get("open")


@pytest.mark.parametrize("row", [row for row in ROWS if row.slice], ids=lambda row: row.name)
def test_a_slice_of_the_table(row: Foreign) -> None:
    record = look(row, whole=False)
    assert told_by(record) == told_by(FOUND[row.name]), (AGAIN, record)


@pytest.mark.deep
@pytest.mark.parametrize("row", [row for row in ROWS if not row.slice and row.name in FOUND], ids=lambda row: row.name)
def test_the_rest_of_the_table(row: Foreign) -> None:
    record = look(row, whole=True)
    assert told_by(record) == told_by(FOUND[row.name]), (AGAIN, record)
