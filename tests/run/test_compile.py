"""Compiled blocks under every recompute mode and precision: really compiled, and the same numbers."""

from __future__ import annotations

import pytest
import torch
from rounding import MEAN_LOSS_BF16, assert_curves_close
from tests_shared import SEQ_LEN, decoder_task, plan_of, run_steps, world_here
from vectors import needs_vectors

from paceline.run.assemble import assemble
from paceline.spec.layout import Layout

pytestmark = needs_vectors
DEEP = pytest.mark.deep  # compiling takes seconds


@pytest.mark.parametrize("recompute", [pytest.param(each, marks=DEEP) for each in ("selective", "none", "full")])
def test_blocks_are_compiled_whole_and_compute_the_same(recompute: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    task, setting = decoder_task(), {"batch": 12, "precision": "bf16", "recompute": recompute}
    compiled, _ = run_steps(task, plan_of(Layout(), **setting, compile=True), 2)
    counters = torch._dynamo.utils.counters
    assert dict(counters["graph_break"]) == {}
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 0
    eager, _ = run_steps(task, plan_of(Layout(), **setting), 2)
    # The compiler keeps fp32 between operators where eager mode rounds to bf16.
    assert_curves_close([s.loss for s in compiled], [s.loss for s in eager], 5 * MEAN_LOSS_BF16)


def sizes_kept(recompute: str) -> tuple[set[int], set[int]]:
    """Return the sizes of the bf16 tensors that compiled blocks keep for the backward pass, and those of matrices."""
    torch._dynamo.reset()
    task = decoder_task()
    plan = plan_of(Layout(), precision="bf16", recompute=recompute, compile=True)
    built = assemble(task, plan, world_here(), task.data, SEQ_LEN)
    kept = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16:
            kept.add(tensor.numel())
        return tensor

    rows = task.data.read(torch.arange(8).numpy())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_sum, _ = built.stepper.passes.objective(built.model, rows)
    assert loss_sum.isfinite()
    return kept, {p.numel() for p in built.model.layers[0].parameters() if p.dim() == 2}


@DEEP
@pytest.mark.parametrize(("recompute", "keeps"), [("none", True), ("selective", False), ("full", False)])
def test_recompute_keeps_no_casts_of_weights(recompute: str, keeps: bool) -> None:
    kept, matrices = sizes_kept(recompute)
    assert (matrices & kept) == (matrices if keeps else set())
