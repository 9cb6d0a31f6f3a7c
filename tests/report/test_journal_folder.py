"""The journal's folder holds what others leave there too; readers take the starts and nothing else."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import report_journals as journals

from paceline.errors import StorageError
from paceline.report.build import build_report
from paceline.run.record.journal import Journal
from paceline.spec.journal.kinds import RunStarted, parse
from paceline.spec.journal.reading import read_journal
from paceline.spec.journal.record import now, read
from paceline.supervise.again.mark_journal import mark_end


def write_start(run_dir: Path) -> Journal:
    """Write a complete start, as a run does."""
    journal = Journal(run_dir)
    for record in journals.complete():
        told = parse(record)
        assert told is not None
        journal.write(told)
    journal.close()
    return journal


def litter(folder: Path) -> None:
    """Leave what editors, file managers and people leave."""
    for name in ("0001.jsonl~", ".0001.jsonl.swp", ".DS_Store", "0001.bak.jsonl", "0001 (copy).jsonl", "1a.jsonl"):
        (folder / name).write_bytes(b'{"kind":"step","step":99999}\n\x00\xff')
    (folder / "old").mkdir()
    (folder / "old" / "0001.jsonl").write_text('{"kind":"step","step":99999}\n')
    (folder / "0002.jsonl").mkdir()  # a folder with the name that the next start would take


def test_stray_files_change_neither_report_nor_resume(tmp_path: Path) -> None:
    write_start(tmp_path)
    records = list(read_journal(tmp_path))
    litter(tmp_path / "journal")
    assert list(read_journal(tmp_path)) == records
    assert build_report(tmp_path).status == "complete"
    again = Journal(tmp_path)
    again.write(now(read(RunStarted, {"attempt": again.attempt})))
    again.close()
    assert again.path.name == "0003.jsonl"
    mark_end(tmp_path, 137, {"what": "rank 1 was ended", "because": "SIGKILL"})
    assert [record["kind"] for record in read_journal(tmp_path)][-3:] == ["run_started", "fault", "run_ended"]
    assert not (tmp_path / "journal" / "0001.bak.jsonl").read_bytes().count(b"run_ended")


def test_starts_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    for number in (10000, 9999, 2):
        (folder / f"{number:04d}.jsonl").write_text(json.dumps({"kind": "decision", "what": str(number)}) + "\n")
    assert [record["what"] for record in read_journal(tmp_path)] == ["2", "9999", "10000"]
    assert Journal(tmp_path).path.name == "10001.jsonl"


@pytest.mark.parametrize(
    "line",
    ["[]", "7", "null", '"x"', "{}", '{"kind": []}', '{"kind": {"a": 1}}', '{"kind": "step", "step": "x", "loss": []}',
     '{"kind": "run_started"}', '{"kind": "run_ended"}', '{"kind": "verify"}', '{"kind": "fault", "what": 3}',
     '{"kind": "step", "step": 3, "time": "x", "attempt": "y"}', '{"kind": "ste'],
)  # fmt: skip
def test_a_strange_line_is_no_traceback(tmp_path: Path, line: str) -> None:
    lines = write_start(tmp_path).path.read_text().splitlines()
    for content in ([line, *lines], [*lines, line], [lines[0], line, *lines[1:]]):
        (tmp_path / "journal" / "0001.jsonl").write_text("\n".join(content) + "\n")
        assert build_report(tmp_path).attempts
    (tmp_path / "journal" / "0001.jsonl").write_text(line + "\n")
    with contextlib.suppress(StorageError):  # nothing but the line: there may be no start to report
        build_report(tmp_path)


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    lines = ["17", "null", '"text"', "[1, 2]", "{}", '{"kind":"decision","what":"plan"}', '{"kind":"ste']
    (tmp_path / "journal" / "0001.jsonl").write_text("\n".join(lines))
    assert list(read_journal(tmp_path)) == [{"kind": "decision", "what": "plan", "attempt": 1}]
