"""An index of weights names files of its own folder; exports are on the disk before they have their names."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import built, tiny
from safetensors.torch import save_file

from paceline.checkpoint import consolidate, save_checkpoint
from paceline.errors import StorageError
from paceline.task.models.huggingface.files import INDEX, header, read_safetensors
from paceline.task.models.huggingface.weights import export_safetensors


def write_index(folder: Path, file: Any) -> Path:
    """Write an index whose only tensor is in `file`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a sound file of weights that no index should reach."""
    path = tmp_path / "private" / "model.safetensors"
    path.parent.mkdir()
    save_file({"w": torch.ones(2)}, path)
    return path


@pytest.mark.parametrize("name", ["../private/model.safetensors", "deep/../../private/model.safetensors", "ABSOLUTE"])
def test_a_name_does_not_leave_its_folder(tmp_path: Path, outside: Path, name: str) -> None:
    folder = write_index(tmp_path / "got", str(outside) if name == "ABSOLUTE" else name)
    (folder / "deep").mkdir()
    with pytest.raises(StorageError, match="names a file outside of the folder"):
        read_safetensors(folder)


@pytest.mark.parametrize("kind", ["of a file", "of a folder", "in a circle"])
def test_a_link_does_not_leave_its_folder(tmp_path: Path, outside: Path, kind: str) -> None:
    name = "sub/model.safetensors" if kind == "of a folder" else "model.safetensors"
    folder = write_index(tmp_path / "got", name)
    if kind == "of a folder":
        (folder / "sub").symlink_to(outside.parent)
    else:
        (folder / name).symlink_to(outside if kind == "of a file" else folder / name)
    with pytest.raises(StorageError) as refusal:
        read_safetensors(folder)
    if kind != "in a circle":
        assert "outside of the folder" in refusal.value.what and str(outside) in refusal.value.because


def test_what_stays_inside_is_read(tmp_path: Path, outside: Path) -> None:
    folder = write_index(tmp_path / "got", "parts/a.safetensors")
    (folder / "parts").mkdir()
    save_file({"w": torch.ones(2)}, folder / "parts" / "b.safetensors")
    (folder / "parts" / "a.safetensors").symlink_to("b.safetensors")
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert torch.equal(read_safetensors(link)["w"], torch.ones(2))


def test_snapshots_of_the_hugging_face_cache_are_read(tmp_path: Path, outside: Path) -> None:
    """The hub's cache holds a snapshot as links to blobs of the same model; blobs of another are outside."""
    for model, blob in (("models--a--b", "1f"), ("models--x--y", "2e")):
        (tmp_path / model / "blobs").mkdir(parents=True)
        save_file({"w": torch.ones(2)}, tmp_path / model / "blobs" / blob)
    snapshot = write_index(tmp_path / "models--a--b" / "snapshots" / "c0ffee", "m.safetensors")
    (snapshot / "m.safetensors").symlink_to("../../blobs/1f")
    assert torch.equal(read_safetensors(snapshot)["w"], torch.ones(2))
    (snapshot / "m.safetensors").unlink()
    (snapshot / "m.safetensors").symlink_to("../../../models--x--y/blobs/2e")
    with pytest.raises(StorageError, match="outside of the folder"):
        read_safetensors(snapshot)


@pytest.mark.parametrize("name", [7, None, ["a"], "a\0b"])
def test_a_name_that_is_none(tmp_path: Path, name: Any) -> None:
    with pytest.raises(StorageError, match=r"index\.json cannot be read"):
        read_safetensors(write_index(tmp_path / "got", name))


@pytest.mark.parametrize("kind", ["huggingface, one file", "huggingface, several", "consolidate"])
def test_exports_are_flushed_before_they_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The order of the calls is what a power cut depends on: content, name, folder."""
    out = tmp_path / "out"
    out.mkdir()
    checkpoint = save_checkpoint(tmp_path / "run", 1, {"model.a": torch.ones(3)}, {}, keep_last=1).path
    flushed: list[int] = []
    waiting: set[int] = set()  # folders with a name that is not durable yet
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        flushed.append(os.fstat(descriptor).st_ino)
        waiting.discard(os.fstat(descriptor).st_ino)

    def noted_replace(path: Path, target: Path) -> Path:
        assert path.stat().st_ino in flushed, f"{target} gets its name before its content is on the disk"
        waiting.add(target.parent.stat().st_ino)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    if kind == "consolidate":
        consolidate(checkpoint, out / "model.safetensors")
    else:
        config = tiny()
        export_safetensors(built(config).state_dict(), config, out, 20_000 if "several" in kind else 10**9)
    assert {path.suffix for path in out.iterdir()} <= {".safetensors", ".json"}
    assert {path.stat().st_ino for path in out.iterdir()} <= set(flushed) and not waiting


@pytest.mark.parametrize("nested", ["", "state_dict", "model"])
def test_weights_of_torch_save_name_the_command_that_converts_them(tmp_path: Path, nested: str) -> None:
    """A state_dict's .pt was told to be a bad copy. What is said is typed, and what it writes is read."""
    state = {"weight": torch.arange(6.0).reshape(2, 3).T, "bias": torch.ones(2)}
    file = tmp_path / "it's theirs.pt"
    torch.save({"epoch": 3, nested: state} if nested else state, file)
    with pytest.raises(StorageError, match="safetensors") as raised:
        header(file)
    command, told, _ = raised.value.try_.partition(", and then model.weights = ")
    assert told
    python, *words = shlex.split(command)
    assert python == "python"
    subprocess.run([sys.executable, *words], check=True)
    read = read_safetensors(file.with_suffix(".safetensors"))
    assert {name: value.tolist() for name, value in read.items()} == {n: v.tolist() for n, v in state.items()}
