"""Ranks whose samples pass other weights of a unit sum up each weight's own gradients, as one device does."""

from __future__ import annotations

import pytest
import torch
from distributed import run_kept
from rounding import FP64_TRAINED
from tests_shared import VOCAB, decoder_task, plan_of, run_steps
from torch import nn

from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import Task

TASK = {"optimizer": OptimizerSpec(lr=1e-2, weight_decay=0.5), "objective": "next_token"}


class Fork(nn.Module):
    """A sample passes one of two matrices of one shape, so that no length of a buffer tells which; one is for none."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.none = (nn.Linear(12, 12, bias=False) for _ in range(3))

    def forward(self, hidden: torch.Tensor, is_even: bool) -> torch.Tensor:
        return hidden + torch.tanh((self.even if is_even else self.odd)(hidden))


class Forks(nn.Module):
    """Forks in blocks, and one outside of them; the inputs of the first block need a gradient or not."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 12), nn.Linear(12, VOCAB, bias=False)
        self.embed.weight.requires_grad_(not frozen)
        self.layers = nn.ModuleList(Fork() for _ in range(2))
        self.even, self.odd = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        is_even = int(tokens[0, 0]) % 2 == 0
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, is_even)
        return self.head((self.even if is_even else self.odd)(hidden))


class FrozenForks(Forks):
    def __init__(self) -> None:
        super().__init__(frozen=True)


def weights(task: Task, plan: Plan) -> dict[str, torch.Tensor]:
    """Return the weights after a step that every way is taken in, and more."""
    _, built = run_steps(task, plan, 3)
    held = {name: weight.detach() for name, weight in built.model.named_parameters()}
    return {n: (w.full_tensor() if hasattr(w, "full_tensor") else w).clone() for n, w in held.items()}


@pytest.mark.parametrize("model", [Forks, FrozenForks])
@pytest.mark.parametrize("changes", [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "recompute": "full"}], ids=str)
def test_shards_of_weights_that_few_ranks_reach(model: type[nn.Module], changes: dict) -> None:
    task = decoder_task(model=model, **TASK)
    (one,) = run_kept(weights, 1, task, plan_of(Layout(), micro_batch=1, precision="fp64"))
    for layout in (Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2))[: 2 if changes["zero"] == 3 else 1]:
        sharded = plan_of(layout, micro_batch=1, precision="fp64", **changes)
        for found in run_kept(weights, layout.devices, task, sharded):
            for name, weight in found.items():
                torch.testing.assert_close(weight, one[name], rtol=FP64_TRAINED, atol=1e-12, msg=name)
