"""`paceline.verify_loop` on loops as people write them: right ones are equal, well-known mistakes get their name."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_kept, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.spec.proof.records import LoopProof

MICRO_BATCHES = 3


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11)).double()


def batches_of(rank: int, steps: int = 2) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return batches of three micro-batches, each with another number of labels that count."""
    generator = torch.Generator().manual_seed(10 + rank)
    batches = []
    for _ in range(steps):
        micro_batches = []
        for number in range(MICRO_BATCHES):
            rows = torch.randint(0, 11, (2, 7), generator=generator)
            labels = rows.roll(-1, 1)
            labels[:, : 1 + 2 * rank + number] = -100
            micro_batches.append((rows, labels))
        batches.append(micro_batches)
    return batches


def objective(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return loss, (labels != -100).sum()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def summed(value: torch.Tensor) -> torch.Tensor:
    value = value.double().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def loop(wrapper: str, mistake: str = "", optimizer_too: bool = True) -> LoopProof:
    """Hold a loop over micro-batches, with one mistake or none, against one device."""
    plain, model = network(), network()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    backward: Any = torch.Tensor.backward
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    elif wrapper == "fsdp2":
        fully_shard(model)
    optimizer = sgd(model.parameters())
    if wrapper == "accelerate":
        from accelerate import Accelerator

        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # asked for, and not used: the group is there
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward

    def step(micro_batches: Any) -> torch.Tensor:
        if mistake != "zero_grad forgotten":
            optimizer.zero_grad()
        items = [(labels != -100).sum() for _, labels in micro_batches]
        own, total = sum(items), summed(sum(items))
        reported = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(micro_batches):
            if mistake == "cleared between micro-batches":
                optimizer.zero_grad()
            divisor = {
                "mean of ranks' means": own,
                "mean of micro-batches' means": items[number] * MICRO_BATCHES,
                "shared, but a mean of means": summed(items[number]) * MICRO_BATCHES / world,
                "divided twice": total * MICRO_BATCHES / world,
                "a sum over ranks": total / world**2,
            }.get(mistake, total / world)
            alone = mistake == "not reduced" or (mistake == "" and wrapper == "ddp" and number < MICRO_BATCHES - 1)
            with model.no_sync() if alone else contextlib.nullcontext():
                loss, _ = objective(model, batch)
                backward(loss / divisor)
            reported += loss.detach() / (own if mistake == "loss of means" else total)
        optimizer.step()
        return summed(reported) / (world if mistake == "loss of means" else 1)

    result: LoopProof = paceline.verify_loop(
        step, model, batches_of(rank), objective=objective, plain=plain, split=list,
        optimizer=sgd if optimizer_too else None,
    )  # fmt: skip
    return result


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_right_loops_are_equal(wrapper: str) -> None:
    results = run_kept(loop, 2, wrapper)
    assert all(result.equal and result.mistake is None for result in results), results[0]
    assert results[0].differences["gradients"] < 1e-12


def test_a_plain_loop_on_one_device_is_equal() -> None:
    result = loop("plain")
    assert result.equal and result.mistake is None


def test_reducing_every_micro_batch_is_slow_and_right() -> None:
    assert run_kept(loop, 2, "ddp", "no no_sync")[0].equal


def test_accelerate_is_equal_and_its_mistakes_are_named() -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(loop, 2, "accelerate")[0].equal
    assert "micro-batches' means" in run_ranks(loop, 2, "accelerate", "mean of micro-batches' means")[0].mistake


MISTAKES = {
    "zero_grad forgotten": "zero_grad was forgotten",
    "mean of ranks' means": "mean of the ranks' means",
    "mean of micro-batches' means": "each micro-batch divides by its own number of items",
    "shared, but a mean of means": "all ranks share the number of items of a micro-batch",
    "cleared between micro-batches": "only the last micro-batch counts",
    "divided twice": "divided by 3, the number of micro-batches of a rank, once too often",
    "a sum over ranks": "2 times too large, the number of ranks",
    "loss of means": "the reported loss is a mean of the ranks' means",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_their_name(mistake: str) -> None:
    """The loss that is reported is right in all but the last: losses are looked at, and gradients are wrong."""
    wrapper = "fsdp2" if mistake in ("zero_grad forgotten", "mean of ranks' means") else "ddp"
    results = run_kept(loop, 2, wrapper, mistake)
    assert all(not result.equal and result.mistake == results[0].mistake for result in results)
    assert results[0].mistake is not None and MISTAKES[mistake] in results[0].mistake
    assert MISTAKES[mistake] in results[0].text


def test_gradients_that_are_not_reduced() -> None:
    result = run_kept(loop, 2, "ddp", "not reduced", False)[0]
    assert not result.equal and "not reduced over the ranks" in result.mistake


def test_what_nothing_known_explains_has_no_name() -> None:
    def step(batch: Any) -> None:
        model.zero_grad()
        objective(model, batch[0])[0].backward()
        for parameter in model.parameters():
            parameter.grad.sign_()

    model = network()
    result = paceline.verify_loop(step, model, batches_of(0), objective=objective, split=list)
    assert not result.equal and result.mistake is None and result.first_difference.quantity == "gradients"
