"""docs/reference/journal.md describes what is written: its examples parse, and every field in them is documented."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import report_journals as journals

from paceline.report.html import render_html
from paceline.report.summary import summarise
from paceline.run.record.journal import KINDS, SCHEMA, Journal, read_journal

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "journal.md").read_text(encoding="utf-8")
COMMON = {"schema", "kind", "time", "attempt"}


def sections() -> dict[str, str]:
    parts = re.split(r"^## (\w+)$", PAGE, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def examples(section: str) -> list[dict[str, Any]]:
    blocks = re.findall(r"```json\n(.*?)```", section, flags=re.S)
    return [json.loads(line) for block in blocks for line in block.splitlines()]


def documented(section: str) -> set[str]:
    cells = re.findall(r"^\| (`[^|]*`) \|", section, flags=re.M)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_examples_whose_fields_are_documented(kind: str) -> None:
    section = sections()[kind]
    found = examples(section)
    assert found
    for example in found:
        assert example["kind"] == kind and example["schema"] == SCHEMA
        assert set(example) - COMMON <= documented(section)
    assert documented(section) <= {name for example in found for name in example}, "a documented field has no example"


def test_synthetic_journals_write_documented_fields_only() -> None:
    for record in [*journals.complete(), *journals.resumed(), *journals.failed()]:
        assert set(record) - COMMON <= documented(sections()[record["kind"]])


def test_the_examples_make_a_journal_and_a_report(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for kind in KINDS:
        for example in examples(sections()[kind]):
            journal.write(kind, **{name: value for name, value in example.items() if name not in ("schema", "kind")})
    journal.close()
    summary = summarise(read_journal(tmp_path))
    assert summary.status == "failed" and summary.steps_done == 2 and len(summary.decisions) == 1
    assert summary.promise("step time").verdict == "inside"
    assert "</html>" in render_html(summary)
