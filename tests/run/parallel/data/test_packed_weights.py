"""Four bits that ranks hold parts of: saved by two ranks they go on on one, three and four, as if nothing had been."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks
from tests_huggingface import hf_task
from tests_shared import SEQ_LEN, decoder_task, world_here
from tests_shared import coarse_plan as plan_of
from torch.distributed.tensor import DTensor

from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.resume import Progress, RunIdentity, restore, save
from paceline.spec.adapt.adapter import AdapterSpec
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import Plan
from paceline.spec.task import Task
from paceline.task.adapt.linear import PackedLinear
from paceline.task.models.held import whole_of
from paceline.task.optimizer.schedule import Course

LORA = AdapterSpec(kind="lora", rank=4, alpha=8.0, init="random", base_dtype="nf4")
SAVED, STEPS = 2, 4
spread = functools.partial(plan_of, frozen="spread")

Told = tuple[list[tuple[float, float]], dict[str, str], list[bool]]


def made(task: Task, plan: Plan, folder: str, stop: int, saves: bool) -> Told:
    """Go on with a run from its newest checkpoint; return loss and norm of its steps, what of the four bits ranks hold
    together, layer by layer, and whether a rank holds a part of each alone."""
    world = world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    run = RunIdentity(Path(folder), Spec(task=task), "", Course("constant", task.optimizer.lr, 1.0, STEPS, 0, 1))
    found = restore(run, built, plan, world)
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    stats = []
    for step in range(found.progress.step + 1 if found else 1, stop + 1):
        stats.append(built.stepper.step(stream.at((step - 1) * plan.batch_samples), task.optimizer.lr))
    if saves:
        save(run, built, plan, world, Progress(stop, stop * plan.batch_samples))
    layers = {name: layer for name, layer in built.model.named_modules() if isinstance(layer, PackedLinear)}
    bits = {
        name.replace("_checkpoint_wrapped_module.", ""): hashlib.blake2b(
            whole_of(layer.weight_nf4).cpu().numpy().tobytes() + layer.weight_scales.cpu().numpy().tobytes()
        ).hexdigest()
        for name, layer in layers.items()
    }
    parts = [
        isinstance(layer.weight_nf4, DTensor) and layer.weight_nf4.to_local().numel() < layer.weight_nf4.numel()
        for layer in layers.values()
    ]
    return [(one.loss, one.grad_norm) for one in stats], bits, parts


def gone_on(task: Task, tmp_path: Path, plans: list[Plan]) -> None:
    """Hold a run that two ranks save in its middle, and any ranks go on with, against one device that does not stop."""
    ((alone, bits, _),) = run_ranks(made, 1, task, plan_of(Layout()), str(tmp_path / "alone"), STEPS, False)
    assert len(alone) == STEPS and len(bits) > 4
    first = run_ranks(made, 2, task, spread(Layout(dp_replicate=2)), str(tmp_path / "run"), SAVED, True)
    compared = [(first, alone[:SAVED], True)]
    for at, plan in enumerate(plans):
        folder = shutil.copytree(tmp_path / "run", tmp_path / f"run-{at}")
        ranks = run_ranks(made, plan.layout.devices, task, plan, str(folder), STEPS, False)
        compared.append((ranks, alone[SAVED:], plan.frozen == "spread"))
    for ranks, expected, is_spread in compared:
        for steps, held, parts in ranks:
            assert held == bits, "the same four bits, however they are cut"
            assert all(parts) if is_spread else not any(parts)
            assert len(steps) == len(expected)
            for step, (loss, norm) in zip(steps, expected, strict=True):
                assert step == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4))


def test_what_two_ranks_saved_goes_on_on_one_and_on_three(tmp_path: Path) -> None:
    """Three ranks divide no layer's bytes evenly; their blocks are computed again, and so gathered again."""
    gone_on(decoder_task(adapter=LORA), tmp_path, [plan_of(Layout()), spread(Layout(dp_replicate=3), recompute="full")])


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(decoder_task(adapter=dataclasses.replace(LORA, kind="dora")), id="dora"),
        pytest.param(dataclasses.replace(hf_task("GPTNeoX"), adapter=LORA), id="gpt-neox"),
    ],
)
def test_so_do_dora_and_another_family_on_shards(task: Any, tmp_path: Path) -> None:
    """DoRA unpacks a weight once more, for its norms."""
    gone_on(task, tmp_path, [spread(Layout(dp_shard=3), zero=3, recompute="full")])


@pytest.mark.deep
def test_so_do_copies_of_shards(tmp_path: Path) -> None:
    gone_on(decoder_task(adapter=LORA), tmp_path, [spread(Layout(dp_replicate=2, dp_shard=2), zero=2)])
