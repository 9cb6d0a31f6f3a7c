"""docs/reference/journal.md tells what is declared, and its examples are what is written and read."""

from __future__ import annotations

import json
import math
import re
import runpy
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import report_journals as journals
from hypothesis import given
from hypothesis import strategies as st

from paceline.report.html import render_html
from paceline.report.summary import summarise
from paceline.run.record.journal import Journal
from paceline.spec.journal.kinds import BY_KIND, RunEnded, StepRecord, parse
from paceline.spec.journal.reading import read_journal, read_records
from paceline.spec.journal.record import SCHEMA, Record, fields_of, plain

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "journal.md").read_text(encoding="utf-8")
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


def test_the_page_is_what_is_declared() -> None:
    told = runpy.run_path(str(DOCS / "scripts" / "write_journal.py"))["page"](PAGE)
    assert told == PAGE, "run: python docs/scripts/write_journal.py"
    assert list(BY_KIND) == [name for name in sections() if name in BY_KIND]


def known(line: dict[str, Any]) -> Record:
    record = parse(line)
    assert record is not None
    return record


@pytest.mark.parametrize("kind", BY_KIND)
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
    for kind in BY_KIND:
        for example in examples(sections()[kind]):
            journal.write(known(example))
    journal.close()
    summary = summarise(read_journal(tmp_path))
    assert summary.status == "failed" and summary.steps_done == 2 and len(summary.decisions) == 1
    assert summary.promise("step_time").verdict == "inside"
    assert "</html>" in render_html(summary)


@pytest.mark.parametrize("kind", BY_KIND)
def test_what_is_written_is_what_was_read(kind: str, tmp_path: Path) -> None:
    found = examples(sections()[kind])
    journal = Journal(tmp_path)
    for example in found:
        journal.write(known(example))
    journal.close()
    # A fault's rank, a step's loss scale are there only where there are any; `attempt` is set in reading.
    assert [{**line, "attempt": 1} for line in found] == list(read_journal(tmp_path))
    again = list(read_records(tmp_path))
    assert [plain(record)["kind"] for record in again] == [kind] * len(found)


def test_numbers_that_json_lacks_are_numbers_again(tmp_path: Path) -> None:
    (second,) = (line for line in examples(sections()["step"]) if line["loss"] == "nan")
    record = known(second)
    assert isinstance(record, StepRecord)
    assert record.loss is not None and math.isnan(record.loss) and record.grad_norm == math.inf


def test_kinds_and_fields_of_later_versions_are_passed_over() -> None:
    assert parse({"kind": "weather", "time": 1.0}) is None
    ended = parse({"kind": "run_ended", "time": 1.0, "status": "complete", "mood": "fine"})
    assert ended == RunEnded("complete", None, None, None, time=1.0)


@given(st.sampled_from(sorted(BY_KIND)), st.data())
def test_no_line_is_too_strange_to_be_read(kind: str, data: st.DataObject) -> None:
    junk = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()),
                     st.dictionaries(st.text(), st.integers()), st.just(10**400))  # fmt: skip
    line = {each.key: data.draw(junk) for each in fields_of(BY_KIND[kind])}
    record = known({"kind": kind, **line, "time": data.draw(junk), "attempt": data.draw(junk)})
    assert type(record) is BY_KIND[kind] and hash(record.KIND)
    for each in fields_of(type(record)):
        value = getattr(record, each.name)
        assert each.type is Any or isinstance(value, (*(typing.get_origin(part) or part for part in parts(each.type)),))


def parts(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
