"""A save in three calls, beside training; what cannot be read back is gone afterwards and costs no older checkpoint."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_samples import laid_out, load_sample, save_sample
from distributed import run_ranks
from tests_shared import device_here

from paceline.checkpoint import publish, save, save_checkpoint, take_snapshot, untrusted, write
from paceline.checkpoint.manifest import MANIFEST_NAME, TABLE_NAME
from paceline.errors import StorageError

PART = "shard-00000-of-00001.json"


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def _beside_training(root: str) -> list[str]:
    """Save from a thread while the ranks change every tensor and use the group that training uses."""
    own = dist.new_group(backend="gloo")
    state = laid_out("shard")
    taken = take_snapshot(1, state, {"step": 1, "layout": "shard"})
    found: list[list[str]] = []

    def save_it() -> None:
        written = write(Path(root), taken, process_group=own)
        found.append([path.name for path in Path(root).glob("step-*")])
        publish(written, keep_last=1)

    saving = threading.Thread(target=save_it)
    saving.start()
    for _ in range(20):
        for tensor in state.values():
            tensor.zero_()
        dist.all_reduce(torch.ones(1, device=device_here()))
    saving.join()
    return found[0]


def test_training_goes_on_after_the_snapshot(tmp_path: Path) -> None:
    assert run_ranks(_beside_training, 2, str(tmp_path)) == [[], []], "nothing has its name before `publish`"
    assert load_sample(tmp_path / "step-00000001") == {"step": 1, "layout": "shard"}


def test_a_snapshot_is_a_copy_unless_told_otherwise() -> None:
    state = {"x": torch.zeros(3)}
    copied, live = take_snapshot(1, state, {}), take_snapshot(1, state, {}, copy=False)
    state["x"].fill_(1)
    assert [next(iter(taken.values.values())).sum().item() for taken in (copied, live)] == [0, 3]


def test_what_was_written_can_be_abandoned(tmp_path: Path) -> None:
    save_sample(tmp_path, 1)
    written = write(tmp_path, take_snapshot(2, laid_out("plain"), {}))
    written.abandon()
    assert _names(tmp_path) == ["step-00000001"]


def _fail_to_read_back(patch: pytest.MonkeyPatch, file: str) -> None:
    """Have a disk change the last byte of the named file as soon as it is written."""
    original = save.write_file

    def changed(path: Path, content: Any, flushes: Any) -> Any:
        entry = original(path, content, flushes)
        if path.name == file:
            path.write_bytes(path.read_bytes()[:-1] + b"\x55")
        return entry

    patch.setattr(save, "write_file", changed)


@pytest.mark.parametrize("file", [MANIFEST_NAME, TABLE_NAME, PART])
def test_what_cannot_be_read_back_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    save_sample(tmp_path, 1)
    _fail_to_read_back(monkeypatch, file)
    with pytest.raises(StorageError, match=file):
        save_sample(tmp_path, 2, keep_last=1)
    assert _names(tmp_path) == ["step-00000001"]
    assert load_sample(tmp_path / "step-00000001")["step"] == 1


@pytest.mark.parametrize("file", [MANIFEST_NAME, TABLE_NAME, PART])
def test_what_is_too_large_to_load_costs_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """An index above the bound was published once, and then the older checkpoints were removed."""
    sizes = {found.name: found.stat().st_size for found in save_sample(tmp_path, 1).path.glob("*.json")}
    monkeypatch.setattr(untrusted, "MAX_JSON_BYTES", sizes[file] - 1)
    with pytest.raises(StorageError, match="larger than"):
        save_sample(tmp_path, 2, keep_last=1)
    assert _names(tmp_path) == ["step-00000001"]
    monkeypatch.undo()
    assert load_sample(tmp_path / "step-00000001")["step"] == 1


def _damaged_on_one_rank(root: str, victim: int) -> str:
    """Save two steps, of which the disk gives one rank's values of the second back otherwise; return the error."""
    save_sample(Path(root), 1, "shard")
    original = save.compare_shard

    def compare(path: Path, entries: Any) -> None:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        original(path, entries)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageError) as caught:
        if dist.get_rank() == victim:
            patch.setattr(save, "compare_shard", compare)
        save_checkpoint(Path(root), 2, laid_out("shard"), {}, keep_last=1)
    return str(caught.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_what_one_rank_cannot_read_back_is_withdrawn_for_all(tmp_path: Path, victim: int) -> None:
    told = set(run_ranks(_damaged_on_one_rank, 2, str(tmp_path), victim))
    assert len(told) == 1 and f"shard-0000{victim}-of-00002.safetensors is damaged" in told.pop()
    assert _names(tmp_path) == ["step-00000001"]
    assert load_sample(tmp_path / "step-00000001")["step"] == 1
