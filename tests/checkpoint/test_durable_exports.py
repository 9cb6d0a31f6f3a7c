"""What is exported is on the disk when the call returns: each file's content, and the names in its folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests_shared import VOCAB

from paceline.checkpoint import save_checkpoint
from paceline.checkpoint.export import consolidate
from paceline.checkpoint.foreign.distcp import write_distributed
from paceline.session.verbs.adapted import write_whole
from paceline.session.verbs.classes import write_classes
from paceline.spec.load import load_spec, spec_to_dict
from paceline.spec.task import ModelSpec
from paceline.task.models.build import build_model
from paceline.task.models.huggingface.weights import export_safetensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.int64)}


def classes(out: Path) -> None:
    spec = spec_to_dict(load_spec(None, ["task.data.source=digits"]))
    assert len(write_classes({"data": {"classes": ["no", "yes"]}, "spec": spec}, out)) == 1


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


def huggingface(out: Path) -> None:
    model = build_model(ModelSpec("llama-1m", hidden=32, layers=1, heads=4, ffn=40), VOCAB, 8, seed=3)
    export_safetensors(model.state_dict(), model.config, out)


@pytest.mark.parametrize("write", [classes, whole, distributed, one_file, huggingface])
def test_an_export_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    flushed: dict[int, int] = {}  # how long a file was when it was last flushed
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        known = os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())
        flushed[known.st_ino] = known.st_size

    monkeypatch.setattr(os, "fsync", noted)
    out = tmp_path / "out"
    write(out)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files and out.stat().st_ino in flushed, "names are lost with their folder"
    assert {path.name for path in files if flushed.get(path.stat().st_ino) != path.stat().st_size} == set()
