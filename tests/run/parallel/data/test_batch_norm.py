"""nn.SyncBatchNorm under the data axes: the statistics, gradients and buffers of the whole batch on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import run_kept, run_ranks
from tests_shared import decoder_task, plan_of, run_steps, world_here
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.run.loop.evaluate import evaluate
from paceline.run.numerics.precision import cast_unit
from paceline.run.parallel.data import statistics
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import Task
from paceline.task.data.order.permutation import sample_ids
from paceline.task.models.layers.batch_norm import WholeBatchNorm
from paceline.task.profile.apart import trace_task
from paceline.verify.compare.layout import compare
from paceline.verify.story.story import story

STEPS, HELD_OUT = 3, 6
LIMIT = 1e-12  # of fp64 sums in another order, after three updates
CHANNELS, LENGTH, CLASSES = 4, 6, 3


class Signals:
    """Rows of several channels, of a class each, whose scales differ."""

    samples, items_per_sample, unit, vocab, fingerprint = 500, 1, "samples", None, "signals"

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, Tensor]:
        """Return "x" [rows, channels, length] and "labels" [rows]."""
        drawn = [np.random.default_rng(int(i)).normal(size=(CHANNELS, LENGTH)) for i in ids]
        x = torch.tensor(np.stack(drawn), dtype=torch.float32) * torch.arange(1.0, CHANNELS + 1)[:, None] + 0.5
        return {"x": x, "labels": torch.tensor([int(i) % CLASSES for i in ids])}


class Block(nn.Module):
    """A residual layer with a normalisation of rows [rows, channels]."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(8, 8), norm(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, 8]."""
        return x + self.norm(self.body(x)).tanh()


class Net(nn.Module):
    """Normalises [rows, channels, length] and [rows, channels], in blocks and outside."""

    def __init__(self, inner: type[nn.Module] = nn.SyncBatchNorm, outer: type[nn.Module] = nn.SyncBatchNorm) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(CHANNELS, 4, 3), outer(4, eps=1e-3)
        self.join = nn.Linear(4 * (LENGTH - 2), 8)
        self.layers = nn.ModuleList(Block(inner) for _ in range(2))
        self.plain, self.head = outer(8, affine=False, track_running_stats=False), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [rows, classes]."""
        x = self.join(self.norm(self.first(x)).relu().flatten(1))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.plain(x))


def objective(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Return the sum of the rows' losses, and their number."""
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum"), len(batch["labels"])


def task_of(model: Any = Net) -> Task:
    optimizer = OptimizerSpec(name="sgd", lr=0.1, weight_decay=0.0, clip_norm=0.0)
    return decoder_task(model=model, data=Signals(), objective=objective, optimizer=optimizer)


def plan_in(layout: Layout, batch: int = 7, **changes: Any) -> Plan:
    return plan_of(layout, batch=batch, micro_batch=8, **{"precision": "fp64", **changes})


def rows_at(task: Task, positions: range) -> dict[str, Tensor]:
    at = np.arange(positions.start, positions.stop, dtype=np.int64)
    read = task.data.read(sample_ids(task.seed, at, task.data.samples))
    return {**read, "x": read["x"].double()}


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights and buffers, all of each."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in held.items()}


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_one_device_normalises_batches_in_bf16(norm: type[nn.Module]) -> None:
    """torch refused bf16 beside running statistics in fp32, so a network of images did not train on one CPU, where a
    plan of its own choice was in bf16."""
    told = {}
    for each in ("bf16", "fp32"):
        plan = plan_in(Layout(), precision=each)
        stats, built = run_steps(task_of(lambda: Net(norm, norm)), plan, STEPS)
        held_out = evaluate(built.stepper, Signals(), HELD_OUT, 0)
        told[each] = whole(built.model), held_out.loss, [one.loss for one in stats]
    (rounded, *ahead), (exact, *_) = told["bf16"], told["fp32"]
    assert all(rounded[name].dtype == exact[name].dtype for name in exact), "weights and statistics are kept in fp32"
    for name in exact:
        assert torch.allclose(rounded[name].double(), exact[name].double(), rtol=0.05, atol=0.05), name
    assert not torch.equal(rounded["norm.running_mean"], torch.zeros(4)) and ahead[0] == pytest.approx(
        told["fp32"][1], rel=0.05
    )
    assert ahead[1] == pytest.approx(told["fp32"][2], rel=0.05) and ahead[1] != told["fp32"][2]


class OwnForward(nn.BatchNorm1d):
    """Batch normalisation that is written out."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised rows."""
        variance, mean = torch.var_mean(x, 0, unbiased=False)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def test_a_batch_normalisation_that_is_written_out_hands_on_bf16() -> None:
    """Its weights stay in fp32, and so its outputs were: the next layer took none."""
    model = nn.Sequential(nn.Linear(3, 4), OwnForward(4), nn.Linear(4, 2))
    cast_unit(model, torch.bfloat16, set())
    out = model(torch.randn(5, 3))
    out.float().sum().backward()
    assert out.dtype is torch.bfloat16 and model[1].weight.grad.dtype is torch.float32


def test_a_network_with_one_that_is_written_out_trains_in_bf16() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * LENGTH, 4), OwnForward(4), nn.Linear(4, CLASSES))

    stats, _ = run_steps(task_of(network), plan_in(Layout(), precision="bf16"), STEPS)
    exact, _ = run_steps(task_of(network), plan_in(Layout()), STEPS)
    assert [one.loss for one in stats] == pytest.approx([one.loss for one in exact], rel=0.05)


def run_layout(plan: Plan) -> dict[str, Any]:
    """Return what a rank has at the start and after some steps, and what it measures on held-out samples."""
    start = run_steps(task_of(), plan, 0)[1]
    initial = whole(start.model)
    stats, built = run_steps(task_of(), plan, STEPS)
    world = built.stepper.world
    trained = whole(built.model)
    found = evaluate(built.stepper, Signals(), HELD_OUT, plan.layout.data_rank(world.rank))
    assert all(torch.equal(value, whole(built.model)[name]) for name, value in trained.items()), "evaluation changed it"
    return {"initial": initial, "losses": [step.loss for step in stats], "trained": trained, "held_out": found.loss}


def plain_torch(initial: dict[str, Tensor], batch: int) -> dict[str, Any]:
    """Return the same of torch's own BatchNorm on whole batches, from the same weights, without anything of ours."""

    class Norm(nn.BatchNorm1d):
        """Takes [rows, channels] and [rows, channels, length]."""

    model, task = Net(Norm, Norm).double(), task_of()
    model.load_state_dict(initial)
    sgd, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=task.optimizer.beta1), []
    for step in range(STEPS):
        loss, count = objective(model, rows_at(task, range(step * batch, (step + 1) * batch)))
        sgd.zero_grad()
        (loss / count).backward()
        sgd.step()
        losses.append(float(loss.detach()) / count)
    return {"losses": losses, "trained": whole(model)}


LAYOUTS = {
    "one device": plan_in(Layout()),
    "one device, recomputed": plan_in(Layout(), recompute="full"),
    "copies": plan_in(Layout(dp_replicate=2)),
    "shards": plan_in(Layout(dp_shard=2)),
    "shards, recomputed": plan_in(Layout(dp_shard=2), recompute="full"),
    "three, uneven": plan_in(Layout(dp_replicate=3)),
    "three shards, uneven": plan_in(Layout(dp_shard=3), zero=1),
    "three, one without rows": plan_in(Layout(dp_replicate=3), batch=2),
    "three shards, one without rows": plan_in(Layout(dp_shard=3), batch=2),
    "copies of shards": plan_in(Layout(dp_replicate=2, dp_shard=2)),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_equals_plain_batch_norm_of_the_whole_batch(case: str) -> None:
    plan = LAYOUTS[case]
    ranks = run_kept(run_layout, plan.layout.devices, plan)
    expected = plain_torch(ranks[0]["initial"], plan.batch_samples)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=LIMIT, abs=0)
        assert set(rank["trained"]) == set(expected["trained"])
        for name, value in expected["trained"].items():
            torch.testing.assert_close(rank["trained"][name], value, rtol=LIMIT, atol=LIMIT, msg=name)
            assert torch.equal(rank["trained"][name], ranks[0]["trained"][name]), f"ranks differ in {name}"
        assert rank["held_out"] == ranks[0]["held_out"]


def run_evaluation(layout: Layout) -> tuple[float, dict[str, Tensor]]:
    plan = plan_in(layout)
    built = run_steps(task_of(Tracked), plan, STEPS)[1]
    rank = plan.layout.data_rank(built.stepper.world.rank)
    return evaluate(built.stepper, Signals(), HELD_OUT, rank).loss, whole(built.model)


class Tracked(Net):
    """All of its normalisations keep running statistics."""

    def __init__(self, norm: type[nn.Module] = nn.SyncBatchNorm) -> None:
        super().__init__(norm, norm)
        self.plain = norm(8)


def test_evaluations_read_the_running_statistics_row_by_row() -> None:
    loss, held = run_kept(run_evaluation, 2, Layout(dp_shard=2))[0]
    model = Tracked(nn.BatchNorm1d).double().eval()
    model.load_state_dict(held)
    ids = sample_ids(0, np.arange(HELD_OUT, dtype=np.int64), Signals.samples)
    read = Signals().read(ids)
    logits = torch.cat([model(row[None]) for row in read["x"].double()]).detach()
    assert loss == pytest.approx(float(F.cross_entropy(logits, read["labels"])), rel=LIMIT)


def prove(checks: list[tuple[str, Plan]], own_rows: bool = False) -> list[CheckProof]:
    world, task = world_here(), task_of(Tracked)
    task = dataclasses.replace(task, optimizer=OptimizerSpec(lr=1e-2, eps=1e-4))
    with pytest.MonkeyPatch.context() as patch:
        if own_rows:
            patch.setattr(statistics.RankSums, "__call__", lambda self, x: x * 1.0)
        by_name = {"steps": compare, "story": story}
        return [by_name[check](task, plan, world, task.data, 1, 2) for check, plan in checks]


def test_proof_and_story_say_equal() -> None:
    plans = (plan_in(Layout(dp_replicate=2)), plan_in(Layout(dp_shard=2)))
    for proof in run_ranks(prove, 2, [(check, plan) for check in ("steps", "story") for plan in plans])[0]:
        assert proof.equal, proof.first_difference


def test_statistics_of_own_rows_alone_are_told() -> None:
    (proof,) = run_ranks(prove, 2, [("steps", plan_in(Layout(dp_replicate=2)))], True)[0]
    first = proof.first_difference
    assert (first.quantity, first.step, first.family) == ("loss", 1, "batch-norm statistics")


def low_losses(precision: str) -> list[float]:
    return [step.loss for step in run_steps(task_of(), plan_in(Layout(dp_shard=2), precision=precision), STEPS)[0]]


def test_bf16_trains_near_fp32() -> None:
    exact, rounded = run_kept(low_losses, 2, "fp32")[0], run_kept(low_losses, 2, "bf16")[0]
    assert rounded == pytest.approx(exact, rel=2.0**-5)  # a few roundings to 8 bits
    assert rounded != exact


def test_one_value_per_channel_is_refused_as_torch_refuses_it() -> None:
    norm = nn.SyncBatchNorm(3)
    norm.__class__ = WholeBatchNorm
    norm.add_up = lambda x: x
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(torch.ones(1, 3))
    torch.testing.assert_close(norm(torch.tensor([[1.0, 2, 3], [3, 2, 1]])).sum(), torch.zeros(()))


# ---- which axes are open ---------------------------------------------------------------------------------------------


def closed(model: Any) -> dict[str, str]:
    return dict(trace_task(task_of(model)).closed_axes or {})


def test_it_opens_the_data_axes_and_batch_norm_names_it() -> None:
    synced, mixed = closed(Net), closed(Mixed)
    assert "dp_replicate" not in synced and "dp_shard" not in synced
    for axis in ("accumulation", "pp", "cp"):
        assert "the whole batch's" in synced[axis]
    for axis in ("dp_replicate", "dp_shard"):
        assert "nn.SyncBatchNorm.convert_sync_batchnorm(model)" in mixed[axis]


class Mixed(Net):
    """Of two kinds of normalisation one sees its own rows."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d)


class Grouped(Net):
    """Statistics over a group of its user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.process_group = object()


def test_a_group_of_ranks_of_its_users_own_stays_closed() -> None:
    assert "dp_shard" in closed(Grouped)


class Frozen(Net):
    """Normalises by running statistics alone."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.SyncBatchNorm(8)
        for module in self.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.eval()


def test_frozen_statistics_close_nothing() -> None:
    assert not {"dp_replicate", "dp_shard", "accumulation"} & set(closed(Frozen))
