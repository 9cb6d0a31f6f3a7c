"""Every layout's checkpoint in every other layout: weights and optimizer bit for bit, and the loss of the next step.

The model is a tiny decoder with experts, whose router keeps a bias; the layouts have every axis, on up to four ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed import run_ranks
from rounding import FP64_TRAINED, assert_curves_close
from tests_shared import SEQ_LEN, VOCAB, decoder_task, plan_of, world_here

from paceline.checkpoint import (
    WholeTensors,
    load_checkpoint,
    materialise_optimizer_state,
    read_index,
    read_manifest,
    save_checkpoint,
    training_state,
)
from paceline.run.assemble import Assembled, assemble
from paceline.run.loop.loader import BatchStream
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec

BATCH, STEPS, LR = 6, 2, 3e-3
EXPERTS = ModelSpec("moe-2m", hidden=16, layers=2, heads=4, kv_heads=2, ffn=8, vocab=VOCAB, balance="bias")
LAYOUTS: dict[str, tuple[Layout, int]] = {  # with its ZeRO class
    "one": (Layout(), 3),
    "copies": (Layout(dp_replicate=2), 3),
    "zero 1": (Layout(dp_shard=2), 1),
    "zero 2": (Layout(dp_shard=2), 2),
    "zero 3": (Layout(dp_shard=2), 3),
    "tensor": (Layout(tp=2), 3),
    "pipeline": (Layout(pp=2), 3),
    "context": (Layout(cp=2), 3),
    "experts": (Layout(dp_shard=2, ep=2), 3),
    "experts and copies": (Layout(dp_replicate=2, dp_shard=2, ep=2), 2),
    "tensor and pipeline": (Layout(tp=2, pp=2), 3),
    "context and shards": (Layout(cp=2, dp_shard=2), 1),
}
FEW = ("zero 3", "tensor and pipeline", "experts and copies")


def _plan(name: str) -> Plan:
    layout, zero = LAYOUTS[name]
    return plan_of(layout, batch=BATCH, precision="fp64", zero=zero)


def _built(name: str) -> tuple[Assembled, BatchStream]:
    world = world_here()
    task, plan = decoder_task(model=EXPERTS), _plan(name)
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    materialise_optimizer_state(built.optimizer)
    return built, BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)


def _state(built: Assembled) -> dict[str, torch.Tensor]:
    return built.stepper.sync.named(training_state(built.model, built.optimizer))


def _train(root: str, names: list[str]) -> None:
    """Train a little under each of the layouts and save."""
    for name in names:
        built, stream = _built(name)
        for step in range(STEPS):
            built.stepper.step(stream.at(step * BATCH), LR)
        save_checkpoint(Path(root) / name, STEPS, _state(built), {}, keep_last=9)


def _go_on(root: str, names: list[str], sources: list[str]) -> dict[tuple[str, str], float]:
    """Load every source under each of the layouts, save it from there and make the next step; return the losses."""
    losses = {}
    for name in names:
        built, stream = _built(name)
        for source in sources:
            (path,) = (Path(root) / source).iterdir()
            load_checkpoint(path, _state(built))
            save_checkpoint(Path(root) / f"{source} to {name}", STEPS, _state(built), {}, keep_last=9)
            losses[source, name] = built.stepper.step(stream.at(STEPS * BATCH), LR).loss
    return losses


def _by_ranks(names: tuple[str, ...]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(LAYOUTS[name][0].devices, []).append(name)
    return found


def _assert_trips(root: Path, names: tuple[str, ...]) -> None:
    losses: dict[tuple[str, str], float] = {}
    for ranks, alike in _by_ranks(names).items():
        run_ranks(_train, ranks, str(root), alike, timeout_seconds=300)
    for ranks, alike in _by_ranks(names).items():
        losses |= run_ranks(_go_on, ranks, str(root), alike, list(names), timeout_seconds=600)[0]
    assert len(losses) == len(names) ** 2
    for source, name in losses:
        (before,), (after,) = (root / source).iterdir(), (root / f"{source} to {name}").iterdir()
        _assert_same(before, after)
        assert_curves_close([losses[source, name]], [losses[source, source]], FP64_TRAINED)


def _assert_same(before: Path, after: Path) -> None:
    """Check that two checkpoints hold the same tensors, bit for bit, and say so themselves."""
    one, two = WholeTensors(before, ""), WholeTensors(after, "")
    assert list(one) and set(one) == set(two)
    assert any(name.startswith("optim.") for name in one) and any("experts" in name for name in one)
    for name in one:
        bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (one[name], two[name])]
        assert torch.equal(*bits), (before, after, name)
    told = [
        {name: entry.fingerprint for name, entry in read_index(path, read_manifest(path)).items()}
        for path in (before, after)
    ]
    assert told[0] == told[1] and all(told[0].values())


def test_three_layouts_load_each_others_checkpoints(tmp_path: Path) -> None:
    _assert_trips(tmp_path, FEW)


@pytest.mark.deep
def test_twelve_layouts_load_each_others_checkpoints(tmp_path: Path) -> None:
    assert len(LAYOUTS) == 12
    _assert_trips(tmp_path, tuple(LAYOUTS))
