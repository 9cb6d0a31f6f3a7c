"""A model larger than one process's memory starts: built, imported, saved and loaded shard by shard.

The most that a rank ever had resident, pages of mapped files included, is held against the whole model. One device is
measured in the same way, and does hold it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from distributed import run_ranks
from tests_shared import SEQ_LEN, VOCAB, decoder_task, plan_of, world_here

from paceline.checkpoint import load_latest, materialise_optimizer_state, save_checkpoint, training_state
from paceline.run.assemble import assemble
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec
from paceline.task.models.build import build_model
from paceline.task.models.huggingface.weights import export_safetensors

MODEL = ModelSpec("llama-1m", hidden=1024, layers=4, heads=16, kv_heads=16, ffn=3072, vocab=4096)
WEIGHT_BYTES = 4 * (4096 * 1024 + 4 * (4 * 1024**2 + 3 * 1024 * 3072) + 9 * 1024)  # 235 MB; the head is tied
STATE_BYTES = 3 * WEIGHT_BYTES  # with the optimizer's two moments
LAYOUTS = [Layout(dp_shard=4), Layout(tp=4), Layout(pp=4)]
STATUS = Path("/proc/self/status")

pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="reads what Linux says of a process")


def status_bytes(field: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(field))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def start_save_load(plan: Plan, folder: str, weights: str) -> tuple[int, int, int]:
    """Start, save, and load into other values.

    Returns the bytes of weights and state that this rank holds, and by how much memory rose at most until the start
    and in all.
    """
    world = world_here()
    task = decoder_task(model=dataclasses.replace(MODEL, weights=weights))
    small = dataclasses.replace(task, model=dataclasses.replace(MODEL, hidden=32, heads=4, kv_heads=4, ffn=48))
    assemble(small, plan, world, task.data, SEQ_LEN)  # what is imported at the first use is not the model's
    before = status_bytes("VmRSS")
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    started = status_bytes("VmHWM") - before
    materialise_optimizer_state(built.optimizer)
    state = training_state(built.model, built.optimizer)
    with torch.no_grad():
        for tensor in state.values():
            local(tensor).add_(1)  # zeros that nobody has touched take no memory
    save_checkpoint(Path(folder), 1, state, {}, keep_last=1)
    sums = [float(local(tensor.detach()).sum(dtype=torch.float64)) for tensor in state.values()]
    with torch.no_grad():
        for tensor in state.values():
            local(tensor).fill_(7)
    assert load_latest(Path(folder), state) is not None
    assert [float(local(tensor.detach()).sum(dtype=torch.float64)) for tensor in state.values()] == sums
    return sum(local(tensor).nbytes for tensor in state.values()), started, status_bytes("VmHWM") - before


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build_model(MODEL, VOCAB, SEQ_LEN, seed=3)
    return export_safetensors(model.state_dict(), model.config, tmp_path_factory.mktemp("weights") / "export")


CASES = [
    pytest.param(layout, False, id=f"{layout}-drawn", marks=[pytest.mark.deep] * (layout == LAYOUTS[-1]))
    for layout in LAYOUTS
]
CASES += [
    pytest.param(layout, True, id=f"{layout}-imported", marks=[pytest.mark.deep] * (layout != LAYOUTS[0]))
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("layout", "imports"), CASES)
def test_no_rank_holds_the_whole_model(layout: Layout, imports: bool, tmp_path: Path, imported: Path) -> None:
    for held, started, in_all in run_ranks(
        start_save_load, 4, plan_of(layout, batch=16), str(tmp_path), str(imported) if imports else ""
    ):
        assert STATE_BYTES / 5 < held < STATE_BYTES / 3
        assert held / 3 < started < WEIGHT_BYTES / 2
        # Loading maps as much of the checkpoint as is held; what was drawn or summed up in between is not given back.
        assert in_all < 2 * held + WEIGHT_BYTES / 2 < STATE_BYTES


def test_one_device_does_hold_it(tmp_path: Path) -> None:
    ((held, started, in_all),) = run_ranks(start_save_load, 1, plan_of(Layout(), batch=16), str(tmp_path), "")
    assert held >= STATE_BYTES and started > WEIGHT_BYTES and in_all > STATE_BYTES
