"""A run's directory that cannot be written is told before anything is computed, and why: a full disk is one reason."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import StorageError
from paceline.session.start import check_writable


@pytest.mark.parametrize("below", ["", "runs/mine"])
def test_a_file_in_its_place_is_named_and_no_space_is_asked_for(tmp_path: Path, below: str) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError) as caught:
        check_writable(tmp_path / "taken" / below)
    assert "is a file, and no folder" in caught.value.because and "space" not in caught.value.try_


@pytest.mark.parametrize(("number", "says"), [(errno.ENOSPC, "free space"), (errno.EACCES, "where you may write")])
def test_what_to_try_follows_from_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def refused(**_: Any) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(StorageError) as caught:
        check_writable(tmp_path / "run")
    assert says in caught.value.try_ and str(tmp_path / "run") in caught.value.because
