"""Holds what `--json` writes against its declaration, in tests alone: a user loses no result by a key too many."""

from __future__ import annotations

from paceline.cli.json.shapes import undeclared
from paceline.cli.output import CHECKS


def be_strict() -> None:
    """Have this process end with an error where a command writes other keys than its shape declares."""
    if hold not in CHECKS:
        CHECKS.append(hold)


def hold(shape: str, keys: set[str]) -> None:
    """Raise AssertionError where the keys are not as the shape declares them."""
    off = undeclared(shape, keys)
    assert not off, f"{shape}: {off} are not as cli/json/shapes.py declares them"
