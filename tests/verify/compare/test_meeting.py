"""Rows of one label, or one sample twice: few batches have any, and a loss may see them together."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_whole_batch import checked, task_of
from torch import Tensor, nn

from paceline.task.data.sources.mapped import MapSource
from paceline.units import Amount


class People:
    """Noisy rows of very many persons, hardly one of them twice; tokens of each, no two alike."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = np.random.default_rng(index)
        row = torch.tensor(drawn.normal(size=6), dtype=torch.float32)
        return {"ours": row, "labels": torch.tensor(index), "tokens": torch.tensor(drawn.integers(0, 10**6, 3))}


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def pulled(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Pull rows of one person together."""
    found = model(batch["ours"])
    same = (batch["labels"][:, None] == batch["labels"]).triu(1)
    apart = (found[:, None] - found).square().sum(2)
    return found.square().sum() + (apart * same).sum(), len(found)


def counted_once(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Count rows of the same tokens once."""
    found = model(batch["ours"]).square().sum(1)
    _, of, times = batch["tokens"].unique(dim=0, return_inverse=True, return_counts=True)
    return (found / times[of]).sum(), len(found)


def by_label(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Weigh each row by its own label: a sum over rows, whoever else has it."""
    found = F.normalize(model(batch["ours"]), dim=1)
    return (found.square() * (batch["labels"] % 3)[:, None]).sum() + found.sum(), len(found)


@pytest.mark.parametrize(
    ("objective", "said"), [(pulled, "have the labels"), (counted_once, "are the samples"), (by_label, "")]
)
def test_rows_that_meet_in_few_batches_alone_are_looked_at(objective: Any, said: str) -> None:
    """Of rows that are all of other persons these losses are sums, and the proof said equal."""
    task = dataclasses.replace(task_of(tower, objective, MapSource(People(), 7)), global_batch=Amount(64, "samples"))
    found = checked(task)
    assert found.equal is not bool(said)
    if said:
        assert found.first_difference.family == "loss not a sum over rows" and said in found.first_difference.likely
