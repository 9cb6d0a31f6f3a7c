"""The guide on backtesting names every column that is read and every convention that there is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from paceline.backtest.schema import KINDS, Origin, StepRow
from paceline.plan.flops import CONVENTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "plan" / "backtesting.md").read_text(encoding="utf-8")


def test_every_column_of_a_step_is_in_the_guide() -> None:
    own = {field.name for field in dataclasses.fields(StepRow)} - {field.name for field in dataclasses.fields(Origin)}
    assert sorted(name for name in own if f"`{name}`" not in PAGE) == []


def test_the_columns_that_a_table_needs_and_those_that_tell_its_kind_are_in_the_guide() -> None:
    for signature in (columns for _, columns in KINDS.values()):
        assert any(f"`{name}`" in PAGE for name in signature)
    assert all(f"`{name}`" in PAGE for name in KINDS["steps"][1])


def test_every_convention_is_in_the_guide() -> None:
    assert [name for name in CONVENTIONS if f"| `{name}` |" not in PAGE] == []
