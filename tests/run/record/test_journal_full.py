"""A journal whose disk takes no more, or has gone: what waits is written in order, bounded, and nobody's run ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runs import wait_until

from paceline.errors import RunInUse, StorageError
from paceline.run.record import errand
from paceline.run.record import journal as journal_module
from paceline.run.record.journal import Journal
from paceline.run.record.waiting_lines import HeldLine, HeldLines
from paceline.said import flush_said, say_line
from paceline.spec.journal.kinds import DecisionRecord, FaultRecord, RunStarted, StepRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.journal.record import now, read


def step(number: int) -> StepRecord:
    return now(read(StepRecord, {"step": number, "seconds": {"total": 1.0}}))


@contextmanager
def full(descriptor: int) -> Iterator[None]:
    """Have writes to a descriptor fail as the kernel has them fail on a full disk."""
    real, device = os.dup(descriptor), os.open("/dev/full", os.O_WRONLY)
    os.dup2(device, descriptor)
    try:
        yield
    finally:
        os.dup2(real, descriptor)
        os.close(real)
        os.close(device)


class Told:
    """What a recorder does with what becomes of its journal."""

    def __init__(self, journal: Journal) -> None:
        self.faults: list[str] = []
        self.decisions: list[dict[str, Any]] = []
        self._journal = journal
        journal.tell_by(self.fault, self.decided)

    def fault(self, what: str, because: str) -> None:
        self.faults.append(because)
        self._journal.write(FaultRecord(what, because))

    def decided(self, what: str, before: Any, after: Any, because: str, evidence: Any) -> None:
        self.decisions.append(evidence)
        self._journal.write(DecisionRecord(what, before, after, because, evidence))


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setattr(journal_module, "RETRY_SECONDS", 0.0)
    opened = Journal(tmp_path)
    opened.write(now(read(RunStarted, {"attempt": 1})))
    opened.write(step(1))
    return opened


def said(run_dir: Path) -> list[Any]:
    return [record.get("step", record["kind"]) for record in read_journal(run_dir)]


def test_what_waits_is_written_in_order_and_the_warning_is_one(tmp_path: Path, journal: Journal) -> None:
    told = Told(journal)
    with full(journal._file):
        for number in range(2, 6):
            journal.write(step(number))
    assert said(tmp_path)[1:] == [1], "nothing could be written"
    journal.write(step(6))
    journal.write(step(7))
    journal.close()
    assert said(tmp_path)[1:] == [1, 2, "fault", 3, 4, 5, 6, "decision", 7]
    assert len(told.faults) == 1 and "No space left on device" in told.faults[0]
    (evidence,) = told.decisions
    assert evidence["held"] == 6 and not evidence["left_out"]


def test_a_line_that_was_half_written_is_finished(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room = os.write, [30]

    def some(descriptor: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(28, "No space left on device")
        taken = write(descriptor, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", some)
    journal.write(step(2))
    journal.write(step(3))
    assert said(tmp_path)[1:] == [1]
    room[0] = 10**6
    journal.close()
    assert said(tmp_path)[1:] == [1, 2, 3]


def test_a_folder_that_was_deleted_gets_its_journal_back_with_the_start(tmp_path: Path, journal: Journal) -> None:
    told = Told(journal)
    shutil.rmtree(tmp_path)
    journal.write(step(2))
    tmp_path.mkdir()
    journal.write(step(3))
    journal.close()
    assert said(tmp_path)[1:] == [2, "fault", 3, "decision"], "what had been written went with the folder"
    assert next(read_journal(tmp_path))["kind"] == "run_started"
    assert len(told.faults) == 1


def test_records_that_cannot_be_written_at_all_are_an_error_at_the_end(journal: Journal) -> None:
    with full(journal._file):
        journal.write(step(2))
        with pytest.raises(StorageError, match=r"1 records of the journal .* are lost"):
            journal.close()


def test_a_disk_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that is gone: here a pipe that nobody reads, into which a write waits for ever."""
    for name, value in (("RETRY_SECONDS", 0.0), ("HANGING_SECONDS", 0.2), ("is_remote", lambda folder: True)):
        monkeypatch.setattr(journal_module, name, value)
    journal = Journal(tmp_path)
    told, (reads, writes) = Told(journal), os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x" * 4096)
    os.set_blocking(writes, True)
    os.dup2(writes, journal._file)
    for number in range(1, 5):
        journal.write(step(number))
    assert len(told.faults) == 1 and "has not answered for 200 ms" in told.faults[0]
    read_ = bytearray()
    reader = threading.Thread(target=lambda: read_.extend(iter_pipe(reads)))
    reader.start()
    wait_until(lambda: len(journal._held) == 0)
    journal.write(step(5))
    with pytest.raises(StorageError, match="lost"):  # a pipe cannot be flushed to a disk
        journal.close()
    os.close(writes)
    reader.join()
    lines = [json.loads(line) for line in read_.lstrip(b"x").splitlines()]
    assert [line.get("step", line["kind"]) for line in lines] == [1, "fault", 2, 3, 4, 5, "decision"]


def iter_pipe(descriptor: int) -> Iterator[int]:
    """Yield the bytes of a pipe until its last writer has closed it."""
    while chunk := os.read(descriptor, 65536):
        yield from chunk


def test_a_fence_that_refuses_is_heard_through_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "is_remote", lambda folder: True)

    def taken_over() -> None:
        raise RunInUse("another start has taken over", "", "")

    journal = Journal(tmp_path, taken_over)
    with pytest.raises(RunInUse):
        journal.write(step(1))
    assert said(tmp_path) == []


MOUNTED = """22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /srv/of\\040all rw - nfs4 server:/all rw
31 22 0:41 / /data rw shared:9 - fuse.sshfs me@host:/ rw
32 31 0:42 / /data/fast rw - xfs /dev/nvme0 rw
"""


@pytest.mark.parametrize(
    ("place", "remote"), [("/home", False), ("/srv/of all/runs", True), ("/data/x", True), ("/data/fast/x", False)]
)
def test_whose_disk_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, remote: bool) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTED)
    monkeypatch.setattr(errand, "MOUNTS", tmp_path / "mountinfo")
    assert errand.is_remote(Path(place)) is remote


def test_what_waits_is_bounded_and_its_outline_stays() -> None:
    lines = HeldLines(most_lines=100, most_bytes=10**6)
    lines.add(HeldLine("run_started", b"s"))
    for number in range(1, 1001):
        lines.add(HeldLine("step", b"x" * 10, number))
        if number % 100 == 0:
            lines.add(HeldLine("checkpoint", b"c"))
        assert len(lines) <= 100
    kept = [held.step for held in lines._lines if held.kind == "step"]
    assert kept == sorted(kept) and kept[-10:] == list(range(991, 1001)) and kept[0] == 1
    assert lines.left_out == {"step": 1000 - len(kept)} and lines.steps_left_out is not None
    assert [held.kind for held in lines._lines].count("checkpoint") == 10
    assert lines._bytes == 10 * len(kept) + 10 + 1
    many = HeldLines(most_lines=100, most_bytes=500)
    for _ in range(1000):
        many.add(HeldLine("fault", b"x" * 10))
    assert len(many) <= 50 and many.left_out["fault"] == 1000 - len(many)
    many.add(HeldLine("clock", b"moved"))
    for _ in range(1000):
        many.add(HeldLine("fault", b"x" * 10))
    assert len(many) <= 50 and "clock" not in many.left_out, "without it all that follows is told by another clock"


def test_output_on_a_full_disk_costs_the_lines_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as stream:
        with full(stream.fileno()):
            say_line("one", stream)
        say_line("two", stream)
    assert path.read_text() == "one\ntwo\n"
    flush_said()
