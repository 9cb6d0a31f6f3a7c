"""A parameter that no copy reached has no gradient, as on one device; one that some copy reached has its sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_kept
from rounding import FP64_TRAINED
from tests_shared import VOCAB, decoder_task, plan_of, run_steps
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import ConfigError
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


class Twice:
    """Sums over this rank and another one that has computed the same."""

    def begin(self, buckets: object) -> None:
        """Nothing is to be kept."""

    def start(self, index: int, flat: torch.Tensor, group: object) -> Twice:
        flat.mul_(2.0)
        return self

    def wait(self) -> None:
        """The sums are there at once."""


class Again(nn.Module):
    """One layer several times, each recomputed in a backward pass of its own: torch's older way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.head = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.times = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = x + checkpoint(self.shared, x, use_reentrant=True).tanh()
        return self.head(x)


def passed(model: Again, gradients: ReducedGradients, micro_batches: int) -> None:
    """Make the passes of a step."""
    gradients.zero()
    for number in range(micro_batches):
        gradients.before_micro_batch(last=number == micro_batches - 1)
        model(torch.ones(2, 4)).square().sum().backward()
    gradients.finish()


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_weight_that_one_pass_comes_to_several_times_is_summed_whole(micro_batches: int, bucket_bytes: int) -> None:
    model, group = Again(), Any
    gradients = ReducedGradients(model, group, bucket_bytes, Twice())  # type: ignore[arg-type]
    plain = torch.autograd.grad(_plain(model).square().sum(), list(model.parameters()))
    expected = [2.0 * micro_batches * grad for grad in plain]
    for _ in range(3):
        passed(model, gradients, micro_batches)
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, grad)


def _plain(model: Again) -> torch.Tensor:
    """Return what the model does, without recomputing."""
    x = model.first(torch.ones(2, 4))
    for _ in range(model.times):
        x = x + model.shared(x).tanh()
    return model.head(x)


def test_a_weight_that_a_later_pass_comes_to_again_is_an_error_once_its_sum_has_begun() -> None:
    model, group = Again(), Any
    gradients = ReducedGradients(model, group, 1, Twice())  # type: ignore[arg-type]
    model.times = 1
    passed(model, gradients, 1)
    model.times = 3
    with pytest.raises(ConfigError, match="use_reentrant"):
        passed(model, gradients, 1)
