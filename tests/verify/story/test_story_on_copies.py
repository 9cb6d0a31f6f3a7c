"""A story of copies whose model needs all weights goes on where every rank has them, and not where it is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline
from paceline.errors import NeedsWholeWeights
from paceline.session.verbs.proofs import Verification

PENALISED = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rows():
    made = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=made)
    return [(row, (row.sum() * 3).long() % 5) for row in x]


def penalised(model, batch):
    x = batch[0].detach().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(model(x), batch[1], reduction="sum")
        (by_x,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 0.1 * by_x.square().sum(), len(x)
"""


@pytest.fixture
def proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Verification]:
    """Give what proves a layout of a model whose objective takes a gradient itself."""
    (tmp_path / "penalised_rows.py").write_text(PENALISED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(tmp_path)
    task = {
        "name": "penalised", "model": {"name": "penalised_rows:Net"}, "data": {"source": "penalised_rows:rows"},
        "objective": "penalised_rows:penalised", "global_batch": "8 samples", "stop": "4 steps",
    }  # fmt: skip
    return lambda layout: paceline.verify(
        task, cluster={"device": "cpu", "probe": False}, layout=layout, dtypes=("fp64",)
    )


def test_copies_are_proven_with_their_story_and_shards_are_refused(proved: Callable[[str], Verification]) -> None:
    (proof,) = proved("dp_replicate=2").layouts
    assert proof.equal and [part.equal for part in proof.parts if part.check == "story"] == [True]
    with pytest.raises(NeedsWholeWeights, match="leads back through weights that are let go of") as refused:
        proved("dp_shard=2")
    assert "needs_whole_weights" in refused.value.try_
