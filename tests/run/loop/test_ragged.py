"""Samples of different lengths, padded per micro-batch: the padding must not change a number."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed import run_kept
from tests_shared import plan_of, world_here
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.errors import ConfigError, DataError
from paceline.plan.planned import plan_task
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.spec.layout import Layout
from paceline.spec.load import load_spec
from paceline.spec.task import DataSpec
from paceline.task.data.order.permutation import sample_ids
from paceline.task.data.source import open_sources
from paceline.task.data.sources.mapped import MapSource

EXAMPLE = Path(__file__).parents[3] / "examples" / "ragged.toml"
STEPS, BATCH = 3, 13


def weights(layout: Layout, micro_batch: int) -> dict[str, torch.Tensor]:
    """Return the whole weights after the steps of the example under a layout, by name."""
    task = load_spec(EXAMPLE).task
    source, world = open_sources(task.data, task.seed)[0], world_here()
    plan = plan_of(layout, batch=BATCH, micro_batch=micro_batch, precision="fp64")
    built = assemble(task, plan, world, source, 1)
    stream = BatchStream(source, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    for step in range(STEPS):
        built.stepper.step(stream.at(step * BATCH), task.optimizer.lr)
    named = built.model.named_parameters()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in named}


def by_hand() -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop that sees every sample alone, without any padding."""
    task = load_spec(EXAMPLE).task
    module = sys.modules["ragged"] if "ragged" in sys.modules else __import__("ragged")
    data = module.Sums()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        model = module.Parity().double()
    momentum = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(STEPS):
        ids = sample_ids(task.seed, np.arange(step * BATCH, (step + 1) * BATCH), len(data))
        model.zero_grad()
        for index in ids.tolist():
            digits, label = data[index]
            loss = nn.functional.cross_entropy(model(digits.unsqueeze(0)), torch.tensor([label]), reduction="sum")
            (loss / BATCH).backward()
        nn.utils.clip_grad_norm_(model.parameters(), task.optimizer.clip_norm)
        for name, p in model.named_parameters():
            lr = 1e-3 * (0.5 if name.endswith(".bias") or name.startswith("embed.") else 1.0)
            with torch.no_grad():
                update = torch.sign(0.9 * momentum[name] + 0.1 * p.grad)
                p -= lr * (update + (0.1 * p if p.dim() > 1 else 0.0))
                momentum[name] = 0.95 * momentum[name] + 0.05 * p.grad
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("layout", "micro_batch"), [(Layout(), 13), (Layout(), 3), (Layout(dp_shard=2), 2), (Layout(dp_replicate=3), 1)]
)
def test_padding_changes_nothing(layout: Layout, micro_batch: int) -> None:
    found = run_kept(weights, layout.devices, layout, micro_batch)
    expected = by_hand()
    for whole in found:
        assert whole.keys() == expected.keys()
        for name, weight in whole.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-11, msg=name)


class Ragged:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), index)


def test_a_collate_gets_the_samples_and_their_ids_if_it_asks_for_them() -> None:
    seen = []

    def pad(samples: list[torch.Tensor], ids: list[int]) -> torch.Tensor:
        seen.append(ids)
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    source = MapSource(Ragged(), 7, pad)
    assert source.read(np.array([3, 0])).tolist() == [[3, 3, 3, 3], [0, 0, 0, 0]]
    assert seen[-1] == [3, 0]
    with pytest.raises(DataError, match="do not make a batch"):
        MapSource(Ragged(), 7).read(np.array([3, 0]))
    with pytest.raises(DataError, match=r"samples 3, 0 of Ragged cannot be collated[\s\S]*ZeroDivisionError"):
        MapSource(Ragged(), 7, lambda samples: 1 / 0 if len(samples) > 1 else samples).read(np.array([3, 0]))
    with pytest.raises(ConfigError, match="one shape"):
        open_sources(DataSpec(source="digits", collate="ragged:pad"), 7)


def test_axes_that_need_one_shape_are_closed() -> None:
    planned = plan_task(load_spec(EXAMPLE, ["cluster.devices=2"]))
    assert "another length" in planned.profile.closed_axes["pp"]
    assert planned.plan.layout.pp == planned.plan.layout.cp == 1
