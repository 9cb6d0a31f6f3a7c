"""Groups that stay as they are in some steps, and rates that fall from block to block, are a plain torch loop's."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_kept
from programs import LR, ROWS, WIDTH, Block, Rows, Stack, cross_entropy, whole
from tests_shared import plan_of, world_here

from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.spec.layout import Layout
from paceline.spec.steps.update import GroupSpec, OptimizerSpec, ScheduleSpec
from paceline.spec.task import Task
from paceline.task.data.order.permutation import sample_ids
from paceline.task.optimizer.groups import freezing
from paceline.task.optimizer.layer_rates import layer_scales
from paceline.task.rules import Rules
from paceline.units import Amount
from paceline.verify.reference.plain_optimizer import _depths

STEPS, DECAY = 5, 0.5
FROZEN = {"stem.*": range(1, 3), "blocks.1.*": range(4, 6)}  # in these steps
OPTIMIZER = OptimizerSpec(
    lr=LR,
    layer_decay=DECAY,
    groups=(
        GroupSpec(match=("stem.*",), frozen_until=Amount(2, "steps")),
        GroupSpec(match=("blocks.1.*",), frozen_after=Amount(3, "steps"), weight_decay=0.3),
    ),
)


def stages_task() -> Task:
    return Task(name="stages", model=Stack, data=Rows(), objective=cross_entropy, optimizer=OPTIMIZER,
                schedule=ScheduleSpec(kind="constant"), global_batch=Amount(ROWS, "samples"),
                stop=Amount(STEPS, "steps"))  # fmt: skip


def laid_out(layout: Layout, zero: int) -> tuple[list[float], dict[str, Any]]:
    world, plan = world_here(), plan_of(layout, batch=ROWS, zero=zero, precision="fp64")
    built = assemble(stages_task(), plan, world, Rows(), 1)  # type: ignore[arg-type]
    built.stepper.freezes = True
    stream = BatchStream(Rows(), 7, plan, plan.layout.data_rank(world.rank), world.device)  # type: ignore[arg-type]
    norms = [built.stepper.step(stream.at(step * ROWS), LR).grad_norm for step in range(STEPS)]
    return norms, {name: whole(weight) for name, weight in built.model.named_parameters()}


def plain() -> tuple[list[float], dict[str, Any]]:
    """Return the same of a loop in torch alone, in which `requires_grad` says what is frozen."""
    (initial,) = run_kept(first_weights, 1)
    model = Stack().double()
    model.load_state_dict(initial)
    scale = {"stem": DECAY**4, "blocks.0": DECAY**3, "blocks.1": DECAY**2, "blocks.2": DECAY, "head": 1.0}
    groups = []
    for name, weight in model.named_parameters():
        factor = next(value for prefix, value in scale.items() if name.startswith(prefix))
        decay = 0.3 if name.startswith("blocks.1") else 0.1 if weight.dim() > 1 else 0.0
        groups.append({"params": [weight], "lr": LR * factor, "weight_decay": decay})
    optimizer, norms = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8), []
    for step in range(1, STEPS + 1):
        for pattern, steps in FROZEN.items():
            for name, weight in model.named_parameters():
                if name.startswith(pattern[:-1]):
                    weight.requires_grad_(step not in steps)
        optimizer.zero_grad()
        ids = sample_ids(7, np.arange((step - 1) * ROWS, step * ROWS), Rows.samples)
        batch = Rows().read(ids)
        loss, weight = cross_entropy(model, {**batch, "x": batch["x"].double()})
        (loss / weight).backward()
        trained = [weight for weight in model.parameters() if weight.grad is not None]
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
    return norms, dict(model.named_parameters())


def first_weights() -> dict[str, torch.Tensor]:
    task = dataclasses.replace(stages_task(), optimizer=OptimizerSpec(lr=LR))
    world, plan = world_here(), plan_of(Layout(), batch=ROWS, precision="fp64")
    return {name: weight.detach() for name, weight in assemble(task, plan, world, Rows(), 1).model.named_parameters()}  # type: ignore[arg-type]


def test_frozen_stages_and_layer_rates_are_a_plain_loop_under_zero() -> None:
    norms, weights = plain()
    for layout, zero in ((Layout(dp_shard=2), 3), (Layout(dp_replicate=2), 1)):
        for found in run_kept(laid_out, 2, layout, zero):
            assert found[0] == pytest.approx(norms, rel=1e-9), layout
            for name, weight in weights.items():
                torch.testing.assert_close(
                    found[1][name], weight.detach(), rtol=1e-9, atol=1e-11, msg=f"{layout} {name}"
                )


def test_what_is_frozen_from_which_step_on_is_a_decision() -> None:
    said = {step: [(each.before, each.after) for each in freezing(OPTIMIZER, step)] for step in range(1, STEPS + 1)}
    assert said == {1: [(None, "as they are")], 2: [], 3: [("as they are", "trained")],
                    4: [("trained", "as they are")], 5: []}  # fmt: skip


def test_rates_by_layer_need_layers() -> None:
    scales = layer_scales(Stack(), 0.5)
    assert scales["head.weight"] == 1.0 and scales["blocks.2.linear.bias"] == 0.5 and scales["stem.bias"] == 0.5**4
    with pytest.raises(ConfigError, match="no repeated blocks"):
        layer_scales(torch.nn.Linear(2, 2), 0.5)


class Stages(torch.nn.Module):
    """Two stages of blocks, and what joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.join, self.head = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.first, self.second = (torch.nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        for name in ("first", "join", "second", "head"):  # in the order in which they are called
            self._modules[name] = self._modules.pop(name)


def test_what_joins_two_stages_has_the_rate_of_the_stage_before_it() -> None:
    model = Stages()
    scales = layer_scales(model, 0.5)
    expected = {"stem": 5, "first.0": 4, "first.1": 3, "join": 3, "second.0": 2, "second.1": 1, "head": 0}
    for name, power in expected.items():
        assert {scale for each, scale in scales.items() if each.startswith(f"{name}.")} == {0.5**power}, name
    depths = {name: _depths(model)[weight] for name, weight in model.named_parameters()}
    assert scales == {name: 0.5**depth for name, depth in depths.items()}


class Chained(torch.nn.Module):
    """A chain in which only some of the blocks have weights, and what is below, between and above them."""

    paceline_rules = Rules(first=("stem",), blocks="blocks", last=("head",))

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList([torch.nn.Tanh(), Block(), torch.nn.Tanh(), Block(), torch.nn.Tanh()])
        self._modules["head"] = self._modules.pop("head")  # in the order in which they are called


def test_blocks_without_weights_count_among_those_above_and_below() -> None:
    """The rate of the head fell where the last block had none, and the proof ended with an error of Python's."""
    model = Chained()
    scales = layer_scales(model, 0.5)
    expected = {"stem": 6, "blocks.1": 4, "blocks.3": 2, "head": 0}
    for name, power in expected.items():
        assert {scale for each, scale in scales.items() if each.startswith(f"{name}.")} == {0.5**power}, name
    assert scales == {name: 0.5 ** _depths(model)[weight] for name, weight in model.named_parameters()}
