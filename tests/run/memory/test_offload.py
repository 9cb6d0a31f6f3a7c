"""Host memory as a place for activations and optimizer state: they really go there, and numbers stay bit for bit."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from distributed import run_kept
from tests_shared import decoder_task, plan_of, run_steps, world_here
from torch import nn

from paceline.checkpoint import materialise_optimizer_state, training_state
from paceline.plan.feasible.stages import fill_pipeline
from paceline.run.loop.evaluate import evaluate
from paceline.run.memory import offload
from paceline.run.memory.offload import HostCopies, Visit, keep_on_host
from paceline.run.memory.offload_state import OffloadedUpdate
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan

HERE = {"offload": "all"}
BUDGET = {"recompute": "budget", "recompute_blocks": ("none", "selective", "full"), "offload": "optimizer"}
BOTH = {"recompute": "budget", "recompute_blocks": ("none", "full", "none"), "offload": "all"}


# ---- one block -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Views of one storage, a storage saved several times, and a value that changes in place after it is saved."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fused = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.fused(x).chunk(3, dim=-1)
        mixed = torch.sigmoid(q) * k * v.exp()
        scaled = mixed * mixed.detach().abs()
        scaled = scaled + 1
        scaled.mul_(torch.tanh(x))
        return self.out(scaled).tanh()


def gradients(block: nn.Module, x: torch.Tensor, times: int = 1) -> list[torch.Tensor]:
    given = x.clone().requires_grad_()
    loss = block(given).square().sum()
    for index in range(times):
        loss.backward(retain_graph=index < times - 1)
    return [given.grad, *(parameter.grad for parameter in block.parameters())]


def links(monkeypatch: pytest.MonkeyPatch) -> list[HostCopies]:
    """Return a list that every link made from now on is added to."""
    made: list[HostCopies] = []

    class Counted(HostCopies):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(offload, "HostCopies", Counted)
    return made


@pytest.mark.parametrize("times", [1, 2])
def test_a_block_computes_the_same_with_its_activations_elsewhere(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain, x = Block(), torch.randn(64, 32)
    offloaded, made = copy.deepcopy(plain), links(monkeypatch)
    keep_on_host([offloaded])
    expected, found = gradients(plain, x, times), gradients(offloaded, x, times)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    (link,) = made
    assert link.bytes_to_host > 0 and link.bytes_to_device == times * link.bytes_to_host, "each storage once, each way"


def test_each_storage_travels_once_and_no_weight_does(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x, saved, made = Block(), torch.randn(64, 32), {}, links(monkeypatch)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x.requires_grad_())
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    assert weights & saved.keys(), "autograd does save weights"
    keep_on_host([block])
    block(x.clone().requires_grad_())
    assert made[0].bytes_to_host == sum(storage.nbytes() for at, storage in saved.items() if at not in weights)


def test_the_device_lets_go_of_what_is_on_the_host() -> None:
    block, kept = Block(), []
    visit = Visit(block, HostCopies(), None)
    tensor = torch.randn(64, 32)
    view = visit.pack(tensor[:, 8:16])
    assert not isinstance(view, torch.Tensor)
    kept.append(view)
    visit.end()
    assert view.moved.source is None
    original = tensor.clone()
    tensor.zero_()  # whatever becomes of the device's memory
    assert torch.equal(visit.unpack(view), original[:, 8:16])
    assert view.moved._copy is None, "dropped after the last use"


def test_a_value_changed_in_place_is_kept_as_it_was_each_time() -> None:
    visit = Visit(Block(), HostCopies(), None)
    tensor = torch.zeros(64, 32)
    before = visit.pack(tensor)
    tensor.add_(1)
    after = visit.pack(tensor)
    assert visit.unpack(before).eq(0).all() and visit.unpack(after).eq(1).all()


# ---- the optimizer -------------------------------------------------------------------------------------------------


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("bucket_bytes", [1, 10**9])
def test_state_visits_for_the_update_alone(name: str, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain, x = Block(), torch.randn(8, 32)
    plain.unused = nn.Parameter(torch.ones(3))
    offloaded_model = copy.deepcopy(plain)
    plain_optimizer, optimizer = optimizer_of(name, plain), optimizer_of(name, offloaded_model)
    offloaded = OffloadedUpdate(optimizer, bucket_bytes)
    materialise_optimizer_state(plain_optimizer)
    resting = {id(p): {k: v.data_ptr() for k, v in s.items() if k != "step"} for p, s in optimizer.state.items()}
    used: set[int] = set()
    for bucket in offloaded._buckets:
        real = bucket.worker.step

        def step(bucket: Any = bucket, real: Any = real) -> None:
            used.update(v.data_ptr() for s in bucket.worker.state.values() for k, v in s.items() if k != "step")
            real()

        monkeypatch.setattr(bucket.worker, "step", step)
    for lr in (1e-2, 3e-3, 1e-3):
        for model, updater, own in ((plain, plain_optimizer, plain_optimizer), (offloaded_model, offloaded, optimizer)):
            model.zero_grad()
            model(x).square().sum().backward()
            own.param_groups[0]["lr"] = lr
            updater.step()
    ours, theirs = training_state(offloaded_model, optimizer), training_state(plain, plain_optimizer)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    addresses = {address for slots in resting.values() for address in slots.values()}
    assert used and not used & addresses, "the update worked on copies"
    assert not any(bucket.worker.state for bucket in offloaded._buckets), "and kept none"
    now = {id(p): {k: v.data_ptr() for k, v in s.items() if k != "step"} for p, s in optimizer.state.items()}
    assert now == resting


# ---- whole layouts -------------------------------------------------------------------------------------------------


def plan_for(layout: Layout, **changes: Any) -> Plan:
    plan = plan_of(layout, batch=12, **changes)
    return dataclasses.replace(plan, accumulation=fill_pipeline(plan.accumulation, layout.pp, plan.schedule))


def numbers(plans: list[Plan]) -> list[tuple[list[tuple[float, float]], dict[str, torch.Tensor], int]]:
    """Return of each plan the (loss, norm) of three steps, this rank's state after them, and bytes sent to the host."""
    world, found = world_here(), []
    for plan in plans:
        with pytest.MonkeyPatch.context() as monkeypatch:
            made = links(monkeypatch)
            stats, built = run_steps(decoder_task(), plan, 3, world)
            evaluate_moves = sum(link.bytes_to_host for link in made)
            evaluate(built.stepper, decoder_task().data, 4, plan.layout.data_rank(world.rank))
            assert sum(link.bytes_to_host for link in made) == evaluate_moves, "evaluation keeps nothing"
            materialise_optimizer_state(built.optimizer)
            state = training_state(built.model, built.optimizer)
            local = {k: (v.to_local() if hasattr(v, "to_local") else v).detach().clone() for k, v in state.items()}
            found.append(([(s.loss, s.grad_norm) for s in stats], local, evaluate_moves))
    return found


def assert_bit_for_bit(layout: Layout, **changes: Any) -> None:
    plans = [plan_for(layout, **changes, **extra) for extra in ({}, HERE, BUDGET, BOTH)]
    ranks = run_kept(numbers, layout.devices, plans) if layout.devices > 1 else [numbers(plans)]
    for (curve, state, moved), *others in ranks:
        assert moved == 0
        for plan, (their_curve, their_state, their_moved) in zip(plans[1:], others, strict=True):
            assert their_curve == curve, str(plan)
            assert their_state.keys() == state.keys()
            different = [name for name in state if not torch.equal(state[name], their_state[name])]
            assert not different, (str(plan), different[:3])
            assert (their_moved > 0) == plan.offloads_activations


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_device(precision: str) -> None:
    assert_bit_for_bit(Layout(), precision=precision)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(dp_replicate=2), {}),
        (Layout(dp_shard=2), {"zero": 3, "precision": "bf16"}),
        (Layout(dp_shard=2), {"zero": 1}),
        (Layout(tp=2), {}),
        (Layout(pp=2), {}),
        (Layout(cp=2), {}),
    ],
    ids=str,
)
def test_two_ranks(layout: Layout, changes: dict[str, Any]) -> None:
    assert_bit_for_bit(layout, **changes)


@pytest.mark.deep
@pytest.mark.parametrize("layout", [Layout(dp_shard=2, tp=2), Layout(dp_shard=2, pp=2), Layout(tp=2, pp=2)], ids=str)
def test_four_ranks(layout: Layout) -> None:
    assert_bit_for_bit(layout)


def test_attention_alone_can_be_kept() -> None:
    selective = plan_for(Layout(), recompute="selective", recompute_save=("attention",))
    (curve, state, _), (again, kept, _) = numbers([plan_for(Layout()), selective])
    assert curve == again and all(torch.equal(state[name], kept[name]) for name in state)


def test_what_travels_grows_with_the_micro_batches() -> None:
    once, twice = (
        plan_for(Layout(), **HERE),
        dataclasses.replace(plan_for(Layout(), **HERE), batch_samples=24, accumulation=12),
    )
    (_, _, moved), (_, _, moved_twice) = numbers([once, twice])
    assert moved_twice == 2 * moved > 0
