"""Checkpoints in remote storage: read back, kept by number, fetched where they are newest, checked when they arrive."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import load_sample, save_sample

from paceline.checkpoint import list_checkpoints, manifest, save_checkpoint
from paceline.checkpoint.manifest import MANIFEST_NAME
from paceline.checkpoint.tiers import remote
from paceline.checkpoint.tiers.remote import RUN, RemoteStore, fetch_newer
from paceline.errors import StorageError


@pytest.fixture
def store(tmp_path: Path) -> RemoteStore:
    """A store that holds checkpoints 1 and 2."""
    store = RemoteStore(f"file://{tmp_path}/far")
    for step in (1, 2):
        store.copy(save_sample(tmp_path / "here", step).path, keep_last=2)
    return store


def test_older_copies_go_and_a_name_is_never_taken_twice(tmp_path: Path, store: RemoteStore) -> None:
    copied = store.copy(save_sample(tmp_path / "here", 3).path, keep_last=2)
    assert copied.removed == ("step-00000001",) and store.names() == ["step-00000003", "step-00000002"]
    again = store.copy(tmp_path / "here" / "step-00000003", keep_last=2)
    assert again.url == copied.url, "the same one is not copied twice"
    other = store.copy(save_sample(tmp_path / "another", 3).path, keep_last=9)
    assert other.url.endswith("step-00000003.1")


@pytest.mark.parametrize("damage", ["cut", "lost", "manifest"])
def test_a_damaged_copy_is_passed_over(tmp_path: Path, store: RemoteStore, damage: str) -> None:
    (shard,) = (tmp_path / "far" / "step-00000002").glob("*.safetensors")
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "lost":
        shard.unlink()
    else:
        (shard.parent / MANIFEST_NAME).write_text("{}")
    path = store.fetch_newest(tmp_path / "new", 0)
    assert path is not None and path.name == "step-00000001"
    load_sample(path)
    assert [found.path for found in list_checkpoints(tmp_path / "new").complete] == [path]
    assert not list((tmp_path / "new").glob(".partial*"))


def test_lists_of_files_travel_too(tmp_path: Path, store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "INLINE_RANKS", 0)
    store.copy(save_sample(tmp_path / "here", 3).path, keep_last=2)
    path = store.fetch_newest(tmp_path / "new", 2)
    assert path is not None and (path / "files-00000.json").exists() and load_sample(path)["step"] == 3


def test_a_checkpoint_that_its_run_removes_meanwhile_is_copied_all_the_same(
    tmp_path: Path, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of storage that is slower than `keep_last` saves no copy ever came to its end."""
    path, copy = save_sample(tmp_path / "here", 3).path, type(store._files).put_file

    def slowly(files: object, *given: Any, **more: Any) -> None:
        copy(files, *given, **more)
        shutil.rmtree(path, ignore_errors=True)

    monkeypatch.setattr(type(store._files), "put_file", slowly)
    copied = store.copy(path, keep_last=2)
    assert not path.exists() and copied.url.endswith("step-00000003") and store.names()[0] == "step-00000003"
    found = store.fetch_newest(tmp_path / "new", 2)
    assert found is not None and load_sample(found)["step"] == 3


def test_nothing_older_is_fetched(tmp_path: Path, store: RemoteStore) -> None:
    assert store.fetch_newest(tmp_path / "new", 2) is None
    shutil.rmtree(tmp_path / "far")
    assert store.names() == [] and store.fetch_newest(tmp_path / "new", 0) is None


def test_what_comes_when_nobody_waits_any_more_is_no_checkpoint_of_the_run(
    tmp_path: Path, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run had gone on from what was there; its next start took what had come since, of another past, for newer."""
    goes_on, verify = threading.Event(), remote.verify_checkpoint
    monkeypatch.setattr(remote, "verify_checkpoint", lambda folder: (goes_on.wait(60), verify(folder))[1])
    with pytest.raises(StorageError, match="has not answered"):
        fetch_newer(store.url, [tmp_path / "new"], tmp_path / "new", 0.1)
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "paceline-fetch":
            thread.join(60)
    assert not list_checkpoints(tmp_path / "new").complete
    assert not list((tmp_path / "new").glob(".partial*"))


def test_runs_that_share_a_url_leave_each_other_alone(tmp_path: Path) -> None:
    """A table that all runs of a team share names one URL: none deletes another's copies, or goes on from them."""
    store = RemoteStore(f"file://{tmp_path}/far")

    def copied(run: str, step: int) -> tuple[str, ...]:
        info = save_checkpoint(tmp_path / run, step, {"w": torch.ones(3)}, {RUN: run} if run else {}, keep_last=9)
        return store.copy(info.path, keep_last=2).removed

    assert [copied("long", step) for step in (10, 20, 30)] == [(), (), ("step-00000010",)]
    assert [copied("short", step) for step in (1, 2, 3)] == [(), (), ("step-00000001",)]
    copied("", 40)  # of an earlier release, or without remote storage
    assert set(store.names()) == {f"step-{step:08d}" for step in (20, 30, 2, 3, 40)}
    for step in range(4, 9):
        copied("short", step)
    assert set(store.names()) == {f"step-{step:08d}" for step in (20, 30, 7, 8, 40)}
    here = [tmp_path / "long"]
    assert fetch_newer(store.url, here, here[0], 60.0) == [], "the other run's are newer by number, and not its own"
    assert fetch_newer(store.url, [tmp_path], tmp_path, 60.0) == [], "nor are they of a run that has no name yet"
    shutil.rmtree(here[0] / "step-00000030")
    assert "fetched step-00000030" in fetch_newer(store.url, here, here[0], 60.0)[0]
    shutil.rmtree(here[0])
    assert "fetched step-00000008" in fetch_newer(store.url, here, here[0], 60.0)[0], "nothing says which run it is"


def test_what_reads_back_otherwise_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore(f"file://{tmp_path}/far")
    put = store._files.put_file

    def cut(source: str, target: str) -> None:
        put(source, target)
        if target.endswith(".safetensors"):
            Path(target).write_bytes(Path(target).read_bytes()[:-1])

    monkeypatch.setattr(store._files, "put_file", cut)
    with pytest.raises(StorageError, match="reads back otherwise"):
        store.copy(save_sample(tmp_path / "here", 1).path, keep_last=2)
    assert store.names() == []
