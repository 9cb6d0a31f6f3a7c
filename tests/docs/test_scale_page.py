"""The page on scale names each file that asks every rank for something: what such files hold grows with the ranks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
OF_OBJECTS = {"all_gather_object", "gather_object"}
LISTED = re.compile(r"`([\w/]+\.py)`")


def asks_every_rank(call: ast.Call) -> bool:
    """Return whether a call is a gather of objects, or that of a world."""
    if not isinstance(call.func, ast.Attribute):
        return False
    of = ast.unparse(call.func.value)
    return call.func.attr in OF_OBJECTS or (
        call.func.attr == "gather" and (of in ("world", "dist", "self.world", "self._world"))
    )


def asking() -> set[str]:
    return {
        str(path.relative_to(SOURCE))
        for room in ("run", "checkpoint", "session", "launch", "task")
        for path in (SOURCE / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and asks_every_rank(node)
    }


def test_the_page_names_who_asks_every_rank() -> None:
    listed = {file for row in PAGE.partition("**Who asks every rank.**")[2].splitlines() if row.startswith("| `")
              for file in LISTED.findall(row.split("|")[1])}  # fmt: skip
    assert len(listed) > 10
    assert listed == asking()
