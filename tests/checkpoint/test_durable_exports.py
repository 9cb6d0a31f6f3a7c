"""What is exported is on the disk when the call returns: each file's content, and the names in its folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests_shared import VOCAB

import paceline.checkpoint.shards as shards
from paceline.checkpoint import save_checkpoint
from paceline.checkpoint.export import consolidate
from paceline.checkpoint.foreign.distcp import write_distributed
from paceline.durable import make_folder
from paceline.session.verbs.adapted import write_whole
from paceline.session.verbs.checkpoints import convert
from paceline.session.verbs.classes import write_classes
from paceline.spec.adapt.adapter import AdapterSpec
from paceline.spec.load import load_spec, spec_to_dict
from paceline.spec.task import ModelSpec
from paceline.task.adapt.peft import write_adapter
from paceline.task.models.build import build_model
from paceline.task.models.huggingface.weights import export_safetensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.int64)}


def classes(out: Path) -> None:
    spec = spec_to_dict(load_spec(None, ["task.data.source=digits"]))
    assert len(write_classes({"data": {"classes": ["no", "yes"]}, "spec": spec}, out)) == 1


@pytest.mark.parametrize(("source", "files"), [("houses:build", 0), ("table:houses.csv", 1)])
def test_numbers_of_a_programs_own_rows_have_no_file_of_classes(tmp_path: Path, source: str, files: int) -> None:
    spec = spec_to_dict(load_spec(None, [f"task.data.source={source}", "task.objective=regression"]))
    assert len(write_classes({"data": {"classes": None}, "spec": spec}, tmp_path)) == files


def whole(out: Path) -> None:
    out.mkdir()
    write_whole(TENSORS, out / "model.safetensors")


def distributed(out: Path) -> None:
    write_distributed(
        TENSORS, {n: SimpleNamespace(dtype=str(t.dtype)[6:], shape=t.shape) for n, t in TENSORS.items()}, out
    )


def one_file(out: Path) -> None:
    saved = save_checkpoint(out.with_name("run"), 1, {f"model.{n}": t for n, t in TENSORS.items()}, {}, keep_last=1)
    out.mkdir()
    consolidate(saved.path, out / "model.safetensors", "model.")


def converted(out: Path) -> None:
    distributed(out.with_name("theirs"))
    assert len(convert(out.with_name("theirs"), out, "safetensors").files) == 1


def adapter(out: Path) -> None:
    tensors = {"a.lora_A": torch.ones(2, 3), "a.lora_B": torch.ones(3, 2)}
    write_adapter(tensors, AdapterSpec(kind="lora", rank=2), set(tensors), out, base="", is_decoder=False)


def huggingface(out: Path) -> None:
    model = build_model(ModelSpec("llama-1m", hidden=32, layers=1, heads=4, ffn=40), VOCAB, 8, seed=3)
    export_safetensors(model.state_dict(), model.config, out)


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """How long each file was when it was last flushed, by its number."""
    found: dict[int, int] = {}
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        known = os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())
        found[known.st_ino] = known.st_size

    monkeypatch.setattr(os, "fsync", noted)
    return found


@pytest.mark.parametrize("write", [classes, whole, distributed, converted, adapter, one_file, huggingface])
def test_an_export_survives_a_power_cut(tmp_path: Path, flushed: dict[int, int], write: Callable[[Path], None]) -> None:
    out = tmp_path / "out"
    write(out)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files and out.stat().st_ino in flushed, "names are lost with their folder"
    assert {path.name for path in files if flushed.get(path.stat().st_ino) != path.stat().st_size} == set()


@pytest.mark.parametrize("write", [classes, distributed, converted, adapter, huggingface])
def test_folders_that_an_export_makes_are_durable_in_those_above(
    tmp_path: Path, flushed: dict[int, int], write: Callable[[Path], None]
) -> None:
    write(tmp_path / "exports" / "of today" / "out")
    above = [tmp_path, tmp_path / "exports", tmp_path / "exports" / "of today"]
    assert [path.name for path in above if path.stat().st_ino not in flushed] == []


def test_a_folder_is_made_once(tmp_path: Path, flushed: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("new"), Path("new"), tmp_path, Path("other/deep")):
        make_folder(path)
        assert path.is_dir() and path.parent.stat().st_ino in flushed
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        make_folder(tmp_path / "file")


def test_a_conversion_has_no_name_until_it_is_there_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full, or a process that is killed, leaves no half file that somebody takes for weights."""
    written: list[str] = []
    write_plain = shards.write_plain

    def noted(path: Path, *given: Any) -> object:
        written.append(path.name)
        return write_plain(path, *given)

    monkeypatch.setattr(shards, "write_plain", noted)
    converted(tmp_path / "out")
    assert written and not [name for name in written if name.endswith(".safetensors")]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], TENSORS["a"])


def test_what_a_killed_export_has_left_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors.part").write_bytes(b"half")
    write_whole(TENSORS, tmp_path / "out" / "model.safetensors")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["b"], TENSORS["b"])
