"""A program that asks for ranks computes other numbers in a process group than alone, and is told so."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist
from distributed import run_ranks
from tests_shared import PaddedText, decoder_task, plan_of
from torch import nn

from paceline.spec.layout import Layout
from paceline.task.objective import next_token
from paceline.verify.compare.in_a_group import differs_in_a_group, first_numbers, without_peers

CALLS = [0]


def by_world(model: nn.Module, batch: Any) -> Any:
    """Divide the loss by the number of ranks."""
    loss, weight = next_token(model, batch)
    return loss / (dist.get_world_size() if dist.is_initialized() else 1), weight


def scaled_gradient(model: nn.Module, batch: Any) -> Any:
    """Leave the loss, and multiply its gradient by the number of ranks."""
    loss, weight = next_token(model, batch)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return loss * ranks - loss.detach() * (ranks - 1), weight


def by_calls(model: nn.Module, batch: Any) -> Any:
    """Compute another loss in every call, whoever asks."""
    CALLS[0] += 1
    loss, weight = next_token(model, batch)
    return loss * CALLS[0], weight


PLAN = plan_of(Layout(dp_replicate=2), precision="fp64")
OBJECTIVES = (next_token, by_world, scaled_gradient, by_calls)


def given(objective: Any) -> tuple[Any, ...]:
    """Return what first numbers are asked of."""
    source = PaddedText()
    return decoder_task(objective=objective), PLAN, source, source.items_per_sample


def told(alone: list[Any]) -> list[Any]:
    """Return what a rank tells of each objective, whose numbers in a process alone are known."""
    return [differs_in_a_group(known, *given(one)) for known, one in zip(alone, OBJECTIVES, strict=True)]


def test_the_environment_says_nothing_of_others_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with without_peers():
        assert "WORLD_SIZE" not in os.environ and "RANK" not in os.environ and os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["WORLD_SIZE"] == "4" and os.environ["RANK"] == "1"


def test_what_asks_for_ranks_is_told_and_nothing_else() -> None:
    alone = [first_numbers(*given(objective)) for objective in OBJECTIVES]
    plain, divided, scaled, counting = run_ranks(told, 2, alone)[0]
    assert plain is None
    assert divided.first_difference.family == "process group" and divided.first_difference.quantity == "loss"
    assert divided.first_difference.ratio == pytest.approx(0.5)
    assert scaled.first_difference.quantity == "gradients" and scaled.first_difference.ratio == pytest.approx(2.0)
    assert counting is None, "one that is another in every call is for the comparison with the layout"
