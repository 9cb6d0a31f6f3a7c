"""An objective that counts fractions of items: their sum is rounded, and what is lost of it is told all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_ranks
from tests_shared import SEQ_LEN, Dropout, decoder_task, plan_of
from torch import Tensor

from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.spec.proof.records import CheckProof
from paceline.verify.compare.difference import Difference
from paceline.verify.compare.layout import compare


def by_fractions(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of next tokens, of which each counts as a part of one."""
    logits, labels = model(batch["tokens"]), batch["labels"]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    shares = (batch["tokens"] % 7 + 1).to(losses.dtype) / 70
    return (losses * shares).sum(), shares.sum()


def losing_some(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the same, of which one rank counts too little; the reference is rank 0's."""
    loss, weight = by_fractions(model, batch)
    return loss, weight * (0.999 if dist.get_rank() else 1.0)


def held(objective: Any, precision: str) -> CheckProof:
    world, task = join_world("cpu", threads=1), decoder_task(model=Dropout, objective=objective)
    plan = plan_of(Layout(dp_shard=2), batch=9, precision=precision)
    return compare(task, plan, world, task.data, SEQ_LEN, 2, {})


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_sum_of_fractions_is_rounded_as_a_loss_is(precision: str) -> None:
    found = run_ranks(held, 2, by_fractions, precision)[0]
    assert found.equal and found.differences["weight"] < 1e-6, found


def test_a_fraction_that_is_lost_is_told() -> None:
    first = run_ranks(held, 2, losing_some, "fp32")[0].first_difference
    assert (first.quantity, first.step) == ("weight", 1)


def test_items_are_counted_exactly() -> None:
    def found(ours: float, reference: float) -> Difference:
        return Difference("weight", "weight", 1, 0, abs(ours / reference - 1), 1.0, ours, reference)

    assert found(10_000_001.0, 10_000_000.0).tolerance_in("fp32") == 0
    assert found(3.0, 3.0000002).tolerance_in("fp32") == 1e-5
