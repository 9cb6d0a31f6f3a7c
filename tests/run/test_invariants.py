"""Ranks that must agree do, and one that departs is named."""

from __future__ import annotations

import pytest
import torch
from distributed import run_ranks
from tests_shared import decoder_task, plan_of, run_steps

from paceline.errors import VerificationFailed
from paceline.plan.layout import Layout
from paceline.run.invariants import check_agreement, fingerprint
from paceline.run.world import join_world


def trained(layout: Layout, name: str = "", rank: int = 1) -> None:
    """Train two steps, then move one weight of one rank by one unit in the last place and check."""
    world = join_world("cpu", threads=1)
    stats, built = run_steps(decoder_task(), plan_of(layout), 2, world)
    if world.rank == rank and name:
        weight = built.model.get_parameter(name).detach()
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        flat = local.view(-1)
        flat[0] = torch.nextafter(flat[0], torch.tensor(1e9))
    check_agreement(built.model, {"gradient norm": stats[-1].grad_norm, "lr": stats[-1].lr}, 2, world)


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_replicate=2), Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2), Layout(tp=2), Layout(pp=2)],
    ids=str,
)
def test_no_correct_layout_is_stopped(layout: Layout) -> None:
    assert run_ranks(trained, layout.devices, layout) == [None] * layout.devices


@pytest.mark.parametrize(
    ("layout", "name", "ranks"),
    [
        (Layout(dp_replicate=2), "layers.1.mlp.up_proj.weight", "ranks 0 and 1"),
        (Layout(tp=2), "layers.0.input_layernorm.weight", "ranks 0 and 1"),
        (Layout(dp_replicate=2, dp_shard=2), "layers.2.self_attn.q_proj.weight", "and 3|and 1"),
    ],
    ids=str,
)
def test_one_unit_in_the_last_place_is_named(layout: Layout, name: str, ranks: str) -> None:
    with pytest.raises(VerificationFailed, match=rf"step 2: .*({ranks}).* no longer agree on {name}") as caught:
        run_ranks(trained, layout.devices, layout, name, layout.devices - 1)
    assert caught.value.exit_code == 4


def test_fingerprints_differ_by_a_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weight = torch.randn(33, dtype=torch.float32).to(dtype)
        other = weight.clone()
        other[5] += other[5].abs() * 0.02
        assert fingerprint(weight) == fingerprint(weight.clone())
        assert fingerprint(weight) != fingerprint(other)
