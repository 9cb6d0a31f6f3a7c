"""Copies in remote storage: a run goes on from them, and what fails is a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import run_ranks
from survive_runs import STEPS, records, through, training, values_of

from paceline.checkpoint.tiers.remote import RemoteStore
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
