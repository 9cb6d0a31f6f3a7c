"""Copies in remote storage: a run goes on from them, and what fails is a warning."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks
from survive_runs import STEPS, records, through, training, values_of
from tests_shared import SEQ_LEN

from paceline.checkpoint.tiers import remote
from paceline.checkpoint.tiers.remote import Copied, RemoteStore, fetch_newer
from paceline.errors import StorageError
from paceline.run.loop.under_plan import UnderPlan
from paceline.run.survive.saving import remote_copies
from paceline.run.survive.survivor import Brought
from paceline.units import Amount


def _trained(folder: str, url: str) -> None:
    through(training(Path(folder), remote=url, remote_every=Amount(4, "steps"), remote_keep=2))


def _resumed(folder: str, url: str) -> tuple[int, list[str]]:
    run = training(Path(folder), remote=url)
    assert run._under.restored is not None
    return run.progress.step, run._under.restored.notes


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_from_remote_storage_where_its_directory_is_lost(tmp_path: Path, ranks: int) -> None:
    url = f"file://{tmp_path}/far"
    run_ranks(_trained, ranks, str(tmp_path / "run"), url)
    assert RemoteStore(url).names()[0] == f"step-{STEPS:08d}"
    told = [record for record in records(tmp_path / "run", "checkpoint") if record.get("tier") == "remote"]
    assert [record["step"] for record in told] == [4, 8] and all(record["stall_seconds"] == 0 for record in told)
    assert values_of(tmp_path / "run")[STEPS]
    for step, notes in run_ranks(_resumed, ranks, str(tmp_path / "elsewhere"), url):
        assert step == STEPS and any("fetched step-00000008" in note for note in notes)
    assert values_of(tmp_path / "elsewhere") == {STEPS: values_of(tmp_path / "run")[STEPS]}


def _unreachable(folder: str) -> None:
    through(training(Path(folder), remote="file:///proc/nowhere"))


def test_storage_that_takes_nothing_costs_a_warning_for_each_copy(tmp_path: Path) -> None:
    run_ranks(_unreachable, 1, str(tmp_path))
    faults = [record["what"] for record in records(tmp_path, "fault")]
    assert faults and all("was not copied: file:///proc/nowhere" in what for what in faults)
    assert sorted(values_of(tmp_path)) == [2, 4, 6, 8]


class Hanging(RemoteStore):
    """Storage that never answers."""

    def fetch_newest(self, root: Path, newer_than: int, own: object = None) -> Path | None:
        threading.Event().wait()
        return None


def test_storage_that_never_answers_costs_a_note_where_there_are_checkpoints_and_else_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    through(training(tmp_path / "run"))
    monkeypatch.setattr(remote, "RemoteStore", Hanging)
    url = f"file://{tmp_path}/far"
    told = fetch_newer(url, [tmp_path / "run" / "checkpoints"], tmp_path / "into", 0.1)
    assert len(told) == 1 and told[0].startswith(f"{url} has not answered: after")
    with pytest.raises(StorageError, match="has not answered"):
        fetch_newer(url, [tmp_path / "none"], tmp_path / "into", 0.1)


class Waits(RemoteStore):
    """Storage that takes a checkpoint when it is told to."""

    goes_on = threading.Event()

    def copy(self, *given: Any) -> Copied:
        assert self.goes_on.wait(60)
        return super().copy(*given)


def test_a_copy_that_ends_after_its_world_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is the one that waited for it: a peer is lost while copies are made, which this process goes on with."""
    monkeypatch.setattr(remote_copies, "RemoteStore", Waits)
    run = training(tmp_path / "run", remote=f"file://{tmp_path}/far", remote_every=Amount(100, "steps"))
    for batch in run:
        step = run.step(batch).step
        if step in (3, 4):
            run.save()
        if step == 4:
            run.take_down()
            run._enter(Brought(None, None, True))
            Waits.goes_on.set()
    copied = [record["step"] for record in records(tmp_path / "run", "checkpoint") if record.get("tier") == "remote"]
    assert copied == [3, 4, STEPS]
    assert len(RemoteStore(f"file://{tmp_path}/far").names()) == 3


def test_a_world_that_is_formed_again_asks_no_remote_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has made what is there itself, and a slow answer would be waited for in each recovery."""
    run = training(tmp_path / "run", remote=f"file://{tmp_path}/far")
    through(run)
    run.take_down()
    monkeypatch.setattr(remote, "RemoteStore", Hanging)
    built = UnderPlan(run._run, run.brief.plan, run.world, run.source, SEQ_LEN, looks_far=False)
    assert built.restored is not None and built.restored.progress.step == STEPS
