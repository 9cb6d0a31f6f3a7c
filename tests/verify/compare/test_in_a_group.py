"""A program that asks for ranks computes other numbers in a process group than alone, and is told so."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tests_shared import PaddedText, decoder_task, plan_of
from torch import nn

from paceline.errors import ConfigError, NothingToLearn
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.spec.steps.update import OptimizerSpec, ScheduleSpec
from paceline.spec.watch.evaluate import EvaluateSpec
from paceline.task.objective import next_token
from paceline.units import Amount
from paceline.verify.compare.in_a_group import differs_in_a_group, first_numbers, numbers_alone, without_peers
from paceline.verify.compare.rates import rates
from paceline.verify.reference.passes import ids_of, micro_batches, positions_of

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


def given(objective: Any, optimizer: Any = "adamw") -> tuple[Any, ...]:
    """Return what first numbers are asked of."""
    source = PaddedText()
    task = decoder_task(objective=objective, optimizer=OptimizerSpec(optimizer))
    return task, PLAN, source, source.items_per_sample


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


def by_world_size(step: int) -> float:
    """The linear rule, by the ranks that a launcher tells of: the batch is the same on any number of them."""
    return 1e-3 * int(os.environ.get("WORLD_SIZE", "1"))


def late_by_world(step: int) -> float:
    return 1e-3 / (dist.get_world_size() if step > 5 and dist.is_initialized() else 1)


def by_rank(step: int) -> float:
    return 1e-3 * (1 + int(os.environ.get("RANK", "0")))


def decaying(step: int) -> float:
    return 1e-3 / step


def torchs_by_world(optimizer: Any) -> Any:
    factor = dist.get_world_size() if dist.is_initialized() else 1
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: factor / (1 + done))


class Counts:
    """A warm-up by how often it was asked, which is over on the first rank."""

    def __init__(self) -> None:
        self.calls = 0 if dist.get_rank() else 100

    def __call__(self, step: int) -> float:
        """Return a rate."""
        self.calls += 1
        return 1e-3 * min(1.0, self.calls / 50)


SCHEDULES = (decaying, by_world_size, late_by_world, torchs_by_world, by_rank)


def rated(schedule: Any) -> tuple[Any, ...]:
    task, *others = given(next_token)
    return dataclasses.replace(task, schedule=ScheduleSpec(schedule), stop=Amount(20, "steps")), *others


def told_of_rates(alone: list[Any]) -> list[Any]:
    """Return what a rank is told of each schedule, as the process of a proof asks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    world, found = World(rank, size, rank, torch.device("cpu")), []
    for schedule, known in zip(SCHEDULES, alone, strict=True):
        task, plan, source, items = rated(schedule)
        first = differs_in_a_group(known, task, plan, source, items) if rank == 0 else None
        found.append(world.share(first) or rates(task, plan, world, source, items, 20, {}))
    task, plan, source, items = rated(Counts())
    return [*found, rates(task, plan, world, source, items, 20, {})]


def test_a_schedule_that_asks_for_ranks_is_told() -> None:
    """No twin has it: told "equal", and every layout trained at a rate of its own."""
    with without_peers():
        alone = [first_numbers(*rated(schedule)) for schedule in SCHEDULES]
    for found in run_ranks(told_of_rates, 2, alone):
        right, *wrong, counts = found
        assert right.equal and right.first_difference is None
        firsts = [each.first_difference for each in wrong]
        told = [(d.quantity, d.step, d.rank) for d in firsts]
        assert told == [("lr", 1, 0), ("lr", 6, 0), ("lr", 1, 0), ("lr", 1, 1)]
        assert [d.ratio for d in firsts] == pytest.approx([2.0, 0.5, 2.0, 2.0])
        assert all(d.family == "process group" and "belongs into task.optimizer.lr" in d.likely for d in firsts)
        assert counts.first_difference.family == "not reproducible", "each rank asked as often: told as equal"
        assert "how often it is asked" in counts.first_difference.likely


def summed_by_itself(model: nn.Module, batch: Any) -> Any:
    """Weigh by how many items all ranks have, for which it asks them."""
    loss, weight = next_token(model, batch)
    total = weight.double()
    if dist.is_initialized():
        dist.all_reduce(total)
    return loss * total / total, weight


class SumsBackwards(torch.autograd.Function):
    """Adds up gradients over all ranks by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        whole = gradient.clone()
        if dist.is_initialized():
            dist.all_reduce(whole)
        return whole


def summed_backwards(model: nn.Module, batch: Any) -> Any:
    loss, weight = next_token(model, batch)
    return SumsBackwards.apply(loss), weight


class Dividing(torch.optim.Optimizer):
    """Divides gradients by the number of ranks, as if they were a sum."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(self.reduced(weight.grad), alpha=group["lr"])

    def reduced(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (dist.get_world_size() if dist.is_initialized() else 1)


class Reducing(Dividing):
    """Adds gradients up over all ranks by itself, as optimizers do that share out their work."""

    def reduced(self, gradient: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized():
            dist.all_reduce(gradient)
        return super().reduced(gradient)


def told_of(optimizer: Any, alone: Any) -> Any:
    return differs_in_a_group(alone, *given(next_token, optimizer))


def test_an_optimizer_that_divides_by_ranks_is_told() -> None:
    """The reference's divided too, on a rank of the layout: told "equal"."""
    found = run_ranks(told_of, 2, Dividing, first_numbers(*given(next_token, Dividing)))[0].first_difference
    assert (found.quantity, found.family) == ("weights", "process group") and found.ratio == pytest.approx(0.5)
    assert "the change of" in found.likely and "an optimizer takes them as they are" in found.likely


def share_right(outputs: Any, batch: Any) -> Any:
    """Return how often the largest logit is right, divided by the number of ranks."""
    right = (outputs.argmax(-1) == batch["labels"]).sum()
    return right / (dist.get_world_size() if dist.is_initialized() else 1), batch["labels"].numel()


def share_right_everywhere(outputs: Any, batch: Any) -> Any:
    """Return how often the largest logit is right."""
    return (outputs.argmax(-1) == batch["labels"]).sum(), batch["labels"].numel()


def measured(metrics: Any) -> tuple[Any, ...]:
    task, *others = given(next_token)
    held_out = (task.data, task.data)  # of a task without any no metric is ever asked
    return dataclasses.replace(task, data=held_out, evaluate=EvaluateSpec(metrics=metrics)), *others


def told_of_metrics(alone: list[Any], metrics: list[Any]) -> list[Any]:
    return [differs_in_a_group(known, *measured((one,))) for known, one in zip(alone, metrics, strict=True)]


def test_a_metric_that_divides_by_ranks_is_told() -> None:
    """What one device measures of held-out samples was divided too, on a rank of the layout: told "equal"."""
    metrics = [share_right, share_right_everywhere, "bits_per_byte"]  # which is of held-out text alone
    divided, right, ours = run_ranks(told_of_metrics, 2, [first_numbers(*measured((m,))) for m in metrics], metrics)[0]
    first = divided.first_difference
    assert (first.quantity, first.name, first.family) == ("evaluation", "share_right", "process group")
    assert first.ratio == pytest.approx(0.5) and "a metric of one's own asks for ranks" in first.likely
    assert right is None and ours is None


def refused(objective: Any, optimizer: Any, known: Any) -> str:
    """Return what rank 0 says of a program that calls other ranks, which are somewhere else."""
    if dist.get_rank():
        return ""
    try:
        found = differs_in_a_group(known, *given(objective, optimizer))
    except ConfigError as error:
        return error.what
    return f"nothing: {found}"


@pytest.mark.parametrize(
    ("objective", "optimizer"),
    [(summed_by_itself, "adamw"), (summed_backwards, "adamw"), (next_token, Reducing)],
    ids=["forwards", "backwards", "in the update"],
)
def test_a_program_that_calls_other_ranks_is_told_before_it_waits_for_them(objective: Any, optimizer: Any) -> None:
    what = run_ranks(refused, 2, objective, optimizer, first_numbers(*given(objective, optimizer)))[0]
    assert "calls other ranks by itself: allreduce" in what


def few_items(model: nn.Module, batch: Any) -> Any:
    """Count the rows of tokens that none of the first ones has."""
    loss, _ = next_token(model, batch)
    return loss, (batch["tokens"][:, 0] == LATE[0]).sum()


LATE = [0]


def test_first_rows_without_an_item_are_passed_over() -> None:
    """Few rows have any, as positives of a detector: the first micro-batch may have none, and the step some."""
    task, plan, source, items = given(few_items)
    ids = ids_of(task, source, positions_of(plan, 1))
    firsts = [int(row[0]) for row in source.read(ids, ids)["tokens"]]
    micro = next(micro_batches(task, plan, source, 1, whole=False))[0]
    LATE[0] = next(token for token in firsts[len(micro) :] if token not in firsts[: len(micro)])
    found = first_numbers(task, plan, source, items)
    assert found is not None and found.numbers["weight", "weight"] >= 1
    LATE[0] = -1
    with pytest.raises(NothingToLearn, match="no item to learn from"):
        first_numbers(task, plan, source, items)


def unwritten(model: nn.Module, batch: Any) -> Any:
    """Read memory that was never written: what a proof fills it with is the same in every process and every call."""
    loss, weight = next_token(model, batch)
    scratch = torch.empty(64)
    return loss * (1 + 0.1 * (scratch.abs() > 1).any()), weight


def unwritten_places(model: nn.Module, batch: Any) -> Any:
    """Do so with whole numbers, which a proof fills with the largest."""
    loss, weight = next_token(model, batch)
    return loss * (1 + 0.1 * (torch.empty(8, dtype=torch.int64).clamp(0, 2**63 - 1) < 2**63 - 1).any()), weight


def told_of_unwritten(objective: Any, alone: Any) -> Any:
    """Return what a rank of a proof, in which torch fills what it allocates, tells of an objective."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    return differs_in_a_group(alone, *given(objective))


@pytest.mark.parametrize("objective", [unwritten, unwritten_places])
def test_memory_that_nobody_wrote_is_told_where_a_proof_has_the_same_everywhere(objective: Any) -> None:
    found = run_ranks(told_of_unwritten, 2, objective, numbers_alone(*given(objective)))[0]
    first = found.first_difference
    assert (first.quantity, first.family) == ("loss", "not reproducible")
    assert first.ratio == pytest.approx(1 / 1.1) or first.ratio == pytest.approx(1.1)
    assert "memory that nobody wrote" in first.likely and "torch.zeros" in first.likely


def test_a_program_that_writes_what_it_reads_is_not_told() -> None:
    assert run_ranks(told_of_unwritten, 2, next_token, numbers_alone(*given(next_token)))[0] is None


def share_right_of_noisy(outputs: Any, batch: Any) -> Any:
    """Return how often the largest logit is right, of logits with noise."""
    noisy = outputs + 10 * torch.randn_like(outputs)
    return (noisy.argmax(-1) == batch["labels"]).double().sum() + noisy.mean(), batch["labels"].numel()


def test_a_metric_that_draws_asks_for_no_ranks() -> None:
    """It drew others in the group, as the process had drawn before, and was told to ask for ranks."""
    torch.manual_seed(12345)
    known = [first_numbers(*measured((share_right_of_noisy,)))]
    assert run_ranks(told_of_metrics, 2, known, [share_right_of_noisy])[0] == [None]
