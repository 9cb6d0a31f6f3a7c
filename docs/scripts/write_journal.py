"""Write the tables of docs/reference/journal.md from the declaration of the journal's records.

    python docs/scripts/write_journal.py

Rows of the table under each kind's heading are replaced; words around them and examples stay.
"""

from __future__ import annotations

import re
from pathlib import Path

from paceline.spec.journal.kinds import RECORDS
from paceline.spec.journal.record import Record, fields_of

PAGE = Path(__file__).parents[1] / "reference" / "journal.md"
HEAD = "| field | unit | meaning |\n|---|---|---|\n"


def rows(kind: type[Record]) -> str:
    """Return a kind's rows of the table of its fields."""
    return "".join(f"| `{each.key}` | {each.told.unit} | {each.told.meaning} |\n" for each in fields_of(kind))


def page(text: str) -> str:
    """Return the page with the rows of every kind as they are declared."""
    for kind in RECORDS:
        pattern = rf"(^## {kind.KIND}\n(?:(?!^## ).*\n)*?{re.escape(HEAD)})(?:\|.*\n)*"
        text, count = re.subn(pattern, lambda found, kind=kind: found[1] + rows(kind), text, flags=re.M)
        assert count == 1, f"{kind.KIND} has no heading with a table"
    return text.replace("|  |", "| |")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
