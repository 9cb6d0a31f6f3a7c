"""Whole tensors out of a training checkpoint, and the files themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_samples import KINDS, full, save_sample
from distributed import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.checkpoint import consolidate, full_tensors, save_checkpoint, shards
from paceline.checkpoint.shards import DTYPES, TensorToWrite, write_plain
from paceline.errors import StorageError


def _save_grid(root: str) -> None:
    save_sample(Path(root), 1, "grid")


def test_shards_become_whole_tensors_one_by_one(tmp_path: Path) -> None:
    run_ranks(_save_grid, 4, str(tmp_path))
    tensors = full_tensors(tmp_path / "step-00000001", prefix="")
    assert iter(tensors) is tensors  # one at a time
    whole = dict(tensors)
    assert whole.keys() == KINDS.keys()
    assert all(torch.equal(whole[name], full(name)) for name in KINDS)


def test_consolidate_writes_one_plain_file(tmp_path: Path) -> None:
    tensors = {"model.a.weight": full("fp32"), "model.b": full("bf16"), "optim.a.weight.exp_avg": full("fp32")}
    path = save_checkpoint(tmp_path, 1, tensors, {}, keep_last=1).path
    out = tmp_path / "model.safetensors"
    out.write_text("an older export")
    written = consolidate(path, out)
    assert written.bytes == out.stat().st_size
    loaded = load_file(out)
    assert loaded.keys() == {"a.weight", "b"}
    assert torch.equal(loaded["a.weight"], full("fp32")) and torch.equal(loaded["b"], full("bf16"))
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "step-00000001"]


def test_consolidate_refuses_what_is_damaged_absent_or_nowhere(tmp_path: Path) -> None:
    path = save_sample(tmp_path, 1).path
    with pytest.raises(StorageError, match="holds no 'model' tensors"):
        consolidate(path, tmp_path / "out", prefix="model")
    with pytest.raises(StorageError, match="cannot write"):
        consolidate(path, tmp_path / "no such folder" / "out", prefix="")
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    with pytest.raises(StorageError, match="is damaged"):
        consolidate(path, tmp_path / "out", prefix="")
    assert not (tmp_path / "out").exists()


def test_a_shard_is_a_plain_file_whatever_the_size_of_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PIECE_BYTES", 8)  # many pieces, some of them short
    monkeypatch.setattr(shards, "OVERLAP_BYTES", 5)
    tensors = {name: full(name) for name in KINDS}
    entries = [
        TensorToWrite(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    ]
    written = write_plain(tmp_path / "file", entries, {})
    content = (tmp_path / "file").read_bytes()
    assert written.bytes == len(content)
    loaded = load_file(tmp_path / "file")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    header_bytes = int.from_bytes(content[:8], "little")
    assert header_bytes % 8 == 0
    assert len(content) == 8 + header_bytes + sum(entry.bytes for entry in entries)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_torch_s_and_safetensors(tmp_path: Path, name: str) -> None:
    tensor = torch.arange(6).to(getattr(torch, name)).view(2, 3)
    assert tensor.element_size() == DTYPES[name][1]
    path = save_checkpoint(tmp_path, 1, {"x": tensor}, {}, keep_last=1).path
    ((_, loaded),) = full_tensors(path, prefix="")
    assert loaded.dtype == tensor.dtype and torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))
