"""A step that is made again under another layout is the same within what a replay allows, in every number format.

A tiny decoder, with experts and without, is trained under each layout and saved; every other layout restores it and
makes the next step. Weights that are a step old must be found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tests_shared import SEQ_LEN, VOCAB, decoder_task, plan_of

from paceline.checkpoint import load_checkpoint, materialise_optimizer_state, save_checkpoint, training_state
from paceline.errors import VerificationFailed
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.step import StepStats
from paceline.run.process.world import World
from paceline.run.survive.replay import TOLERANCES, StepBefore, hold_against
from paceline.spec.layout import Layout
from paceline.spec.task import ModelSpec

BATCH, STEPS, LR = 8, 6, 3e-3
EXPERTS = ModelSpec("moe-2m", hidden=16, layers=2, heads=4, kv_heads=2, ffn=8, vocab=VOCAB)
LAYOUTS = {
    "one": Layout(), "copies": Layout(dp_replicate=2), "shards": Layout(dp_shard=4), "tensor": Layout(tp=2),
    "pipeline": Layout(pp=2), "context": Layout(cp=2), "tensor and pipeline": Layout(tp=2, pp=2),
}  # fmt: skip
OF_EXPERTS = {name: LAYOUTS[name] for name in ("one", "copies", "tensor")} | {"experts": Layout(dp_shard=2, ep=2)}
MICRO = {"one": 8, "copies": 2, "shards": 1}  # rows at a time: sums over them are made in other orders too
Told = dict[tuple[str, str], StepStats]


def _built(name: str, layout: Layout, precision: str, has_experts: bool) -> tuple[Any, BatchStream]:
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    task = decoder_task(model=EXPERTS) if has_experts else decoder_task()
    plan = plan_of(layout, batch=BATCH, micro_batch=MICRO.get(name, 2), precision=precision)
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    materialise_optimizer_state(built.optimizer)
    return built, BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)


def _save(root: Path, step: int, built: Any) -> None:
    save_checkpoint(root, step, training_state(built.model, built.optimizer), {}, keep_last=9)


def _sweep(root: str, names: list[str], precision: str, has_experts: bool) -> Told:
    """Return the next step of each source, restored under each layout that this many ranks have."""
    known, told = OF_EXPERTS if has_experts else LAYOUTS, {}
    for name in names:
        built, stream = _built(name, known[name], precision, has_experts)
        for step in range(STEPS):
            if step == STEPS - 1:
                save_checkpoint(
                    Path(root) / f"{name} older", step, training_state(built.model, built.optimizer), {}, keep_last=9
                )
            built.stepper.step(stream.at(step * BATCH), LR)
        _save(Path(root) / name, STEPS, built)
        told[name, name] = built.stepper.step(stream.at(STEPS * BATCH), LR)
    return told


def _again(root: str, names: list[str], sources: list[str], precision: str, has_experts: bool) -> Told:
    known, told = OF_EXPERTS if has_experts else LAYOUTS, {}
    for name in names:
        built, stream = _built(name, known[name], precision, has_experts)
        for source in sources:
            folder = next((Path(root) / source).glob("step-*"))
            load_checkpoint(folder, training_state(built.model, built.optimizer))
            told[source, name] = built.stepper.step(stream.at(STEPS * BATCH), LR)
    return told


def sweep(folder: Path, precision: str, has_experts: bool, only: tuple[str, ...] = ()) -> Told:
    """Return the step after the last one, by (layout that saved, layout that went on)."""
    layouts = {
        name: layout for name, layout in (OF_EXPERTS if has_experts else LAYOUTS).items() if not only or name in only
    }
    by_ranks = {n: [name for name, each in layouts.items() if each.devices == n] for n in (1, 2, 4)}
    told: Told = {}
    for ranks, names in by_ranks.items():
        told |= run_ranks(_sweep, ranks, str(folder), names, precision, has_experts)[0] if names else {}
    sources = [*layouts, *(f"{name} older" for name in layouts)]
    for ranks, names in by_ranks.items():
        again = run_ranks(_again, ranks, str(folder), names, sources, precision, has_experts)[0] if names else {}
        told |= {pair: stats for pair, stats in again.items() if pair not in told or pair[0] != pair[1]}
    return told


def _before(stats: StepStats) -> StepBefore:
    return StepBefore(stats.step, stats.position_before, stats.position_after, stats.loss, stats.grad_norm, 1, None)


def held(told: Told, precision: str) -> dict[str, float]:
    """Hold every restored step against the one that its source made; return the largest differences."""
    largest = dict.fromkeys(TOLERANCES, 0.0)
    for (source, name), stats in told.items():
        if not source.endswith(" older"):
            record = hold_against(_before(told[source, source]), stats, None, precision)
            largest = {key: max(largest[key], record.differences[key]) for key in largest}
            assert stats.step == STEPS + 1, (source, name)
    return largest


def unseen(told: Told, precision: str) -> list[tuple[str, str]]:
    """Return the pairs in which weights that are a step old pass."""
    found = []
    for (source, name), stats in told.items():
        if source.endswith(" older"):
            right = source.removesuffix(" older")
            try:
                hold_against(_before(told[right, right]), stats, None, precision)
            except VerificationFailed:
                continue
            found.append((source, name))
    return found


def test_two_layouts_replay_each_others_steps(tmp_path: Path) -> None:
    told = sweep(tmp_path, "bf16", False, ("one", "shards"))
    assert held(told, "bf16")["grad_norm"] > 0, "sums in another order"
    assert unseen(told, "bf16") == []


@pytest.mark.deep
@pytest.mark.parametrize("has_experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
def test_every_layout_replays_every_others_step(tmp_path: Path, precision: str, has_experts: bool) -> None:
    told = sweep(tmp_path, precision, has_experts)
    assert held(told, precision)["grad_norm"] > 0, "sums in another order"
    assert unseen(told, precision) == []
