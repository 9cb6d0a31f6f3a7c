"""The proof for a loop of one's own: right loops are equal, a mean of means is not, and misuse says what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_kept, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import ConfigError
from paceline.spec.proof.records import LoopProof
from paceline.verify.loops.adapter import verify_loop

LR = 0.1


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11)).to(dtype)


def batches_of(rank: int, steps: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return token rows of which every rank has another number of labels that count."""
    generator = torch.Generator().manual_seed(10 + rank)
    rows = [torch.randint(0, 11, (3, 6), generator=generator) for _ in range(steps)]
    labels = [row.roll(-1, 1) for row in rows]
    for label in labels:
        label[:, : 1 + 2 * rank] = -100
    return list(zip(rows, labels, strict=True))


def objective(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return loss, (labels != -100).sum()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def ddp(kind: str, dtype: torch.dtype = torch.float64) -> LoopProof:
    """Check a loop on plain DDP, which averages gradients over ranks, right or with a mean of means."""
    model = DistributedDataParallel(network(dtype))
    optimizer, world = sgd(model.parameters()), dist.get_world_size()

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss, weight = objective(model, batch)
        total = torch.stack([loss.detach(), weight.to(loss.dtype)])
        dist.all_reduce(total)
        if kind == "mean of means":
            (loss / weight).backward()
            mean = (loss / weight).detach()
            dist.all_reduce(mean, op=dist.ReduceOp.SUM)
            reported = mean / world
        else:
            (loss * world / total[1]).backward()
            reported = total[0] / total[1]
        optimizer.step()
        if kind == "gradients dropped":
            optimizer.zero_grad()
        return None if kind == "no loss" else reported

    return verify_loop(step, model, batches_of(dist.get_rank()), objective=objective, optimizer=sgd)


def sharded(part: bool) -> LoopProof:
    """Check FSDP2 with gradients as sums, without an optimizer of the reference."""
    plain, model = network(), network()
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    optimizer = sgd(model.parameters())
    rank = 0 if part else dist.get_rank()
    ranks = 1 if part else dist.get_world_size()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss, weight = objective(model, batch)
        total = weight.to(loss.dtype).reshape(1)
        dist.all_reduce(total)
        (loss / total).sum().backward()
        optimizer.step()

    assert ranks in (1, 2)
    return verify_loop(step, model, batches_of(rank), objective=objective, plain=plain, part=rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_right_loop_is_equal(ranks: int, dtype: torch.dtype) -> None:
    results = run_kept(ddp, ranks, "right", dtype)
    assert all(result == dataclasses.replace(results[0], seconds=result.seconds) for result in results)
    assert results[0].equal and results[0].first_difference is None and results[0].steps == 2
    assert set(results[0].differences) == {"loss", "gradients", "weights"}
    assert all(value < 1e-4 for value in results[0].differences.values())


def test_a_mean_of_means_with_unequal_weights_is_found() -> None:
    result = run_kept(ddp, 2, "mean of means")[0]
    first = result.first_difference
    assert not result.equal and (first.quantity, first.step) == ("loss", 1)
    assert result.differences["gradients"] > 1e-3
    assert "loss" in result.text and "likely cause" in result.text


@pytest.mark.parametrize("part", [False, True])
def test_shards_and_ranks_that_read_the_same(part: bool) -> None:
    result = run_kept(sharded, 2, part)[0]
    assert result.equal and result.differences["loss"] is None and result.differences["weights"] is None
    assert result.differences["gradients"] < 1e-12


def test_the_loss_may_be_left_out() -> None:
    result = run_kept(ddp, 2, "no loss")[0]
    assert result.equal and result.differences["loss"] is None


def test_gradients_may_be_cleared_once_they_were_used() -> None:
    assert run_kept(ddp, 2, "gradients dropped")[0].equal


def test_misuse_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        run_ranks(ddp, 2, "right", torch.bfloat16)
    with pytest.raises(ConfigError, match="only in one of"):
        verify_loop(lambda batch: None, network(), [], objective=objective, plain=nn.Linear(2, 2))


def dropping(dtype: torch.dtype) -> LoopProof:
    """Check a right loop on a model whose dropout is on."""
    torch.manual_seed(3)
    model = nn.Sequential(network(dtype), nn.Dropout(0.3))
    optimizer = sgd(model.parameters())

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss, weight = objective(model, batch)
        (loss / weight).backward()
        optimizer.step()
        return loss / weight

    return verify_loop(step, model, batches_of(0), objective=objective, optimizer=sgd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_that_are_others_in_every_call_are_not_called_rounding(dtype: torch.dtype) -> None:
    found = dropping(dtype)
    assert found.equal is False and found.ill_conditioned is None
    first = found.first_difference
    assert first is not None and first.family == "not reproducible" and "dropout" in first.likely
