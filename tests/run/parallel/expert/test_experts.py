"""Mixtures of experts in every layout: equal to one device, whatever is composed with the expert axis."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_kept, run_ranks
from rounding import FP64, MEAN_LOSS_BF16, assert_curves_close
from test_layouts import curve, weights_after
from tests_shared import SEQ_LEN, VOCAB, decoder_task, device_here, run_steps, world_here
from tests_shared import coarse_plan as plan_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from paceline.checkpoint import load_checkpoint, materialise_optimizer_state, save_checkpoint, training_state
from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.parallel.data.unshared_experts import ExpertGradients
from paceline.run.parallel.expert.all_to_all import AllToAll
from paceline.run.parallel.expert.experts import balance_shared_sequences
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof, FirstDifference
from paceline.spec.task import ModelSpec, Task
from paceline.task.models.init import initialise
from paceline.task.models.moe import Experts, MoEDecoder
from paceline.task.models.shape import MoEConfig
from paceline.task.models.sizes import resolve_decoder
from paceline.verify.compare.layout import compare

SMALL = {"hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": VOCAB}
EP = {
    2: [Layout(dp_shard=2, ep=2)],
    4: [Layout(dp_shard=4, ep=2), Layout(dp_shard=4, ep=4), Layout(dp_replicate=2, dp_shard=2, ep=2)],
}


def moe_task(name: str = "moe-2m", **changes: Any) -> Task:
    """Return a decoder of 8 experts, small enough for a proof in a test."""
    return decoder_task(model=ModelSpec(name, **{**SMALL, "experts": 8, "top_k": 2, **changes}))


SHARED = moe_task("deepseek-moe-16b", top_k=3)  # a dense first layer, shared experts, weights as the softmax gives them
BIASED = moe_task(balance="bias")


def proofs(cases: list[tuple[Task, Plan]], steps: int) -> list[CheckProof]:
    """Compare each task and plan with one device, in this world."""
    world = world_here()
    return [compare(task, plan, world, task.data, SEQ_LEN, steps) for task, plan in cases]


def prove(devices: int, cases: list[tuple[Task, Plan]], steps: int = 2) -> list[CheckProof]:
    """Return the proof of each case."""
    found = run_kept(proofs, devices, cases, steps)[0]
    assert len(found) == len(cases)
    return found


def unequal(found: list[CheckProof]) -> list[FirstDifference | None]:
    """Return what differs first in the layouts that are not equal to one device."""
    return [proof.first_difference for proof in found if not proof.equal]


@pytest.mark.parametrize("devices", [1, 2, pytest.param(4, marks=pytest.mark.deep)])
def test_expert_layouts_equal_one_device_in_fp64_with_router_statistics_and_biases(devices: int) -> None:
    layouts = EP.get(devices, [Layout()])
    cases = [(task, plan_of(layout, precision="fp64")) for layout in layouts for task in (moe_task(), BIASED, SHARED)]
    found = prove(devices, cases)
    assert not unequal(found)
    assert {proof.differences["router"] for proof in found} == {0}, "each expert got the tokens that it got alone"


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_routes_again_as_before_and_counts_once(recompute: str) -> None:
    layouts = [Layout(dp_shard=2), Layout(dp_shard=2, ep=2)]
    cases = [(BIASED, plan_of(layout, precision="fp64", recompute=recompute)) for layout in layouts]
    assert not unequal(prove(2, cases))


def test_every_zero_class_and_fp32() -> None:
    layout = Layout(dp_shard=2, ep=2)
    plans = [plan_of(layout, precision="fp64", zero=zero) for zero in (1, 2)]
    plans += [plan_of(layout), plan_of(layout, micro_batch=16)]
    assert not unequal(prove(2, [(moe_task(), plan) for plan in plans]))


def test_copies_of_the_whole_model_and_more_ranks_than_rows() -> None:
    few = dataclasses.replace(BIASED, global_batch=dataclasses.replace(BIASED.global_batch, value=3))
    layouts = [Layout(dp_replicate=4), Layout(dp_shard=4, ep=4), Layout(dp_replicate=2, dp_shard=2, ep=2)]
    assert not unequal(prove(4, [(few, plan_of(layout, batch=3, precision="fp64")) for layout in layouts]))


@pytest.mark.parametrize("layout", [Layout(dp_shard=2, ep=2), Layout(dp_replicate=2)], ids=str)
def test_bf16_lies_on_the_curve_of_one_device(layout: Layout) -> None:
    (single,) = run_kept(curve, 1, moe_task(), plan_of(Layout(), precision="bf16"), 5)
    ranks = run_kept(curve, layout.devices, moe_task(), plan_of(layout, precision="bf16", recompute="full"), 5)
    assert all(rank == ranks[0] for rank in ranks)
    assert_curves_close(ranks[0], single, 10 * MEAN_LOSS_BF16)  # the norm of the gradient is no mean


def held(plan: Plan) -> tuple[dict[str, int], list[Any]]:
    """Return elements per name of the experts' weights on this rank, and how they are placed."""
    _, built = run_steps(moe_task(), plan, 1)
    experts = {name: p for name, p in built.model.named_parameters() if ".experts." in name}
    assert all(isinstance(p, DTensor) for p in experts.values())
    return {n: p.to_local().numel() for n, p in experts.items()}, [p.placements for p in experts.values()]


def test_a_rank_holds_its_share_of_whole_experts() -> None:
    for counts, placements in run_kept(held, 4, plan_of(Layout(dp_shard=4, ep=2))):
        assert counts["layers.0.mlp.experts.down_proj"] == 8 * 32 * 24 // 4
        assert placements == [(Shard(3), Shard(0)), (Shard(2), Shard(0))] * 3, "gate and up, and down, of each layer"


def saved_and_loaded(task: Task, first: Plan, then: Plan | None, folder: Path) -> dict[str, torch.Tensor]:
    """Save after two steps under `first`, or load it under `then`; return the whole model's state."""
    world = world_here()
    if then is None:
        _, built = run_steps(task, first, 2, world)
        save_checkpoint(folder, 2, training_state(built.model, built.optimizer), {}, keep_last=1)
    else:
        built = assemble(task, then, world, task.data, SEQ_LEN)
        materialise_optimizer_state(built.optimizer)
        load_checkpoint(next(folder.glob("step-*")), training_state(built.model, built.optimizer))
    state = training_state(built.model, built.optimizer)
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in state.items()}


def test_checkpoints_go_from_any_expert_layout_to_any_other(tmp_path: Path) -> None:
    ep2, ep4, one = Layout(dp_shard=2, ep=2), Layout(dp_shard=4, ep=2), Layout()
    wrote = run_ranks(saved_and_loaded, 2, BIASED, plan_of(ep2), None, tmp_path)[0]
    assert any(name.endswith("e_score_correction_bias") for name in wrote)
    for layout in (one, ep4, Layout(dp_replicate=2)):
        read = run_ranks(saved_and_loaded, layout.devices, BIASED, plan_of(ep2), plan_of(layout), tmp_path)[-1]
        assert read.keys() == wrote.keys()
        assert all(torch.equal(read[name], wrote[name]) for name in wrote), layout


def test_a_bias_moves_the_load_and_no_loss_is_added() -> None:
    stats, built = run_steps(moe_task(balance="bias"), plan_of(Layout(), precision="fp64"), 3)
    assert built.stepper.routing is not None
    first, last = stats[0].router, stats[-1].router
    assert first is not None and last is not None
    tokens = 13 * SEQ_LEN
    assert [sum(row) for row in first.counts] == [2 * tokens] * 3 and first.dropped == 0
    assert all(0 < entropy <= 1 for entropy in last.entropy)
    biases = [b for name, b in built.model.named_buffers()]
    assert len(biases) == 3 and all(0.0005 < float(b.abs().max()) <= 0.0031 for b in biases)
    plain, _ = run_steps(moe_task(balance="none"), plan_of(Layout(), precision="fp64"), 1)
    assert plain[0].loss == stats[0].loss, "the first step routes as without a balance"
    with_loss, _ = run_steps(moe_task(balance_weight=0.5), plan_of(Layout(), precision="fp64"), 1)
    assert with_loss[0].router is not None
    assert with_loss[0].loss == pytest.approx(plain[0].loss + 0.5 * with_loss[0].router.balance, rel=FP64)


def held_and_gradients(precision: str, layout: Layout) -> tuple[list[str], bool]:
    """Return the mesh of a layer's experts after a step, and whether their weights and plain tensors share storage."""
    built = run_steps(moe_task(), plan_of(layout, precision=precision), 1)[1]
    weight = built.model.layers[0].mlp.experts.down_proj
    gradients = built.stepper.gradients
    leaves = gradients.alone._leaves if isinstance(gradients, ExpertGradients) else {}
    shared = weight in leaves and leaves[weight].data_ptr() == weight.to_local().data_ptr()
    return list(weight.device_mesh.mesh_dim_names), shared


@pytest.mark.parametrize(
    ("precision", "layout", "alone"),
    [("fp32", Layout(dp_shard=2, ep=2), True), ("bf16", Layout(dp_shard=2, ep=2), False),
     ("fp32", Layout(dp_shard=4, ep=2), False)], ids=["alone", "cast", "shared"],
)  # fmt: skip
def test_experts_that_a_rank_has_alone_are_left_out_of_sharding(precision: str, layout: Layout, alone: bool) -> None:
    axes, plain = run_kept(held_and_gradients, layout.devices, precision, layout)[0]
    assert plain == alone
    assert ("expert_shard" in axes) != alone


def spread(task: Task, plan: Plan) -> None:
    assemble(task, plan, world_here(), task.data, SEQ_LEN)


@pytest.mark.parametrize(
    ("task", "because"),
    [(moe_task(experts=5), "5 experts"), (decoder_task(), "no experts to spread")], ids=["uneven", "none"],
)  # fmt: skip
def test_what_cannot_be_spread_is_refused(task: Task, because: str) -> None:
    with pytest.raises(ConfigError, match=because):
        run_ranks(spread, 2, task, plan_of(Layout(dp_shard=2, ep=2)))


def test_experts_are_found_by_their_class() -> None:
    _, built = run_steps(SHARED, plan_of(Layout()), 1)
    names = [name for name, module in built.model.named_modules() if isinstance(module, Experts)]
    assert names == ["layers.1.mlp.experts", "layers.2.mlp.experts"], "the first layer is dense"
    assert weights_after(SHARED, plan_of(Layout()), 1).keys() == dict(built.model.named_parameters()).keys()


def halved_sequences(config: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the balance of this rank's half of two sequences, and the router's gradient of its sum over ranks."""
    rank = dist.get_rank()
    model = MoEDecoder(config)
    initialise(model, seed=1)
    balance_shared_sequences(model, dist.group.WORLD)
    layer = model.double().to(device_here()).layers[0].mlp
    x = torch.randn(2, 10, config.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x = x.to(device_here())
    _, routed = layer(x[:, 5 * rank : 5 * rank + 5])
    routed.balance.sum().backward()
    gradient = layer.gate.weight.grad
    dist.all_reduce(gradient)
    return routed.balance.detach(), gradient


def test_ranks_that_balance_shared_sequences_balance_whole_ones() -> None:
    config = resolve_decoder(ModelSpec("moe-2m", **{**SMALL, "layers": 1}), VOCAB, SEQ_LEN)
    assert isinstance(config, MoEConfig)
    parts = run_kept(halved_sequences, 2, config)
    model = MoEDecoder(config)
    initialise(model, seed=1)
    layer = model.double().layers[0].mlp
    x = torch.randn(2, 10, config.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    _, routed = layer(x)
    routed.balance.sum().backward()
    torch.testing.assert_close(sum(balance for balance, _ in parts), routed.balance.detach())
    torch.testing.assert_close(parts[0][1], layer.gate.weight.grad)


def travelled() -> list[tuple[bool, bool, bool]]:
    """Return for each unevenness whether rows reach the ranks of their experts, come back, and gradients likewise."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), device_here()
    exchange, found = AllToAll(dist.group.WORLD), []
    for counts in ([3, 0, 1, 2], [0, 0, 0, 7] if rank else [0, 0, 0, 0], [0, 0, 0, 0]):
        total = torch.tensor(counts, device=device)
        expert = torch.arange(2 * size, device=device).repeat_interleave(total)
        places = torch.arange(len(expert), device=device).double() + 100 * rank
        rows = torch.stack([expert.double(), places], dim=1).requires_grad_()
        there, held, ticket = exchange.dispatch(rows, total)
        mine = torch.arange(2 * rank, 2 * rank + 2, device=device).repeat_interleave(held).double()
        back = exchange.combine(there * 3, ticket)
        (back * rows.detach()).sum().backward()
        graded = rows.grad is not None and torch.equal(rows.grad, 3 * rows.detach())
        found.append((torch.equal(there[:, 0].detach(), mine), torch.equal(back, rows * 3), graded))
    return found


def test_rows_travel_to_their_experts_and_back_with_their_gradients() -> None:
    assert run_kept(travelled, 2) == [[(True, True, True)] * 3] * 2


def sharded_unevenly() -> None:
    even, uneven = (torch.nn.Linear(*sizes, bias=False, device=device_here()) for sizes in ((4, 3), (3, 4)))
    mesh = init_device_mesh(device_here().type, (2,))
    fully_shard(even, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))
    fully_shard(uneven, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))


def test_torch_still_cannot_shard_a_later_dimension_unevenly() -> None:
    """Once it can, `plan.experts.refusal` need not ask for widths that divide."""
    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
        run_ranks(sharded_unevenly, 2)
