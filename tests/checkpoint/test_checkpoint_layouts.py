"""A checkpoint saved from any layout loads into any other, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_samples import KINDS, laid_out, load_sample, save_sample
from distributed import run_ranks
from safetensors import safe_open
from tests_shared import device_here
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from paceline.checkpoint import (
    find_latest,
    load_checkpoint,
    read_index,
    read_manifest,
    save_checkpoint,
    shards,
    training_state,
    verify_checkpoint,
)
from paceline.errors import ConfigError, StorageError


def test_one_process_without_a_group(tmp_path: Path) -> None:
    info = save_sample(tmp_path, 100)
    assert info.path == tmp_path / "step-00000100" == find_latest(tmp_path)
    assert load_sample(info.path) == {"step": 100, "layout": "plain"}
    manifest = verify_checkpoint(info.path)
    assert (manifest.step, manifest.world_size, set(read_index(info.path, manifest))) == (100, 1, set(KINDS))
    files = [file for file in info.path.iterdir() if file.name != "manifest.json"]
    assert info.bytes == manifest.total_bytes == sum(file.stat().st_size for file in files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000100"]


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    path = save_sample(tmp_path, 1).path
    for file in path.iterdir():
        assert file.suffix in (".safetensors", ".json")
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as shard:  # opens with the plain library, and holds what it should
                assert torch.equal(shard.get_tensor("whole"), laid_out("plain")["whole"])


def _reshard(root: str, layout: str, step: int) -> dict:
    """Load the newest checkpoint in this layout, check it, and save it again from here."""
    latest = find_latest(Path(root))
    assert latest is not None
    extra = load_sample(latest, layout)
    save_sample(Path(root), step, layout)
    return extra


def _save(root: str, layout: str, step: int) -> tuple[str, int]:
    info = save_sample(Path(root), step, layout)
    return str(info.path), info.bytes


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_gets_the_same_answer(tmp_path: Path, world_size: int) -> None:
    answers = run_ranks(_save, world_size, str(tmp_path), "shard", 7)
    assert len(set(answers)) == 1
    assert read_manifest(tmp_path / "step-00000007").world_size == world_size
    load_sample(tmp_path / "step-00000007")


def test_four_to_two_to_one_to_four(tmp_path: Path) -> None:
    save_sample(tmp_path, 1, "plain")
    chain = [(4, "shard"), (2, "shard"), (1, "plain"), (4, "hsdp"), (4, "grid"), (4, "shard")]
    for step, (world_size, layout) in enumerate(chain, start=2):
        run_ranks(_reshard, world_size, str(tmp_path), layout, step)
    assert load_sample(tmp_path / "step-00000007")["layout"] == "shard"


def test_copies_are_written_once_and_evenly(tmp_path: Path) -> None:
    run_ranks(_save_replicas, 4, str(tmp_path))
    manifest = verify_checkpoint(tmp_path / "step-00000001")
    assert all(len(entry.chunks) == 1 for entry in read_index(tmp_path / "step-00000001", manifest).values())
    sizes = [entry.bytes for name, entry in manifest.files.items() if name.endswith(".safetensors")]
    assert len(sizes) == 4 and max(sizes) - min(sizes) < 300  # headers differ a little, the data does not


def _save_replicas(root: str) -> None:
    tensors = {f"layer{index}": torch.full((256,), float(index), device=device_here()) for index in range(8)}
    save_checkpoint(Path(root), 1, tensors, {}, keep_last=1)


def _save_mixed_model(root: str) -> dict[str, torch.Tensor]:
    """Save a model sharded by tensor and data parallelism on the same dimensions; return its whole weights."""
    mesh = init_device_mesh(device_here().type, (2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)).to(device_here())
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"])
    save_checkpoint(Path(root), 1, training_state(model), {}, keep_last=1)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    load_checkpoint(Path(root) / "step-00000001", training_state(model))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole[name]), name
    return whole


def test_tensor_and_data_parallel_together(tmp_path: Path) -> None:
    whole = run_ranks(_save_mixed_model, 4, str(tmp_path))[0]
    blank = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in whole.items()}
    load_checkpoint(tmp_path / "step-00000001", blank)
    assert all(torch.equal(blank[f"model.{name}"], tensor) for name, tensor in whole.items())


def test_parameters_that_require_grad_and_strided_views(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.arange(12.0).view(3, 4))
    turned = torch.arange(6.0).view(2, 3).t()
    path = save_checkpoint(tmp_path, 1, {"weight": weight, "turned": turned}, {}, keep_last=1).path
    loaded = {"weight": nn.Parameter(torch.zeros(3, 4)), "turned": torch.zeros(2, 3).t()}
    load_checkpoint(path, loaded)
    assert torch.equal(loaded["weight"], weight) and torch.equal(loaded["turned"], turned)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_device_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PIECE_BYTES", 16)
    state = {name: tensor.cuda() for name, tensor in laid_out("plain").items()}
    path = save_checkpoint(tmp_path, 1, state, {}, keep_last=1).path
    load_sample(path)
    blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load_checkpoint(path, blank)
    assert all(tensor.is_cuda and torch.equal(tensor, state[name]) for name, tensor in blank.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": torch.zeros(1)}, "holds no tensor 'more'"),
        ({"whole": None}, "holds 'whole', which nothing asks for"),
        ({"whole": torch.zeros(5, 3)}, r"'whole' in .* is another tensor"),
        ({"whole": torch.zeros(3, 5, dtype=torch.float64)}, r"float32\[3, 5\] there and float64\[3, 5\] here"),
        ({"whole": torch.zeros(3, 5, device="meta")}, "meta device"),
    ],
)
def test_a_difference_names_the_tensor(tmp_path: Path, change: dict, message: str) -> None:
    path = save_sample(tmp_path, 1).path
    state = laid_out("plain", blank=True) | change
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(path, {name: tensor for name, tensor in state.items() if tensor is not None})
    assert not state["fp32"].any()  # nothing was touched


def test_a_tensor_that_is_not_there_is_answered_for_a_user_and_not_for_a_speller(tmp_path: Path) -> None:
    """A changed model in a notebook was answered by "did you mean" the name of the model before."""
    path = save_sample(tmp_path, 1).path
    with pytest.raises(ConfigError) as raised:
        load_checkpoint(path, laid_out("plain", blank=True) | {"wholes": torch.zeros(1)})
    assert "most like it is 'whole'" in raised.value.because and "another run.dir" in raised.value.try_


def test_names_may_go_unread_on_request(tmp_path: Path) -> None:
    path = save_sample(tmp_path, 1).path
    state = {"fp32": torch.zeros(8, 6)}
    load_checkpoint(path, state, may_skip=tuple(name for name in KINDS if name != "fp32"))
    assert torch.equal(state["fp32"], laid_out("plain")["fp32"])


@pytest.mark.parametrize(
    ("tensors", "extra", "message"),
    [
        ({"x": torch.zeros(2, 2).to_sparse()}, {}, "'x' cannot be saved"),
        ({"x": torch.zeros(1, device="meta")}, {}, "'x' cannot be saved"),
        ({"x": 3}, {}, "'x' cannot be saved"),
        ({}, {"loss": float("nan")}, "`extra` cannot be saved"),
        ({}, {"path": Path()}, "`extra` cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_said_before_anything_is_written(
    tmp_path: Path, tensors: dict, extra: dict, message: str
) -> None:
    with pytest.raises(StorageError, match=message):
        save_checkpoint(tmp_path, 1, tensors, extra, keep_last=1)
    assert list(tmp_path.iterdir()) == []


def _save_disagreeing(root: str) -> str:
    shape = (2, 2) if torch.distributed.get_rank() == 0 else (3, 2)
    with pytest.raises(StorageError) as caught:
        save_checkpoint(Path(root), 1, {"x": torch.zeros(shape, device=device_here())}, {}, keep_last=1)
    return str(caught.value)


def test_ranks_that_disagree_about_a_tensor(tmp_path: Path) -> None:
    messages = run_ranks(_save_disagreeing, 2, str(tmp_path))
    assert messages[0] == messages[1] and "ranks disagree about 'x'" in messages[0]
