"""A growing journal is read line by line: each record once, none before its end is written, over all starts."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest

from paceline.observe import follow
from paceline.observe.follow import Follower
from paceline.patience import Patience
from paceline.run.record.journal import Journal
from paceline.spec.journal.kinds import LoggedRecord, RunEnded, StepRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.journal.record import Record


def journal(run_dir: Path, number: int = 1) -> Path:
    (run_dir / "journal").mkdir(parents=True, exist_ok=True)
    return run_dir / "journal" / f"{number:04d}.jsonl"


def line(step: int, **more: object) -> bytes:
    return json.dumps({"schema": 1, "kind": "step", "time": 100.0 + step, "step": step, **more}).encode() + b"\n"


def add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def steps(records: list[Record]) -> list[tuple[int | None, int | None]]:
    return [(record.attempt, record.step) for record in records if isinstance(record, StepRecord)]


def test_a_run_that_is_not_there_yet_has_no_records(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "run")
    assert follower.new() == []
    add(journal(tmp_path / "run"), line(1))
    assert steps(follower.new()) == [(1, 1)]
    assert follower.new() == []


def test_a_line_without_its_end_waits_for_it(tmp_path: Path) -> None:
    follower, path = Follower(tmp_path), journal(tmp_path)
    whole = line(2, loss=1.5)
    add(path, line(1) + whole[:-20])
    assert steps(follower.new()) == [(1, 1)]
    add(path, whole[-20:-1])  # a whole object, but its end of line is not written yet
    assert follower.new() == []
    add(path, whole[-1:])
    assert steps(follower.new()) == [(1, 2)]


def test_a_line_that_was_cut_short_for_good_is_passed_over(tmp_path: Path) -> None:
    follower, path = Follower(tmp_path), journal(tmp_path)
    add(path, line(1) + line(2)[:-20])
    assert steps(follower.new()) == [(1, 1)]
    add(path, b"\n" + line(3))  # as a supervisor writes behind a killed process
    assert steps(follower.new()) == [(1, 3)]
    add(path, b"[1]\n\xff\xfe\n{}\n" + line(4))
    assert steps(follower.new()) == [(1, 4)]


def test_the_torn_end_of_an_older_start_and_the_next_start(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    add(journal(tmp_path), line(1) + line(2)[:-20])
    assert steps(follower.new()) == [(1, 1)]
    add(journal(tmp_path, 2), line(2))
    assert steps(follower.new()) == [(2, 2)]
    add(journal(tmp_path, 2), line(3)[:-1])  # the newest start may still be writing it
    assert follower.new() == []
    add(journal(tmp_path, 3), line(4))
    assert steps(follower.new()) == [(2, 3), (3, 4)]
    assert [record["step"] for record in read_journal(tmp_path)] == [1, 2, 3, 4]


def test_a_file_that_began_anew_is_read_anew(tmp_path: Path) -> None:
    follower, path = Follower(tmp_path), journal(tmp_path)
    add(path, line(1) + line(2))
    assert len(follower.new()) == 2
    other = path.with_name("other")
    other.write_bytes(line(7))
    other.replace(path)
    assert steps(follower.new()) == [(1, 7)]


def test_unknown_kinds_are_lines_and_no_records(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    add(journal(tmp_path), b'{"kind":"of tomorrow"}\n' + line(1))
    add(journal(tmp_path).with_name("notes.txt"), line(9))
    add(journal(tmp_path).with_name("1.old.txt"), line(9))
    assert [each["kind"] for each in Follower(tmp_path).lines()] == ["of tomorrow", "step"]
    assert steps(follower.new()) == [(1, 1)]


def test_files_of_watchers_and_of_other_nodes_are_followed_too(tmp_path: Path) -> None:
    follower, path = Follower(tmp_path), journal(tmp_path, 2)
    (path.parent / "nodes").mkdir()
    add(path, line(1))
    add(path.with_name("alerts-0001.jsonl"), b'{"kind":"alert","time":1.0}\n{"kind":"alert","ti')
    add(path.parent / "nodes" / "0001-b.jsonl", b'{"kind":"node","time":1.0,"attempt":1}\n')
    found = list(follower.lines())
    assert [(each["kind"], each["attempt"]) for each in found] == [("step", 2), ("alert", 2), ("node", 1)]
    add(path.with_name("alerts-0001.jsonl"), b'me":2.0}\n')
    assert [each["time"] for each in follower.lines()] == [2.0]


def test_of_what_other_nodes_wrote_before_the_end_is_enough(tmp_path: Path) -> None:
    add(journal(tmp_path), line(1))
    path = tmp_path / "journal" / "nodes" / "0001-b.jsonl"
    path.parent.mkdir()
    for index in range(100):
        add(path, json.dumps({"kind": "node", "time": float(index), "attempt": 1}).encode() + b"\n")
    follower = Follower(tmp_path, node_bytes=200)
    found = [each["time"] for each in follower.lines() if each["kind"] == "node"]
    assert found == [float(index) for index in range(100 - len(found), 100)] and 0 < len(found) < 10
    add(path, b'{"kind":"node","time":100.0}\n')
    assert [each["time"] for each in follower.lines()] == [100.0]


def test_earlier_starts_can_be_passed_over(tmp_path: Path) -> None:
    add(journal(tmp_path, 1), line(1))
    add(journal(tmp_path, 2), line(2))
    follower = Follower(tmp_path, after=1)
    assert steps(follower.new()) == [(2, 2)]
    add(journal(tmp_path, 3), line(3))
    assert steps(follower.new()) == [(3, 3)]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_however_it_is_cut_each_record_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(follow, "CHUNK_BYTES", chunk)
    draw, path, follower = random.Random(chunk), journal(tmp_path), Follower(tmp_path)
    rest = b"".join(line(step, note="é" * draw.randrange(40)) for step in range(1, 60))
    found: list[Record] = []
    while rest:
        size = draw.randrange(1, 300)
        add(path, rest[:size])
        rest = rest[size:]
        found += follower.new()
    assert steps(found) == [(1, step) for step in range(1, 60)]


def _write_for_ever(run_dir: Path) -> None:
    journal = Journal(run_dir)
    step = 0
    while True:
        step += 1
        journal.write(LoggedRecord(step, "writer", {"value": 1.0}, time=0.0))


def test_what_a_killed_writer_wrote_is_read_beside_it_and_after_it(tmp_path: Path) -> None:
    """A reader beside a writer that dies by SIGKILL sees every record of the file, once and in order."""
    follower, seen = Follower(tmp_path), []
    for start in (1, 2, 3):
        writer = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(tmp_path,))
        writer.start()
        patience, before = Patience(60), len(seen)
        while len(seen) < before + 200 and not patience.is_over:
            seen += follower.new()
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        seen += follower.new()
        assert seen[-1].attempt == start
    last = Journal(tmp_path)
    last.write(RunEnded("complete", 0, None, 1))
    last.close()
    seen += follower.new()
    whole = [(each["attempt"], each.get("step")) for each in read_journal(tmp_path)]
    assert [(each.attempt, getattr(each, "step", None)) for each in seen] == whole
    for start in (1, 2, 3):
        own = [step for attempt, step in whole if attempt == start]
        assert own == list(range(1, len(own) + 1))
        assert len(own) >= 200
