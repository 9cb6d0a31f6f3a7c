"""What code depends on is no word inside a text: a decision that is looked for is named by one constant everywhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import paceline
from paceline.spec.journal.records import decided

LOOKED_FOR = {value for name, value in vars(decided).items() if name.isupper()}
MAKERS = ("DecisionRecord", "decided", "_decided")
FILES = [path for path in Path(paceline.__file__).parent.rglob("*.py") if path.name != "decided.py"]


def is_what(node: ast.expr) -> bool:
    """Return whether an expression is what a record was made of: `record.what`, or `record.get("what")`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "what"
    named = node.args if isinstance(node, ast.Call) else [node.slice] if isinstance(node, ast.Subscript) else []
    return any(isinstance(each, ast.Constant) and each.value == "what" for each in named)


def words(node: ast.expr) -> list[str]:
    """Return the texts that an expression spells."""
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def spelled(tree: ast.Module) -> Iterator[tuple[int, object]]:
    """Yield the line and the text of what a decision is made with, or is looked for by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and is_what(node.left):
            yield from ((node.lineno, word) for each in node.comparators for word in words(each))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in MAKERS and node.args[0].value in LOOKED_FOR:
                yield node.lineno, node.args[0].value


def test_decisions_that_code_looks_for_are_named_once() -> None:
    found = [f"{path.name}:{line} {word!r}" for path in FILES if "what" in (text := path.read_text("utf-8"))
             for line, word in spelled(ast.parse(text))]  # fmt: skip
    assert len(LOOKED_FOR) == 6
    assert found == []


def test_a_word_is_found() -> None:
    texts = (
        "one.what == 'straggler'",
        "one.get('what') in ('x', 'y')",
        "DecisionRecord('rollback', 1)",
        "one['what'] != 'z'",
    )
    assert [word for text in texts for _, word in spelled(ast.parse(text))] == ["straggler", *"xy", "rollback", "z"]
