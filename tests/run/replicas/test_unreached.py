"""A parameter that no copy reached has no gradient, as on one device; one that some copy reached has its sum."""

from __future__ import annotations

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


class Parts(nn.Module):
    """Some samples pass a layer of their own, and one matrix is used by none: decay would show in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 12), nn.Linear(12, VOCAB, bias=False)
        self.some, self.unused = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.some(hidden) if int(tokens[0, 0]) % 8 == 0 else hidden)


def weights(task: Task, plan: Plan) -> dict[str, torch.Tensor]:
    """Return the weights after one step and a few."""
    _, built = run_steps(task, plan, 3)
    return {name: weight.detach().clone() for name, weight in built.model.named_parameters()}


def test_copies_leave_alone_what_none_of_them_reached() -> None:
    """Each sample is a micro-batch of its own, so that it passes the same layers on any layout."""
    task = decoder_task(model=Parts, **TASK)
    (one,) = run_kept(weights, 1, task, plan_of(Layout(), micro_batch=1, precision="fp64"))
    small = plan_of(Layout(dp_replicate=2), micro_batch=1, precision="fp64", bucket_bytes=64)
    for found in run_kept(weights, 2, task, small):
        for name, weight in found.items():
            torch.testing.assert_close(weight, one[name], rtol=FP64_TRAINED, atol=1e-12, msg=name)
