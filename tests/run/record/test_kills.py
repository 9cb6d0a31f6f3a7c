"""kill -9 at any moment loses no record that was written, and every reader copes with the line that was cut short."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.observe.logs.read import lines_of
from paceline.report.build import build_report
from paceline.run.record.lines import append_line
from paceline.spec.journal.kinds import StepRecord
from paceline.spec.journal.line import line_of
from paceline.spec.journal.reading import (
    final_steps,
    read_journal,
    read_kind,
    read_nodes,
    read_records,
    read_tail_step,
    records_back_to,
)
from paceline.spec.journal.record import read
from paceline.spec.journal.watching import NodeSample

# Writes steps and says of each that it is written, in the way of the journal; torch is not imported.
WRITER = """
import os, sys
from pathlib import Path
from paceline.run.record.journal import Journal
from paceline.spec.journal.kinds import StepRecord
from paceline.spec.journal.record import read
assert "torch" not in sys.modules
journal = Journal(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    journal.write(read(StepRecord, {"step": step, "loss": 1.0, "weight": 1.0, "seconds": {"total": 0.1}}))
    os.write(1, b"%d\\n" % step)
"""


def killed(run_dir: Path, after_bytes: int) -> int:
    """Kill a writer after so many bytes of its word, and return the last step of which it said that it is written."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(run_dir)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        told = writer.stdout.read(after_bytes)
        os.kill(writer.pid, signal.SIGKILL)
        told += writer.stdout.read()
    return max((int(line) for line in told.split(b"\n")[:-1]), default=0)


def assert_nothing_is_lost(run_dir: Path, last: int) -> None:
    newest = max((run_dir / "journal").glob("0*.jsonl"))
    steps = [step.step for step in read_kind(run_dir, StepRecord) if step.attempt == int(newest.stem)]
    assert steps[:last] == list(range(1, last + 1)) and len(steps) <= last + 1


def assert_readers_cope(run_dir: Path) -> None:
    newest = max((run_dir / "journal").glob("0*.jsonl"))
    whole = len(final_steps(list(read_journal(run_dir))))
    with newest.open("ab") as file:
        file.write(b'{"schema":1,"kind":"step","time":1.0,"step":99999,"lo')
    assert len(final_steps(list(read_journal(run_dir)))) == whole
    assert read_tail_step(run_dir) == whole == max(step.step or 0 for step in read_kind(run_dir, StepRecord))
    assert records_back_to(newest, 1) and list(read_records(run_dir))
    assert build_report(run_dir).steps_done == whole


def rounds(tmp_path: Path, count: int) -> None:
    draw = random.Random(count)
    for number in range(count):
        run_dir = tmp_path / str(number)
        last = killed(run_dir, draw.randrange(1, 3_000))
        assert last > 0
        assert_nothing_is_lost(run_dir, last)
        assert_readers_cope(run_dir)


def test_a_writer_that_is_killed_loses_no_record(tmp_path: Path) -> None:
    rounds(tmp_path, 10)


@pytest.mark.deep
def test_a_hundred_kills(tmp_path: Path) -> None:
    rounds(tmp_path, 100)


@pytest.mark.parametrize("seed", range(3))
def test_a_file_cut_anywhere_has_all_lines_before_the_cut(tmp_path: Path, seed: int) -> None:
    """What a kill in the middle of a write may leave, at every byte that could be the last."""
    draw = random.Random(seed)
    path = tmp_path / "journal" / "0001.jsonl"
    lines = [line_of(read(StepRecord, {"step": step, "loss": 1.0})) for step in range(1, 30)]
    content = b"".join(lines)
    path.parent.mkdir()
    for cut in (draw.randrange(len(content)) for _ in range(30)):
        path.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n")
        found = [step.step for step in read_kind(tmp_path, StepRecord)]
        assert found[:whole] == list(range(1, whole + 1)) and len(found) <= whole + 1
        append_line(path, lines[-1])
        assert [step.step for step in read_kind(tmp_path, StepRecord)][-1] == 29
        assert len(list(read_journal(tmp_path))) in (whole + 1, whole + 2)


def test_samples_of_nodes_and_logs_are_cut_as_well(tmp_path: Path) -> None:
    node = tmp_path / "journal" / "node-0001-n.jsonl"
    for step in range(3):
        append_line(node, line_of(read(NodeSample, {"step": step, "node": "n"})))
    node.write_bytes(node.read_bytes()[:-5])
    assert [sample.step for sample in read_nodes(tmp_path)] == [0, 1]
    log = tmp_path / "logs" / "rank-0.log"
    log.parent.mkdir()
    log.write_bytes(b"2026-01-01T00:00:00.000Z out one\n2026-01-01T00:0")
    assert [line.text for line in lines_of(tmp_path, 0)] == ["one"]
