"""A parameter that no copy reached has no gradient, as on one device; one that some copy reached has its sum."""

from __future__ import annotations

from typing import Any

import torch
from distributed import run_kept
from rounding import FP64_TRAINED
from tests_shared import VOCAB, decoder_task, plan_of, run_steps
from torch import nn

from paceline.run.replicas.allreduce import ReducedGradients
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import Task
from paceline.task.models.held import whole_of

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
    """Return the weights after some steps: between some of them what ranks reached changes, between others not."""
    _, built = run_steps(task, plan, 8)
    return {name: whole_of(weight).detach().clone() for name, weight in built.model.named_parameters()}


def test_ranks_leave_alone_what_none_of_them_reached() -> None:
    """Each sample is a micro-batch of its own, so that it passes the same layers on any layout."""
    task = decoder_task(model=Parts, **TASK)
    (one,) = run_kept(weights, 1, task, plan_of(Layout(), micro_batch=1, precision="fp64"))
    for layout in (Layout(dp_replicate=2), Layout(dp_shard=2)):
        small = plan_of(layout, micro_batch=1, precision="fp64", bucket_bytes=64)
        for found in run_kept(weights, 2, task, small):
            for name, weight in found.items():
                torch.testing.assert_close(weight, one[name], rtol=FP64_TRAINED, atol=1e-12, msg=f"{layout} {name}")


class Elsewhere:
    """Sums over this rank and another one, which has reached some of the two parameters."""

    def __init__(self) -> None:
        self.reached = [0.0, 0.0]

    def begin(self, buckets: object) -> None:
        """Nothing is to be kept."""

    def start(self, index: int, flat: torch.Tensor, group: object) -> Elsewhere:
        flat[-2:] += torch.tensor(self.reached)
        return self

    def wait(self) -> None:
        """The sums are there at once."""


def test_ranks_ask_again_where_any_of_them_missed_others_than_before() -> None:
    """A rank that misses the same takes gradients without asking, and gives them back where another rank has news."""
    model: Any = nn.ParameterList([torch.ones(3), torch.ones(3)])
    sums, group = Elsewhere(), Any
    gradients = ReducedGradients(model, group, bucket_bytes=1 << 20, sums=sums)  # type: ignore[arg-type]
    gradients.zero()
    (bucket,) = gradients._buckets
    one, other = bucket.parameters

    def step(reached: list[nn.Parameter], elsewhere: list[float], told: int, asks: bool) -> list[bool]:
        """Make a step; return which parameters have a gradient in it."""
        sums.reached = elsewhere
        gradients.zero()
        gradients.before_micro_batch(last=True)
        for parameter in reached:
            gradients._hook(0)(parameter)
        gradients.finish()
        assert gradients.unreached() == told
        if asks:
            gradients.settle()
        for parameter, grad in zip(bucket.parameters, bucket.grads, strict=True):
            assert parameter.grad is None or parameter.grad is grad
        return [parameter.grad is not None for parameter in bucket.parameters]

    assert step([one, other], [1.0, 1.0], told=0, asks=False) == [True, True]
    assert step([one], [1.0, 0.0], told=1, asks=True) == [True, False]
    assert step([one], [1.0, 0.0], told=0, asks=False) == [True, False], "as before: nobody asks"
    assert step([one], [1.0, 1.0], told=0, asks=True) == [True, True], "the other rank has reached more, and says so"
    assert step([one], [1.0, 1.0], told=0, asks=False) == [True, True]
    assert step([one], [0.0, 0.0], told=0, asks=True) == [True, False], "the other rank has reached less"
    assert step([one, other], [0.0, 0.0], told=1, asks=True) == [True, True], "what was missed is reached: that is news"
    assert step([one, other], [0.0, 0.0], told=0, asks=False) == [True, True]
