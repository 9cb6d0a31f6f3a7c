"""`paceline logs`: what failed first comes first, ranks are merged by their moments, and followed over rotations."""

from __future__ import annotations

import json
import resource
import threading
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.observe.logs.read import LogFollower, first_failure, lines_of, merged, ranks_with_logs
from paceline.run.record.lines import append_line
from paceline.spec.journal.kinds import FaultRecord, RunEnded
from paceline.spec.journal.line import line_of
from paceline.spec.journal.redact import Redactor
from paceline.supervise.logs.files import ERR, OUT, RankLog, log_path

TRACE = 'Traceback (most recent call last):\n  File "model.py", line 3\nValueError: three\n'


class Moments:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of which rank 1 failed."""
    clock = Moments()
    logs = [RankLog(tmp_path, rank, 1 << 20, 2, Redactor(), clock=clock) for rank in (0, 1, 10)]
    for step in range(3):
        for log in logs:
            log.write(OUT, f"step {step}\n".encode())
    logs[1].write(ERR, b"\x1b[31mred\x1b[0m <b>bold</b>\n")
    for log in logs:
        log.close()
    error = {"what": "ValueError: three", "because": "of it", "try": "", "rank": 1, "traceback": TRACE}
    for record in (FaultRecord("ValueError: three", "of it", 1), RunEnded("failed", 1, error, 2)):
        append_line(tmp_path / "journal" / "0001.jsonl", line_of(record))
    return tmp_path


def test_ranks_are_merged_by_their_moments(run_dir: Path) -> None:
    assert ranks_with_logs(run_dir) == [0, 1, 10]
    found = [(line.rank, line.text) for line in merged(run_dir, [0, 1, 10])]
    assert found[:4] == [(0, "step 0"), (1, "step 0"), (10, "step 0"), (0, "step 1")] and len(found) == 10


def test_the_first_traceback_of_the_first_rank_comes_first(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(TRACE + "failed   rank 1 first: ValueError: three: of it\n")
    assert shown.endswith("\nstep 0\nstep 1\nstep 2\n")
    assert main(["logs", str(run_dir), "--merge", "--last", "2"]) == 0
    last = capsys.readouterr().out.splitlines()
    assert last[0].startswith("Traceback") and last[-2].split()[1:] == ["rank", "10", "step", "2"]


def test_json_holds_failure_ranks_and_lines(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(run_dir), "--rank", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == [0, 1, 10] and found["failure"]["rank"] == 1
    assert [line["stream"] for line in found["lines"]] == ["out", "out", "out", "err"]


def test_mistakes_are_told(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["--rank", "7"], "has no log of rank 7"), (["--follow", "--json"], "--follow with --json"),
        (["--last", "0"], "--last 0"),
    ):  # fmt: skip
        assert main(["logs", str(run_dir), *words]) == 2
        assert told in capsys.readouterr().err
    assert main(["logs", str(tmp_path / "nowhere")]) == 2


def test_a_run_that_did_not_fail_has_no_failure(tmp_path: Path) -> None:
    assert first_failure(tmp_path) is None
    append_line(tmp_path / "journal" / "0001.jsonl", line_of(FaultRecord("lost", "gone", 1)))
    append_line(tmp_path / "journal" / "0001.jsonl", line_of(RunEnded("complete", 0, None, 2)))
    assert first_failure(tmp_path) is None


def test_following_gives_each_line_once_over_files_that_are_set_aside(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0, 4096, 3, Redactor())
    follower, seen = LogFollower(tmp_path), []
    for number in range(150):
        log.write(OUT, f"line {number} {'x' * 20}\nhalf".encode())
        log.write(OUT, b"\n")
        if number % 17 == 0:
            seen += follower.new()
    log.close()
    seen += follower.new()
    assert [line.text for line in seen] == [line.text for line in lines_of(tmp_path, 0)]
    assert len(seen) == 300 and log_path(tmp_path, 0, 1).exists()
    with log_path(tmp_path, 0).open("ab") as file:
        file.write(b"2026-01-01T00:00:00.000Z out not who")
    assert follower.new() == []


def test_following_a_rank_that_prints_fast_misses_and_repeats_no_line(tmp_path: Path) -> None:
    """Files are set aside while they are looked for, and the disk's number of one that is gone is another's."""
    lines, follower, found = 500, LogFollower(tmp_path, [0]), list[str]()

    def print_fast() -> None:
        log = RankLog(tmp_path, 0, 300, 100, Redactor())
        for number in range(lines):
            log.write(OUT, f"line {number}\n".encode())
            if number % 20 == 0:
                caught_up.wait(0.004)
        log.close()

    caught_up = threading.Event()
    printing = threading.Thread(target=print_fast)
    printing.start()
    while printing.is_alive():
        found += [line.text for line in follower.new()]
    found += [line.text for line in follower.new()]
    assert found == [f"line {number}" for number in range(lines)]


def test_a_file_that_took_the_place_of_one_that_is_gone_is_read_from_its_beginning(tmp_path: Path) -> None:
    """With a single file kept, the disk gives the number of the last one to the next."""
    log, follower, found = RankLog(tmp_path, 0, 200, 0, Redactor()), LogFollower(tmp_path, [0]), list[str]()
    for number in range(60):
        log.write(OUT, f"line {number}\n".encode())
        found += [line.text for line in follower.new()]
    assert found == [f"line {number}" for number in range(60)]


def test_more_ranks_than_files_may_be_open_are_merged(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    ranks = range(300)
    for rank in ranks:
        log_path(tmp_path, rank).write_text("".join(f"2026-01-01T00:00:0{step}.000Z out {rank}\n" for step in (0, 1)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    has_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, has_open + 200), hard))
    try:
        found = [line.text for line in merged(tmp_path, ranks)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == [str(rank) for _ in (0, 1) for rank in ranks]


def test_a_line_of_another_form_is_text(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log_path(tmp_path, 0).write_text("by hand\n")
    assert [line.text for line in lines_of(tmp_path, 0)] == ["by hand"]
