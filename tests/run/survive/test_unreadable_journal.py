"""A start that needs what its journal says and cannot read it ends with an error of ours, and not with the system's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests_shared import plan_of

from paceline.errors import StorageError
from paceline.run.loop.resume import Progress
from paceline.run.survive.replay import expected_step
from paceline.run.survive.saving.known_saves import seconds_on_record
from paceline.run.updates.growth import followed_before
from paceline.run.updates.selection import chosen_before
from paceline.spec.layout import Layout

READERS: dict[str, Callable[[Path], object]] = {
    "the step that comes first": lambda folder: expected_step(folder, Progress(1, 8), plan_of(Layout()), (), "f"),
    "batches that followed": lambda folder: followed_before(folder, 1, "f"),
    "candidates that were chosen": lambda folder: chosen_before(folder),
    "seconds of the last save": seconds_on_record,
}


@pytest.mark.parametrize("what", READERS)
def test_a_journal_that_cannot_be_read_is_said(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "0001.jsonl").write_text('{"schema":1,"kind":"run_started","time":1.0,"attempt":1}\n')
    READERS[what](tmp_path)

    def refused(path: Path, mode: str = "r") -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(StorageError, match=r"the journal of .* cannot be read"):
        READERS[what](tmp_path)
