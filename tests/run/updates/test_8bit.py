"""AdamW with 8-bit states: the same on every layout as on one device, and refused where it cannot be."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from distributed import run_kept, run_ranks
from test_optimizers import assert_same, halves, trained, weights_by_hand, weights_under
from tests_shared import SEQ_LEN, decoder_task, plan_of, world_here
from torch import nn

from paceline.errors import ConfigError, MissingExtra
from paceline.spec.layout import Layout
from paceline.spec.optimizers import check_options, state_values, use_of
from paceline.spec.steps.update import GroupSpec, OptimizerSpec
from paceline.task.optimizer.update_scope import scope_known
from paceline.verify.compare.layout import compare
from paceline.verify.twin.task import SMALLEST_8BIT, twin_optimizer

BLOCK = 256
SPEC = OptimizerSpec("adamw8bit", lr=3e-3, eps=1e-6, arguments={"min_8bit_size": BLOCK})
installed = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs the extra 8bit")


# ---- without the package ---------------------------------------------------------------------------------------------


def test_without_its_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    check_options(OptimizerSpec("adamw"))
    for spec in (SPEC, OptimizerSpec("adamw", groups=(GroupSpec(match=("*",), name="adamw8bit"),))):
        with pytest.raises(MissingExtra) as error:
            check_options(spec)
        assert error.value.try_ == "pip install 'paceline[8bit]'"
    with pytest.raises(MissingExtra, match="'adamw8bit' needs the package 'bitsandbytes'"):
        use_of(SPEC, "adamw8bit", {})


def test_states_in_blocks_of_shards_are_refused() -> None:
    with pytest.raises(ConfigError, match="every layout would train other numbers"):
        use_of(OptimizerSpec(), "torchao.optim:AdamW8bit", {})


def test_a_twin_has_8_bit_states_too() -> None:
    twin = twin_optimizer(OptimizerSpec("adamw8bit", groups=(GroupSpec(match=("*",), name="adamw"),)))
    assert twin.arguments == {"min_8bit_size": SMALLEST_8BIT}
    assert twin.groups[0].arguments == {}
    assert twin_optimizer(OptimizerSpec()) == OptimizerSpec()


# ---- with it ---------------------------------------------------------------------------------------------------------


def by_hand(model: nn.Module) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(
        halves(model, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-6, min_8bit_size=BLOCK, weight_decay=0.1
    )


@installed
@pytest.mark.parametrize(
    ("layout", "zero"),
    [(Layout(), 3), (Layout(dp_shard=3), 3), (Layout(dp_shard=2), 1), (Layout(dp_replicate=2, dp_shard=2), 2)],
    ids=str,
)
def test_every_layout_makes_the_updates_of_whole_parameters(layout: Layout, zero: int) -> None:
    task = decoder_task(optimizer=SPEC)
    expected = weights_by_hand(task, by_hand)
    for whole in run_kept(weights_under, layout.devices, task, layout, zero):
        assert_same(whole, expected)


def updates_of_parts() -> dict[str, torch.Tensor]:
    """Return the weights of a factory that says it works on parts."""
    import bitsandbytes

    def on_parts(params: list, lr: float) -> torch.optim.Optimizer:
        return bitsandbytes.optim.AdamW8bit(params, lr=lr, min_8bit_size=BLOCK)

    on_parts.paceline_scope = "element"  # type: ignore[attr-defined]
    return weights_under(decoder_task(optimizer=OptimizerSpec(on_parts)), Layout(dp_shard=3), 3)


@installed
def test_states_of_parts_are_refused_whoever_asks_for_them() -> None:
    with pytest.raises(ConfigError, match="no other layout could read it"):
        run_ranks(updates_of_parts, 3)


def proven() -> dict:
    task = decoder_task(optimizer=SPEC)
    plan = plan_of(Layout(dp_shard=2), batch=9, zero=3, precision="fp64")
    return compare(task, plan, world_here(), task.data, SEQ_LEN, 3, {})


@installed
def test_the_proof_says_equal() -> None:
    record = run_ranks(proven, 2)[0]
    assert record.equal, record.first_difference


@installed
def test_a_trial_of_the_same_class_tells_that_it_needs_whole_parameters() -> None:
    assert scope_known(use_of(OptimizerSpec(), "bitsandbytes.optim:AdamW8bit", {})).scope == "parameter"


@installed
def test_a_state_takes_what_the_forecast_says() -> None:
    weight = nn.Parameter(torch.randn(512, 512))
    optimizer = use_of(OptimizerSpec(), "adamw8bit", {}).factory([weight], lr=1e-3)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    tables = ("qmap1", "qmap2")  # shared by all parameters
    held = sum(v.nbytes for k, v in optimizer.state[weight].items() if torch.is_tensor(v) and k not in tables)
    assert held == state_values("adamw8bit") * weight.nbytes


@installed
@pytest.mark.deep
def test_training_goes_on_where_it_was_on_another_layout(tmp_path: Path) -> None:
    plans = [plan_of(layout, batch=12, precision="fp64") for layout in (Layout(dp_shard=2), Layout(dp_shard=3))]
    whole, parted, task = str(tmp_path / "whole"), str(tmp_path / "parted"), decoder_task(optimizer=SPEC)
    expected = run_ranks(trained, 3, task, plans[1], whole, 1, 4)[0]
    run_ranks(trained, 2, task, plans[0], parted, 1, 2)
    for found in run_ranks(trained, 3, task, plans[1], parted, 3, 4):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-11)
