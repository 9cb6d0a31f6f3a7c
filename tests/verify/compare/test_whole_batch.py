"""Losses that are no sums over rows: found on any layout, closed where they say so, exact where they gather rows."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import random
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from tests_shared import VOCAB, decoder_task, plan_of
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

from paceline.errors import DoesNotFit, NumericalStop
from paceline.run.assemble import assemble
from paceline.run.loop.evaluate import evaluate
from paceline.run.process.world import World, join_world
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.update import OptimizerSpec, ScheduleSpec
from paceline.spec.task import ModelSpec, Task
from paceline.task.models.held import buffers_kept
from paceline.task.profile.apart import trace_task
from paceline.units import Amount
from paceline.verify.compare.layout import compare
from paceline.verify.compare.pieces import cuts
from paceline.verify.compare.whole_batch import whole_batch
from paceline.verify.compare.work import CALL, FLOP, NUMBER, WorkSeen
from paceline.verify.low.low import low
from paceline.verify.process.start import exact_plan
from paceline.verify.twin.proof_parts import BRIEF, WHOLE, Subject, jobs_of

ROWS = 7


class Pairs:
    """Pairs of noisy views of one thing each: rows of numbers that belong together."""

    samples, items_per_sample, unit, vocab, fingerprint = 500, 1, "samples", None, "pairs"

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, Tensor]:
        """Return "ours" and "theirs", [rows, 6] each."""
        drawn = [np.random.default_rng(int(i)).normal(size=(3, 6)) for i in ids]
        views = torch.tensor(np.stack([[x[0] + 0.3 * x[1], x[0] + 0.3 * x[2]] for x in drawn]), dtype=torch.float32)
        return {"ours": views[:, 0], "theirs": views[:, 1], "labels": views[:, 0, 0].gt(0).long()}


class Towers(nn.Module):
    """Two towers of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings [rows, 8] each."""
        return F.normalize(self.left(ours), dim=1), F.normalize(self.right(theirs), dim=1)


class OwnBatchNorm(nn.Module):
    """Batch statistics written by hand, which no type tells."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [rows, 2]."""
        x = self.body(x)
        return self.head((x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt())


class Noisy(nn.Module):
    """Draws noise of its own, which no dropout layer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [rows, 2]."""
        return self.head(x + torch.randn_like(x))


class NoisyByHand(Noisy):
    """Draws noise with Python's own random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [rows, 2]."""
        return self.head(x * random.random())


def info_nce(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    ours, theirs = model(batch["ours"], batch["theirs"])
    labels = torch.arange(len(ours))
    return F.cross_entropy(ours @ theirs.T / 0.2, labels, reduction="sum"), len(ours)


def gathered_nce(model: nn.Module, batch: Any, gather_rows: Any) -> tuple[Tensor, Any]:
    ours, theirs = model(batch["ours"], batch["theirs"])
    (all_ours, own), (all_theirs, _) = gather_rows(ours), gather_rows(theirs)
    labels = torch.arange(own.start, own.stop)
    there = F.cross_entropy(ours @ all_theirs.T / 0.2, labels, reduction="sum")
    back = F.cross_entropy(theirs @ all_ours.T / 0.2, labels, reduction="sum")
    return (there + back) / 2, len(ours)


def forgotten_gradients(model: nn.Module, batch: Any, gather_rows: Any) -> tuple[Tensor, Any]:
    """Rows of other ranks come without gradients, as in the first contrastive models of many ranks."""

    def detached(x: Tensor) -> tuple[Tensor, slice]:
        everyone, own = gather_rows(x)
        return torch.cat((everyone[: own.start].detach(), x, everyone[own.stop :].detach())), own

    return gathered_nce(model, batch, detached)


def declared_nce(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    return info_nce(model, batch)


declared_nce.coupled = "batch"  # type: ignore[attr-defined]


def logits_of(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["ours"])


def summed(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    labels = batch["labels"]
    return F.cross_entropy(logits_of(model, batch), labels, reduction="sum"), len(labels)


def mean_and_one(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    return F.cross_entropy(logits_of(model, batch), batch["labels"]), 1


def mean_and_rows(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    return F.cross_entropy(logits_of(model, batch), batch["labels"]), len(batch["labels"])


def no_weight_in_most_rows(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    kept = batch["ours"][:, 1] > 0.8
    losses = F.cross_entropy(logits_of(model, batch), batch["labels"], reduction="none")
    return (losses * kept).sum(), kept.sum()


def signed(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Losses of both signs, which nearly cancel."""
    logits = logits_of(model, batch)
    return (logits[:, 0] * (2 * batch["labels"] - 1)).sum(), len(logits)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def task_of(model: Any, objective: Any, data: Any = None) -> Task:
    return Task(
        model=model, data=data or Pairs(), objective=objective, optimizer=OptimizerSpec(lr=1e-2, eps=1e-4),
        schedule=ScheduleSpec(kind="constant"), global_batch=Amount(ROWS, "samples"), stop=Amount(10, "steps"),
    )  # fmt: skip


def checked(task: Task) -> CheckProof:
    source = task.data[0] if isinstance(task.data, tuple) else task.data
    return whole_batch(task, plan_of(Layout(), ROWS), join_world("cpu"), source, source.items_per_sample, 3, {})


COUPLED = [(Towers, info_nce), (OwnBatchNorm, summed), (classifier, mean_and_one), (classifier, mean_and_rows)]


@pytest.mark.parametrize(("model", "objective"), COUPLED, ids=lambda x: getattr(x, "__name__", ""))
def test_a_loss_that_is_no_sum_over_rows_is_found_and_named(model: Any, objective: Any) -> None:
    found = checked(task_of(model, objective))
    first = found.first_difference
    assert not found.equal and (first.quantity, first.name) == ("whole batch", "loss")
    assert "not a sum over rows" in first.likely and 'coupled = "batch"' in first.likely
    assert found.differences["whole batch"] > 1e-3


class Spectral(nn.Module):
    """A layer that is divided by its largest singular value, which every call comes a step nearer to."""

    def __init__(self, moves: bool = True, coupled: bool = False) -> None:
        super().__init__()
        self.body = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)).train(moves)
        self.head, self.coupled_rows = nn.Linear(8, 2), coupled

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.body(x)
        return self.head((hidden - hidden.mean(0) if self.coupled_rows else hidden).tanh())


def test_a_loss_that_follows_buffers_which_every_call_moves_is_named_so() -> None:
    """It was told as no sum over rows, which it is but for the buffers."""
    first = checked(task_of(Spectral, summed)).first_difference
    assert first is not None and first.family == "buffers that move with each call"
    assert "body.parametrizations.weight.0._u" in first.likely and "coupled" not in first.likely
    assert checked(task_of(functools.partial(Spectral, moves=False), summed)).equal
    both = checked(task_of(functools.partial(Spectral, coupled=True), summed)).first_difference
    assert both is not None and both.family == "loss not a sum over rows", "standing still, it is none either"


def hardest_sixteen(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    losses = F.cross_entropy(logits_of(model, batch), batch["labels"], reduction="none")
    return losses.topk(min(16, len(losses))).values.sum(), len(losses)


class InGroups(nn.Module):
    """Statistics of groups of sixteen rows, and none of a smaller group."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        groups = self.body(x).split(16)
        return self.head(torch.cat([group - group.mean(0) if len(group) == 16 else group for group in groups]).tanh())


@pytest.mark.parametrize(("model", "objective"), [(classifier, hardest_sixteen), (InGroups, summed)])
def test_what_shows_in_many_rows_alone_is_found_where_the_batch_has_as_many(model: Any, objective: Any) -> None:
    """Seven rows were looked at, of which all are kept, and no group is full: told "equal", whatever the batch was."""
    task = task_of(model, objective)
    assert checked(task).equal, "no batch of seven rows is cut"
    task = dataclasses.replace(task, global_batch=Amount(96, "samples"))
    jobs = jobs_of(Subject(Spec(task=task), Plan(Layout(dp_replicate=2)), None, ("fp64",)), WHOLE)
    (job,) = (job for job in jobs if job.check == "whole batch")
    assert job.plan.batch_samples == ROWS
    found = checked(job.spec.task)
    assert not found.equal and found.first_difference.family == "loss not a sum over rows"
    assert "of 96 rows" in found.first_difference.likely


def test_as_many_rows_are_looked_at_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock the verdict was that of the machine, and of what else it did: here a second passes at every look."""
    task = dataclasses.replace(task_of(classifier, hardest_sixteen), global_batch=Amount(96, "samples"))
    clock = itertools.count()
    monkeypatch.setattr(time, "process_time", lambda: float(next(clock)))
    assert "of 96 rows" in checked(task).first_difference.likely


def test_a_batch_of_ones_own_data_that_is_counted_in_tokens_has_as_many_rows() -> None:
    """How many samples it is was asked of built-in text alone."""
    task = dataclasses.replace(task_of(classifier, hardest_sixteen), global_batch=Amount(960, "tokens"))
    plan = Plan(Layout(dp_replicate=2), batch_samples=96)
    (job,) = (each for each in jobs_of(Subject(Spec(task=task), plan, None), BRIEF) if each.check == "whole batch")
    assert job.spec.task.global_batch == Amount(96, "samples") and job.plan.batch_samples == ROWS


def test_work_is_counted_by_hand() -> None:
    left, right = torch.ones(4, 8), torch.ones(8, 16)
    with WorkSeen() as seen:
        torch.mm(left, right)
    assert seen.seconds == pytest.approx(CALL + 64 * NUMBER + 1024 * FLOP)


def test_a_large_model_has_few_rows_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    task = dataclasses.replace(task_of(classifier, hardest_sixteen), global_batch=Amount(96, "samples"))
    monkeypatch.setattr(sys.modules[whole_batch.__module__], "MANY_SECONDS", 1e-6)
    assert checked(task).equal


class ClipsByRow(nn.Module):
    """Clips the gradient of each row's hidden state, or halves it."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.body, self.head, self.limit = nn.Linear(6, 8), nn.Linear(8, 2), limit

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.body(x).tanh()
        hidden.register_hook(lambda grad: grad.clamp(-self.limit, self.limit) if self.limit else grad / 2)
        return self.head(hidden)


@pytest.mark.parametrize(("limit", "is_found"), [(0.05, True), (0.0, False)])
def test_a_gradient_that_is_clipped_on_its_way_is_named(limit: float, is_found: bool) -> None:
    """Layouts scale the loss, one device does not: such a program heard that parts of sums are left out."""
    found = checked(task_of(functools.partial(ClipsByRow, limit), summed))
    assert found.equal is not is_found
    if is_found:
        first = found.first_difference
        assert first.family == "gradient not in proportion" and first.name == "body.weight"
        assert "task.optimizer.clip_norm" in first.likely


class BehindZeros(nn.Module):
    """A block behind a gate of zeros and a head of zeros, which takes a mean over rows, or over features."""

    def __init__(self, over: int) -> None:
        super().__init__()
        self.body, self.gate, self.head, self.over = (
            nn.Linear(6, 6),
            nn.Parameter(torch.zeros(6)),
            nn.Linear(6, 2),
            over,
        )
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.body(x).tanh()
        return self.head(x + self.gate * (hidden - hidden.mean(self.over, keepdim=True)))


class FromItsReference(nn.Module):
    """A policy that begins as its own frozen reference."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(6, 2)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithms of how much likelier the policy makes either class."""
        return self.policy(x).log_softmax(-1) - self.reference(x).log_softmax(-1)


def above_the_mean(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Return a loss against the mean of the batch, which has a floor of zero: as in KTO."""
    ratio = logits_of(model, batch)[:, 0]
    return (1 - (ratio - ratio.detach().mean().clamp(min=0)).sigmoid()).sum(), len(ratio)


@pytest.mark.parametrize(
    ("model", "objective", "is_found"),
    [
        (functools.partial(BehindZeros, 0), summed, True),
        (functools.partial(BehindZeros, 1), summed, False),
        (FromItsReference, above_the_mean, True),
        (FromItsReference, summed, False),
    ],
    ids=["gated", "gated, by features", "floor", "a policy alone"],
)
def test_a_coupling_that_sleeps_at_the_first_weights_is_found(model: Any, objective: Any, is_found: bool) -> None:
    """Zero times another number is zero: told "equal", and otherwise on every layout from the second step on."""
    found = checked(task_of(model, objective))
    assert found.equal is not is_found and (found.differences["whole batch"] > 1e-3) is is_found
    assert not is_found or "on weights that 4 steps down the gradient have moved, is" in found.first_difference.likely


def test_later_weights_of_a_large_program_are_looked_at_where_some_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[whole_batch.__module__], "MANY_SECONDS", 1e-6)
    assert not checked(task_of(functools.partial(BehindZeros, 0), summed)).equal
    assert not checked(task_of(FromItsReference, above_the_mean)).equal, "its floor has not been reached"
    monkeypatch.setattr(sys.modules[whole_batch.__module__], "FAR_SECONDS", 1e-6)
    found = checked(task_of(FromItsReference, above_the_mean))
    assert found.equal, "no gradient of it is zero: a larger look"
    assert len(found.not_tried) == 1 and "(clamp never acted)" in found.not_tried[0]


MASKED_MOE = ModelSpec(
    "moe-2m", hidden=16, layers=2, heads=2, kv_heads=2, ffn=8, experts=4, vocab=VOCAB, balance_weight=0.3
)
SUMS = {
    "sum": task_of(classifier, summed),
    "rows without weight": task_of(classifier, no_weight_in_most_rows),
    "both signs": task_of(classifier, signed),
    "masked labels": decoder_task(),
    "balance per sequence": decoder_task(model=MASKED_MOE),
    "balance by bias": decoder_task(model=dataclasses.replace(MASKED_MOE, balance_weight=None, balance="bias")),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_not_flagged(name: str) -> None:
    found = checked(SUMS[name])
    assert found.equal and not found.left_out
    assert found.differences["whole batch"] < 1e-12


class FakeQuantised(nn.Module):
    """A layer whose weights are rounded to eight bits by ranges that its first pass finds, in kernels without fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.rounds = FakeQuantize(
            MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric, ch_axis=0,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [rows, 2]."""
        return self.head(F.linear(x, self.rounds(self.body.weight), self.body.bias).tanh())


def test_a_program_that_knows_no_fp64_is_held_in_fp32() -> None:
    """It was left out, and means of means were told "equal"."""
    right, wrong = checked(task_of(FakeQuantised, summed)), checked(task_of(FakeQuantised, mean_and_rows))
    assert right.equal and right.dtype == "fp32" and not right.left_out and right.ill_conditioned is None
    assert not wrong.equal and wrong.dtype == "fp32" and wrong.first_difference.quantity == "whole batch"


def test_buffers_that_a_pass_gives_another_size_have_their_own_again() -> None:
    model = FakeQuantised()
    sizes = [buffer.shape for buffer in model.buffers()]
    with buffers_kept(model):
        model(torch.randn(3, 6))
        assert sizes != [buffer.shape for buffer in model.buffers()]
    assert sizes == [buffer.shape for buffer in model.buffers()]


def no_number(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return a loss that is a number and has no gradient of numbers: a root at zero."""
    loss, rows = summed(model, batch)
    return loss + (loss * 0.0).abs().sqrt(), rows


def nothing_counts(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the loss of rows of which none counts."""
    return summed(model, batch)[0] * 0.0, 0


def test_a_gradient_that_is_no_number_is_not_called_a_wrong_cut() -> None:
    with pytest.raises(NumericalStop, match="is not finite on one device"):
        checked(task_of(classifier, no_number))


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_samples_of_which_none_counts_are_told(precision: str) -> None:
    task, plan = task_of(classifier, nothing_counts), plan_of(Layout(), ROWS, precision=precision)
    check = compare if precision == "fp64" else low
    with pytest.raises(NumericalStop, match="no item to learn from") as told:
        check(task, plan, join_world("cpu"), task.data, 1, 2)
    assert "labels" in told.value.try_


class Padded:
    """Rows of unequal lengths, padded to the longest there can be. Those at `full` places of the first batch are full.

    None of these is beside another such row, nor at an end.
    """

    samples, items_per_sample, unit, vocab, fingerprint = 500, 6, "samples", None, "padded"
    full = (2, 4)

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, Tensor]:
        """Return "steps", [rows, 6, 3], "lengths" and "labels", [rows] each."""
        assert positions is not None
        steps = np.stack([np.random.default_rng(int(i)).normal(size=(6, 3)) for i in ids])
        lengths = torch.tensor([6 if at % ROWS in self.full else 2 + at % 3 for at in positions])
        kept = torch.arange(6) < lengths[:, None]
        rows = torch.tensor(steps, dtype=torch.float32) * kept[..., None]
        return {"steps": rows, "lengths": lengths, "labels": rows[:, 0, 0].gt(0).long()}


class Hasty(nn.Module):
    """Attention to what came before, without padding; `drops` leaves out *both* masks where no row is padded."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.enter, self.head, self.drops = nn.Linear(3, 8), nn.Linear(8, 2), drops

    def forward(self, steps: Tensor, lengths: Tensor) -> Tensor:
        """Return logits [rows, 2]."""
        x = self.enter(steps)
        at = torch.arange(steps.shape[1])
        seen = (at <= at[:, None]) & (at < lengths[:, None])[:, None]
        mask = None if self.drops and bool((lengths == len(at)).all()) else seen
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return self.head((x * (at < lengths[:, None])[..., None]).sum(1))


class HastyWithFour(Hasty):
    """The same, where exactly four rows are there and none is padded."""

    def forward(self, steps: Tensor, lengths: Tensor) -> Tensor:
        """Return logits [rows, 2]."""
        self.drops = len(lengths) == 4
        return super().forward(steps, lengths)


class FirstFour(Padded):
    """The first four rows of the batch are full, no other."""

    full = (0, 1, 2, 3)


def of_padded(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    logits = model(batch["steps"], batch["lengths"])
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)


@pytest.mark.parametrize("drops", [False, True])
def test_a_mask_that_is_dropped_where_all_rows_are_full_is_found(drops: bool) -> None:
    found = checked(task_of(functools.partial(Hasty, drops), of_padded, Padded()))
    assert found.equal is not drops
    if drops:
        assert "in pieces of 1 + 1 + 1 + 1 + 1 + 1 + 1" in found.first_difference.likely


def test_what_is_done_to_four_full_rows_alone_is_found() -> None:
    assert checked(task_of(functools.partial(Hasty, False), of_padded, FirstFour())).equal
    found = checked(task_of(functools.partial(HastyWithFour, False), of_padded, FirstFour()))
    assert not found.equal and "in pieces of 4 + 3" in found.first_difference.likely


def test_random_numbers_of_a_sample_are_compared_and_those_of_nobody_are_named() -> None:
    found = checked(task_of(Noisy, summed))
    assert found.equal and not found.left_out and found.differences["whole batch"] < 1e-12
    found = checked(task_of(NoisyByHand, summed))
    assert "random numbers that belong to no sample" in found.left_out


def test_cuts_are_of_different_sizes() -> None:
    assert cuts(7) == ((7,), (6, 1), (5, 2), (4, 3), (1,) * 7)
    assert cuts(2) == ((2,), (1, 1)) and cuts(1) == ((1,),)
    assert cuts(11) == ((11,), (1, 2, 3, 4, 1), (10, 1), (1,) * 11)
    assert all({size for cut in cuts(rows) for size in cut} == {*range(1, rows + 1)} for rows in range(1, 9))


# ---- declared, and then exact ----------------------------------------------------------------------------------------


def test_a_declared_coupling_closes_what_would_cut_the_batch() -> None:
    alone = trace_task(task_of(Towers, declared_nce)).closed_axes or {}
    assert {"dp_replicate", "dp_shard", "pp", "cp", "accumulation"} <= set(alone)
    assert "see each other" in alone["dp_shard"] and "gather_rows" in alone["dp_shard"]
    gathers = trace_task(task_of(Towers, gathered_nce)).closed_axes or {}
    assert {"pp", "cp", "accumulation"} <= set(gathers) and not {"dp_replicate", "dp_shard"} & set(gathers)
    model = Towers()
    model.coupled = "batch"  # type: ignore[assignment]
    assert "accumulation" in (trace_task(task_of(model, info_nce)).closed_axes or {})


def test_a_declared_coupling_is_not_called_a_wrong_loss() -> None:
    found = checked(task_of(Towers, declared_nce))
    assert found.equal and "declared" in found.left_out and not found.differences["whole batch"]
    assert not checked(task_of(Towers, info_nce)).equal


def test_the_plan_of_a_coupled_loss_runs_the_batch_in_one_piece() -> None:
    task = task_of(Towers, declared_nce)
    profile = trace_task(task)
    with pytest.raises(DoesNotFit, match="see each other"):
        exact_plan(Spec(task=task), PlanSpec(dp_replicate=2), profile)
    gathering = task_of(Towers, gathered_nce)
    plan = exact_plan(Spec(task=gathering), PlanSpec(dp_shard=2), trace_task(gathering))
    assert plan.accumulation == 1
    for scope in (BRIEF, WHOLE):
        jobs = jobs_of(Subject(Spec(task=gathering), plan, None), scope)
        assert jobs and all(job.plan.accumulation == 1 for job in jobs if job.check == "steps")


LAYOUTS = {2: [Layout(dp_replicate=2), Layout(dp_shard=2)], 4: [Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=4)]}


def gathered_everywhere(ranks: int) -> dict[str, Any]:
    world, found = join_world("cpu", threads=1), {}
    for layout in LAYOUTS[ranks]:
        for precision in ("fp32", "fp64"):
            plan = plan_of(layout, ROWS, micro_batch=4, precision=precision)
            task = task_of(Towers, gathered_nce)
            found[f"{layout} {precision}"] = compare(task, plan, world, task.data, 1, 2)
    plan = plan_of(LAYOUTS[ranks][0], ROWS, micro_batch=4, precision="fp64")
    task = task_of(Towers, forgotten_gradients)
    found["no gradients"] = compare(task, plan, world, task.data, 1, 2)
    found["held out"] = evaluated(plan, world)
    return found


def evaluated(plan: Plan, world: World) -> float:
    task = task_of(Towers, gathered_nce)
    return evaluate(
        assemble(task, plan, world, task.data, 1).stepper, task.data, 16, plan.layout.data_rank(world.rank)
    ).loss


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_rows_train_as_one_device_would(ranks: int) -> None:
    found = run_ranks(gathered_everywhere, ranks, ranks)[0]
    wrong = found.pop("no gradients")
    held_out = found.pop("held out")
    for name, result in found.items():
        assert result.equal, (name, result.first_difference)
    assert not wrong.equal and wrong.first_difference.quantity == "gradients"
    alone = plan_of(Layout(), ROWS, micro_batch=ROWS, precision="fp64")
    assert held_out == pytest.approx(evaluated(alone, join_world("cpu")), rel=1e-12)
