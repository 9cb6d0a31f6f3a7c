"""Files that are there in full or not at all: a write that fails leaves what was there, and nothing beside it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from paceline.durable import write_output, write_text
from paceline.errors import StorageError


def test_a_text_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "told.txt"
    for text in ("first\n", "µ, a second one\n"):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "picture.svg"
    write_text(path, "whole")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "half")
    with pytest.raises(StorageError, match=r"picture\.svg cannot be written") as told:
        write_output(path, "half")
    assert told.value.exit_code == 74 and "No space left" in told.value.because
    assert path.read_text(encoding="utf-8") == "whole" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        write_output(tmp_path / "nowhere" / "picture.svg", "whole")


def test_a_pipe_is_written_into_and_stays_one(tmp_path: Path) -> None:
    """A renamed file would stand in its place, and so in that of /dev/null or /dev/stdout where root is asked."""
    pipe, came = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: came.append(pipe.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    write_output(pipe, "told")
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]
    reader.join(60)
    assert came == ["told"]


def test_the_file_that_a_link_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    link = tmp_path / "link.svg"
    link.symlink_to(tmp_path / "kept" / "picture.svg")
    for text in ("first", "second"):
        write_output(link, text)
        assert link.is_symlink() and (tmp_path / "kept" / "picture.svg").read_text(encoding="utf-8") == text
