"""Files beside the journals of starts: a disk that is full costs no record that is written again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from paceline.spec.journal import beside as module
from paceline.spec.journal.beside import BesideFile, read_beside
from paceline.spec.journal.kinds import DecisionRecord


def decided(what: str) -> DecisionRecord:
    return DecisionRecord(what, None, None, "because", None)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes that the disk has left, to be changed."""
    write, room = os.write, [10_000]

    def of_a_disk(file: int, line: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "no space")
        taken = write(file, line[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", of_a_disk)
    return room


def test_a_record_of_which_a_full_disk_took_a_part_is_not_lost(tmp_path: Path, room: list[int]) -> None:
    """`write` tells that it took less, and raises nothing: the rest belongs to no line of its own."""
    beside = BesideFile(tmp_path, "alerts")
    beside.write(decided("first"))
    for left, what in ((30, "second"), (5, "third"), (0, "fourth")):  # cut, cut again, and refused
        room[0] = left
        beside.write(decided(what))
    room[0] = 10_000
    beside.write(decided("fifth"))
    beside.close()
    found = [record.what for record in read_beside(tmp_path, DecisionRecord)]
    assert found == ["first", "second", "third", "fourth", "fifth"]


def test_a_part_of_a_record_that_was_let_go_of_takes_no_other_with_it(
    tmp_path: Path, room: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only so many wait: the one behind it was written into the same line."""
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    beside = BesideFile(tmp_path, "alerts")
    for left, what in ((30, "first"), (0, "second"), (0, "third"), (0, "fourth"), (10_000, "fifth")):
        room[0] = left
        beside.write(decided(what))
    beside.close()
    assert [record.what for record in read_beside(tmp_path, DecisionRecord)] == ["third", "fourth", "fifth"]
