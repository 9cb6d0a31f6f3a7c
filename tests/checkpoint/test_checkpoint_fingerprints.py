"""Fingerprints of values: the same on any layout, another for any other content, and checked after every load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_samples import KINDS, full, laid_out, load_sample, save_sample
from distributed import run_ranks
from runs import run_patiently
from tests_shared import device_here
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from paceline.checkpoint import (
    find_latest,
    fingerprint,
    load_checkpoint,
    load_latest,
    read_index,
    read_manifest,
    save,
    save_checkpoint,
    save_plan,
    training_state,
)
from paceline.checkpoint.fingerprint import _mixed, parts_held, whole_fingerprints
from paceline.errors import StorageError

THREADS = """
import os, tempfile
from pathlib import Path

import torch

from paceline.checkpoint import load_checkpoint, save_checkpoint

torch.set_num_threads(4)
state = {"a": torch.empty(2**21), "b": torch.empty(2**10, 2**11)}
before = os.listdir("/proc/self/task")
with tempfile.TemporaryDirectory() as folder:
    path = save_checkpoint(Path(folder), 1, state, {}, keep_last=1).path
    load_checkpoint(path, state)
print(len(set(os.listdir("/proc/self/task")) - set(before)))
"""


def of(tensor: torch.Tensor) -> str:
    return whole_fingerprints([parts_held({"x": tensor})], {"x": tensor.shape})["x"]


def plainly(tensor: torch.Tensor) -> str:
    """Return the fingerprint by its definition, one word at a time."""
    total = 0
    for place in np.ndindex(*tensor.shape):
        number = torch.view_as_real(tensor[place]) if tensor.is_complex() else tensor[place].reshape(1)
        element = number.contiguous().view(torch.uint8).numpy().tobytes()
        size = min(4, len(element))
        for word in range(len(element) // size):
            bits = int.from_bytes(element[word * size : (word + 1) * size], "little", signed=size > 1)
            weight = 1
            for dimension, at in enumerate((*place, word)):
                weight *= int(_mixed(np.array([(dimension << 48) + at], dtype=np.uint64))[0]) | 1
            total += bits * weight
    return f"{total % 2**64:016x}"


@pytest.mark.parametrize("name", [name for name in KINDS if name != "empty"])
def test_it_is_what_its_definition_says(name: str) -> None:
    assert of(full(name)) == plainly(full(name))


def test_complex_values_and_strides_that_are_not_of_the_memory() -> None:
    values = torch.randn(3, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    assert of(values) == plainly(values)
    assert of(values.conj()) == plainly(values.conj().resolve_conj()) != of(values)
    assert of(values.to(torch.complex128)) == plainly(values.to(torch.complex128))
    assert of(values.t().contiguous().t()) == of(values)
    assert of(values.imag.contiguous()) != of(values.real.contiguous())


def test_pieces_of_any_size_make_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(7, 11, 13, generator=torch.Generator().manual_seed(2))
    expected = plainly(tensor)
    for words in (1, 2, 13, 100, 143, 1000, 10**6):
        monkeypatch.setattr("paceline.checkpoint.fingerprint.PIECE_WORDS", words)
        assert of(tensor) == expected, words


def test_threads_that_share_a_tensor_out_make_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.fingerprint.FEW_WORDS", 1)
    kinds = [name for name in KINDS if name != "empty"]
    for words in (1, 7, 100):
        monkeypatch.setattr("paceline.checkpoint.fingerprint.TASK_WORDS", words)
        assert {name: of(full(name)) for name in kinds} == {name: plainly(full(name)) for name in kinds}, words


def test_the_sum_that_a_device_makes_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.Generator().manual_seed(4)
    rows, row, outer = (torch.randint(-(2**31), 2**31, size, generator=drawn) for size in ((9, 13), (13,), (9,)))
    for words in (1, 13, 30, 1000):
        monkeypatch.setattr(fingerprint, "PIECE_WORDS", words)
        for dtype in (torch.int32, torch.int16):
            here = fingerprint._sum_here(rows.to(dtype).numpy(), row.numpy(), outer.numpy())
            there = fingerprint._sum_on_device(rows.to(dtype), row, outer, fingerprint.PlaceWeights())
            assert here % 2**64 == there % 2**64


def test_no_thread_of_torch_is_started_for_them() -> None:
    """Those wait turning for the next piece of work, and on a busy machine take the core that a step needs."""
    ran = run_patiently([sys.executable, "-c", THREADS], 60)
    assert (ran.returncode, ran.stdout) == (0, "0\n"), ran.stderr


def test_any_change_makes_another() -> None:
    tensor = torch.randn(64, 48, generator=torch.Generator().manual_seed(3))
    seen = {of(tensor), of(tensor.t()), of(tensor.flip(0)), of(tensor.flip(1)), of(tensor.roll(1, 0)), of(-tensor)}
    seen |= {of(tensor.bfloat16().float()), of(tensor.half().float()), of(tensor.double()), of(torch.zeros(64, 48))}
    seen |= {of(torch.cat([tensor[32:], tensor[:32]])), of(torch.cat([tensor[:32], tensor[:32]]))}
    for index in range(0, tensor.numel(), 301):
        other = tensor.clone()
        other.view(torch.int32).view(-1)[index] ^= 1  # one ulp
        seen.add(of(other))
    assert len(seen) == 12 + len(range(0, tensor.numel(), 301))


def test_integers_that_change_places_in_high_bits_alone() -> None:
    ones, twos = torch.ones(2, 512, dtype=torch.float64), torch.full((2, 512), 2.0, dtype=torch.float64)
    mixed = [torch.where(torch.arange(512) == at, ones, twos) for at in range(512)]
    assert len({of(tensor) for tensor in mixed}) == 512


def _on(layout: str) -> dict[str, str]:
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, parts_held(laid_out(layout)))
    return whole_fingerprints(parts, {name: kind[0] for name, kind in KINDS.items()})


@pytest.mark.parametrize(("ranks", "layouts"), [(2, ("plain", "shard")), (3, ("shard",)), (4, ("hsdp", "grid"))])
def test_every_layout_gives_the_same(ranks: int, layouts: tuple[str, ...]) -> None:
    expected = {name: of(full(name)) for name in KINDS if name != "empty"}
    for layout in layouts:
        for found in run_ranks(_on, ranks, layout):
            assert {name: value for name, value in found.items() if name != "empty"} == expected


def _split_twice() -> dict[str, str]:
    """Return fingerprints of weights that tensor and data parallelism split on the same dimension, unevenly."""
    import torch.distributed as dist

    mesh = init_device_mesh(device_here().type, (2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 6).to(device_here())
    expected = {name: of(p.detach()) for name, p in layer.named_parameters()}
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp_shard"])
    parts: list[Any] = [None] * 4
    dist.all_gather_object(parts, parts_held(dict(layer.named_parameters())))
    found = whole_fingerprints(parts, {name: p.shape for name, p in layer.named_parameters()})
    return {name: found[name] for name in expected if found[name] != expected[name]}


def test_weights_split_by_two_axes_on_one_dimension() -> None:
    assert run_ranks(_split_twice, 4) == [{}] * 4


def test_copies_that_differ_have_none_and_gaps_are_no_tensor() -> None:
    one, other = parts_held({"x": torch.ones(3)}), parts_held({"x": torch.zeros(3) + 2})
    assert whole_fingerprints([one, other], {"x": (3,)}) == {"x": ""}
    assert whole_fingerprints([one], {"x": (4,)}) == {}


# ---- in checkpoints --------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_any_layout_has_the_fingerprints_of_the_whole_tensors(tmp_path: Path) -> None:
    run_ranks(_save_shards, 3, str(tmp_path))
    path = find_latest(tmp_path)
    assert path is not None
    index = read_index(path, read_manifest(path))
    assert {name: entry.fingerprint for name, entry in index.items() if name != "empty"} == {
        name: of(full(name)) for name in KINDS if name != "empty"
    }
    load_sample(path)


def _save_shards(root: str) -> None:
    save_sample(Path(root), 1, "shard")


def test_what_was_written_wrongly_is_refused_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = save._entry

    def rounded(part: Any, values: Any) -> Any:
        made = entry(part, values)
        if made.key != "fp32":
            return made
        return save.TensorToWrite(made.key, made.dtype, made.shape, lambda: made.load().bfloat16().float() + 0.001)

    save_sample(tmp_path, 1)
    monkeypatch.setattr(save, "_entry", rounded)
    bad = save_sample(tmp_path, 2).path
    with pytest.raises(StorageError, match="values of 'fp32' loaded from") as raised:
        load_sample(bad)
    assert raised.value.exit_code == 74
    loaded = load_latest(tmp_path, laid_out("plain", blank=True))
    assert loaded is not None and loaded.extra["step"] == 1 and "values of 'fp32'" in loaded.skipped[0]


def _shards_swapped(root: str) -> str:
    """Save a tensor whose shards a broken writer exchanges between two ranks; return what loading says."""
    mesh = init_device_mesh(device_here().type, (2,))
    tensor = distribute_tensor(
        torch.arange(12.0, device=device_here()).view(4, 3), mesh, [Shard(0)], src_data_rank=None
    )
    entry = save._entry

    def swapped(part: Any, values: Any) -> Any:
        made = entry(part, values)
        return save.TensorToWrite(made.key, made.dtype, made.shape, lambda: made.load().add(6.0).remainder(12.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "_entry", swapped)
        path = save_checkpoint(Path(root), 1, {"experts": tensor}, {}, keep_last=1).path
    try:
        load_checkpoint(path, {"experts": tensor})
    except StorageError as error:
        return error.what
    return "loaded"


def test_shards_under_the_wrong_rank_are_refused_on_all_ranks(tmp_path: Path) -> None:
    said = run_ranks(_shards_swapped, 2, str(tmp_path))
    assert said[0] == said[1] and said[0].startswith("the values of 'experts' loaded from")


def test_a_checkpoint_of_an_earlier_release_is_loaded_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_plan.SavePlan, "fingerprints", lambda self, taken, ranks: {})
    path = save_sample(tmp_path, 1).path
    assert "fingerprint" not in json.loads((path / "tensors.json").read_text())["fp32"]
    loaded = load_latest(tmp_path, laid_out("plain", blank=True))
    assert loaded is not None and set(loaded.unchecked) == set(KINDS)


def test_tied_weights_have_one_fingerprint(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    path = save_checkpoint(tmp_path, 1, training_state(model), {}, keep_last=1).path
    assert set(read_index(path, read_manifest(path))) == {"model.0.weight"}
    load_checkpoint(path, training_state(model))
