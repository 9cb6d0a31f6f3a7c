"""The model axes' terms: against sums done by hand on round numbers, and the orders that hold whatever they are."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_examples import (
    axis_terms,
    block,
    bubble_seconds,
    cluster,
    compute_terms,
    measured,
    memory_terms,
    network_terms,
    optimizer_seconds,
    plan,
    profile,
)

from paceline.plan.cost.columns import columns_of
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.memory.held_at_peak import in_flight
from paceline.plan.cost.pricing import price
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.network import data_seconds
from paceline.plan.cost.time.ring import hop, ring
from paceline.spec.cluster import Link
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile

CONSTANTS = read_constants()
NEAR, FAR = Link("node", measured(1e-6), measured(1e11)), Link("network", measured(1e-5), measured(1e10))


def model(layers: int = 4, **changes: float) -> ModelProfile:
    """Embedding, layers with attention, and a head, all of the same stream of 5e4 elements."""
    base = profile(layers, **{"kv_elements": 2e4, **changes})
    head = block("head", "head", False, attention_flops=0.0)
    return dataclasses.replace(base, blocks=(*base.blocks, head))


def context_of(layout: Layout, shape: ModelProfile | None = None, batch: int = 64, **changes: object) -> PricedTask:
    return PricedTask(shape or model(), cluster(layout.devices, **changes), batch, 1)


def inside(layout: Layout, shape: ModelProfile | None = None, **changes: object) -> dict[str, float]:
    chosen = plan(layout, 8, **changes)
    return {term.name: term.value for term in axis_terms(context_of(layout, shape), chosen)}


def held(chosen: object, shape: ModelProfile | None = None) -> dict[str, float]:
    return {t.name: t.value for t in memory_terms(context_of(chosen.layout, shape), chosen)}


def seconds(chosen: object, shape: ModelProfile | None = None) -> dict[str, float]:
    return {t.name: t.value for t in price(context_of(chosen.layout, shape), chosen).time}


def flying(chosen: Plan) -> list[float]:
    """Return the micro-batches in flight on every rank of a plan's pipeline."""
    ranks = chosen.layout.pp
    return list(in_flight(columns_of([chosen] * ranks), np.arange(ranks)))


# Tensor


def test_tensor_ranks_share_arithmetic_and_state() -> None:
    alone, shared = seconds(plan(Layout(), 8)), seconds(plan(Layout(tp=4), 8))
    for name in ("products, forward", "products, backward", "attention", "memory-bound operators", "optimizer"):
        assert shared[name] == pytest.approx(alone[name] / 4)
    alone, shared = held(plan(Layout(), 8)), held(plan(Layout(tp=4), 8))
    for name in ("weights", "gradients", "optimizer state", "transients"):
        assert shared[name] == pytest.approx(alone[name] / 4)


def test_tensor_communication_by_hand() -> None:
    # 64 samples, 8 micro-batches, stream 5e4 x 4 B: per pass the embedding 1, four layers 4 each, the head 1.
    stream, count, ring_share = 64 * 5e4 * 4, 2 * (1 + 4 * 4 + 1), 3 / 4
    wire = count * ring_share * stream / 1e9
    hops = 8 * count * 3 * 1e-4
    loss = 2 * ring_share * 3 * 4 * 64 * 256 / 1e9 + 3 * 8 * 3 * 1e-4  # a measured latency is of a whole collective
    assert inside(Layout(tp=4))["tensor communication"] == pytest.approx(wire + hops + loss)
    again = (4 * 4 * ring_share * stream / 1e9) + 8 * 4 * 4 * 3 * 1e-4
    assert inside(Layout(tp=4), recompute="full")["tensor communication"] == pytest.approx(wire + hops + loss + again)


def test_tensor_ranks_keep_gathered_inputs_whole() -> None:
    got = held(plan(Layout(tp=4), 1))["activations"]
    # Layers: 4e5 saved, of which two inputs of 5e4 stay whole; embedding and head are divided; fp32 ones too.
    layer = (4e5 - 2 * 5e4) / 4 + 2 * 5e4
    assert got == pytest.approx(4 * (4 * layer + 2 * 4e5 / 4) + 4 * 6 * 1e5 / 4)
    full = held(plan(Layout(tp=4), 1, recompute="full"))["activations"]
    # The head's 4e5 and 1e5 are gone when a block is computed again, which needs more.
    embedding, block = 4 * 4e5 / 4 + 4 * 1e5 / 4, 4 * layer + 4 * 1e5 / 4
    assert full == pytest.approx(4 * 4 * 5e4 / 4 + embedding + block) and block > 4 * 4e5 / 4 + 4 * 1e5 / 4


def test_split_products_are_narrower_and_slower() -> None:
    rates = {"fp32": ((128, 1e10), (256, 2e10), (512, 4e10))}
    where = cluster(4)
    where = dataclasses.replace(where, device=dataclasses.replace(where.device, matmul_flops=rates))
    context = PricedTask(model(), where, 64, 1)
    whole = context.sheet(plan(Layout())).product_seconds.max()
    split = context.sheet(plan(Layout(tp=4))).product_seconds.max()
    assert split == pytest.approx(whole / 4 * 2)  # one of two widths over 4: the mean is halved, and so is the rate


# PricedTask


def test_context_ranks_share_tokens_and_not_weights_by_hand() -> None:
    alone, shared = seconds(plan(Layout(), 8)), seconds(plan(Layout(cp=4), 8))
    for name in ("products, forward", "attention", "memory-bound operators"):
        assert shared[name] == pytest.approx(alone[name] / 4)
    state = held(plan(Layout(cp=4), 8))
    assert state["weights"] == 4 * 6e6 / 4, "ZeRO shards them over dp_shard x cp"
    kept = held(plan(Layout(cp=4), 1))["activations"]
    assert kept == pytest.approx(4 * (4 * 4e5 / 4 + 2 * 4e5 / 4) + 4 * 6 * 1e5 / 4), "of keys its own part alone"


def test_keys_of_all_ranks_are_there_in_one_layer_or_kept_in_all_under_a_mask() -> None:
    """2e4 keys and values of 4 B over 4 ranks: gathered, those in use, and gradients; around a ring two parts of both.

    Under a mask each of four layers keeps all of them for its backward pass.
    """
    none = model(kv_elements=0.0)
    for method, several in (("gather", 4 * (2 - 1 / 4) + 4), ("ring", 2 * (4 + 4) / 4)):
        with_keys, without = (held(plan(Layout(cp=4), 1, cp_method=method), shape) for shape in (model(), none))
        more = with_keys["communication buffers"] - without["communication buffers"]
        assert more == pytest.approx(several * 2e4)
        assert with_keys["activations"] == pytest.approx(without["activations"])
    masked = held(plan(Layout(cp=4), 1), dataclasses.replace(model(), masked=True))["activations"]
    assert masked - held(plan(Layout(cp=4), 1))["activations"] == pytest.approx(4 * 4 * 2e4 * (1 - 1 / 4))


def test_context_communication_by_hand() -> None:
    moved = 64 * 4 * 2e4 * 4
    once = 3 / 4 * moved / 1e9 + 8 * 4 * 3 * 1e-4
    assert inside(Layout(cp=4))["context communication"] == pytest.approx(3 * once)
    assert inside(Layout(cp=4), recompute="full")["context communication"] == pytest.approx(4 * once)
    some = {"recompute": "selective"}  # what keeps attention's output exchanges nothing again
    assert inside(Layout(cp=4), **some)["context communication"] == pytest.approx(3 * once)
    products = inside(Layout(cp=4), recompute_save=("products",), **some)["context communication"]
    assert products == pytest.approx(4 * once)
    under_mask = dataclasses.replace(model(), masked=True)  # keys are kept, so the backward pass exchanges none
    for again, several in (({}, 2), (some, 3), ({"recompute": "full"}, 3)):
        masked = inside(Layout(cp=4), under_mask, **again)["context communication"]
        assert masked == pytest.approx(several * once)
    both = inside(Layout(cp=2, tp=2))["context communication"]
    assert both == pytest.approx(3 * (1 / 2 * moved / 2 / 1e9 + 8 * 4 * 1e-4))


def test_keys_of_other_ranks_come_while_attention_computes_on_an_accelerator() -> None:
    shape = model(attention_flops=1e7)
    whole = inside(Layout(cp=4), shape)["context communication"]
    found = {}
    for method in ("gather", "ring"):
        context = PricedTask(shape, cluster(4, "cuda"), 64, 1)
        terms = {term.name: term.value for term in price(context, plan(Layout(cp=4), 8, cp_method=method)).time}
        assert 0 < terms["context communication"] < whole
        found[method] = (whole - terms["context communication"]) / terms["attention"]
    assert found["gather"] == pytest.approx(1 / 4), "beside a rank's own part alone"
    assert found["ring"] == pytest.approx(1), "beside all of it"


def test_under_a_mask_keys_are_gathered_whatever_the_method_and_attention_waits_for_them() -> None:
    shape = dataclasses.replace(model(attention_flops=1e7), masked=True)
    whole = inside(Layout(cp=4), shape)["context communication"]
    buffers = set()
    for method in ("gather", "ring"):
        context, chosen = PricedTask(shape, cluster(4, "cuda"), 64, 1), plan(Layout(cp=4), 8, cp_method=method)
        (term,) = (each for each in price(context, chosen).time if each.name == "context communication")
        assert term.value == pytest.approx(whole) and "gathered once" in term.formula
        buffers.add(held(chosen, shape)["communication buffers"])
    assert len(buffers) == 1


def test_gradients_of_gathered_keys_are_summed_when_nothing_is_computed_beside_them() -> None:
    shape = model(attention_flops=1e12)  # hides both gathers whole
    scatter = 3 / 4 * 64 * 4 * 2e4 * 4 / 1e9 + 8 * 4 * 3 * 1e-4
    for method, left in (("gather", scatter), ("ring", 0.0)):
        context = PricedTask(shape, cluster(4, "cuda"), 64, 1)
        terms = {term.name: term.value for term in price(context, plan(Layout(cp=4), 8, cp_method=method)).time}
        assert terms["context communication"] == pytest.approx(left)


# Experts


def mixture() -> ModelProfile:
    return model(experts=8, expert_parameters=800_000, routed_elements=1e5)


def test_expert_traffic_by_hand() -> None:
    got = inside(Layout(dp_shard=4, ep=4), mixture())["expert all-to-all"]
    moved = 16 * 4 * 1e5 * 4  # a data rank has 16 samples in two micro-batches
    assert got == pytest.approx(4 * (3 / 4 * moved / 1e9 + 2 * 4 * 3 * 1e-4))
    assert "expert all-to-all" not in inside(Layout(dp_shard=4), mixture())


def test_slots_of_experts_cost_their_bytes_and_say_what_they_spare() -> None:
    layout, moved = Layout(dp_shard=4, ep=4), 16 * 4 * 1e5 * 4
    chosen = plan(layout, 8, expert_slots=1.5, recompute="full")
    (term,) = [one for one in axis_terms(context_of(layout, mixture()), chosen) if one.name == "expert all-to-all"]
    assert term.value == pytest.approx(6 * (3 / 4 * 1.5 * moved / 1e9 + 2 * 4 * 3 * 1e-4))
    assert "1.5 slots for a row: the host waits 16 times less" in term.formula  # 4 layers, 2 micro-batches, and again
    slotted, exactly = (held(plan(layout, 8, expert_slots=slots), mixture()) for slots in (1.5, 0.0))
    more = {name: slotted[name] - exactly[name] for name in slotted}
    assert more["communication buffers"] == 2 * 8 * 4 * 1e5 * 0.5
    assert more["activations"] == pytest.approx(8 * 4 * 4 * 2 * 1e5 * 0.5), "of 4 layers, rows in and rows out"
    assert more["weights"] == more["gradients"] == more["weight copies"] == 0


def test_experts_are_gathered_where_they_are_and_no_further() -> None:
    layout = Layout(dp_shard=4, ep=4)
    context = context_of(layout, mixture())
    spread, plain = (data_seconds(context.sheet(plan(chosen, 16, zero=1))) for chosen in (layout, Layout(dp_shard=4)))
    dense, experts = 6e6 - 4 * 8e5, 4 * 8e5
    wire = 3 / 4 * dense * 4 / 1e9 + 5 * 3 * 1e-4  # a group of one has nothing to gather
    assert spread.gather_seconds == pytest.approx(wire + 2 * (dense + experts / 4) * 4 / 1e10)
    assert spread.gather_seconds < plain.gather_seconds and spread.reduce_seconds < plain.reduce_seconds


def test_experts_state_and_copies() -> None:
    spread, plain = held(plan(Layout(dp_shard=4, ep=4), 8), mixture()), held(plan(Layout(dp_shard=4), 8), mixture())
    assert spread["weights"] == plain["weights"], "ZeRO divides them either way"
    # Gathered are the root's 2e6 parameters and two blocks' 1e6, of which 8e5 are experts, a quarter of them here.
    assert plain["weight copies"] == 4 * (2e6 + 2 * 1e6)
    assert spread["weight copies"] == pytest.approx(4 * (2e6 + 2 * (2e5 + 8e5 / 4)))


# Pipeline


def test_the_bubble_of_equal_stages_is_p_minus_one_over_m() -> None:
    equal = ModelProfile("equal", tuple(block(f"layers.{i}") for i in range(8)), 256, "analytic", {})
    context = PricedTask(equal, cluster(4), 64, 1)
    for schedule, several, share in (
        ("1f1b", 1, 1.0), ("gpipe", 1, 1.0), ("interleaved", 2, 0.5), ("zero-bubble", 1, 1 / 3),
    ):  # fmt: skip
        chosen = plan(Layout(pp=4), 4, schedule=schedule, virtual_stages=several)
        work = sum(term.value for term in compute_terms(context, chosen))
        assert bubble_seconds(context, chosen) == pytest.approx(share * 3 / 16 * work), schedule


def test_the_slowest_stage_sets_the_pace() -> None:
    chosen = plan(Layout(pp=2), 8, stages=(1, 3))
    context = context_of(chosen.layout)
    products = compute_terms(context, chosen)[0].value
    assert products == pytest.approx(64 * 4 * 2e9 / 1e11), "three layers and the head"
    first, last = context.sheet(chosen).busy_seconds
    work = sum(term.value for term in compute_terms(context, chosen))
    assert bubble_seconds(context, chosen) == pytest.approx(first / last * work / 8) and first < last


def test_sends_by_hand() -> None:
    got = inside(Layout(pp=4, tp=2))["pipeline sends"]
    micro = 8 * 5e4 * 4 / 2
    assert got == pytest.approx(2 * (8 + 3) * (micro / 1e9 + 1e-4))


def test_stages_hold_their_own_weights_and_micro_batches_in_flight() -> None:
    chosen = plan(Layout(pp=2), 4, stages=(2, 2))
    got = held(chosen)
    assert got["weights"] == 4 * 3e6
    assert got["activations"] == pytest.approx(4 * 2 * 3 * (4e5 + 1e5) * 4), "the first stage has two in flight"
    assert flying(plan(Layout(pp=4), 4)) == [4, 3, 2, 1]
    assert flying(plan(Layout(pp=4), 4, schedule="gpipe"))[3] == 16
    interleaved = plan(Layout(pp=4), 4, schedule="interleaved", virtual_stages=2)
    # Rank 0 warms up with 4 chunks of the first round and 2 x 3 more, and holds one more: 11 of 2 a micro-batch.
    assert flying(interleaved) == [5.5, 4.5, 3.5, 2.5]
    assert flying(plan(Layout(), 4)) == [1]


def test_a_tied_head_holds_its_own_copy_of_the_weight() -> None:
    shape = model()
    tied = dataclasses.replace(shape.blocks[-1], parameters=0, tied_to="embedding")
    shape = dataclasses.replace(shape, blocks=(*shape.blocks[:-1], tied))
    context = context_of(Layout(pp=2), shape)
    parts = context.sheet(plan(Layout(pp=2), 8, stages=(2, 2))).rows.parts
    assert list(parts.parameters) == [3_000_000, 3_000_000] and shape.parameters == 5_000_000


# Links


def test_each_axis_takes_the_link_that_its_group_crosses() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2, cp=2, tp=4, pp=2, ep=2)
    groups = {axis: layout.group(axis) for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp", "fsdp", "ep")}
    assert groups == {
        "tp": (4, 1), "cp": (2, 4), "dp_shard": (2, 8), "dp_replicate": (2, 16), "pp": (2, 32), "fsdp": (4, 4),
        "ep": (2, 4),
    }  # fmt: skip
    assert layout.group("expert_shard") == (2, 8)
    where = cluster(64, "cuda", devices_per_node=8, links=(NEAR, FAR))
    sizes, strides = (np.array(column) for column in zip(*groups.values(), strict=True))
    nodes = dict(zip(groups, ring(where, CONSTANTS, sizes, strides).nodes, strict=True))
    assert nodes == {"tp": 1, "cp": 1, "dp_shard": 2, "dp_replicate": 2, "pp": 2, "fsdp": 2, "ep": 1}
    rate, latency, _ = hop(where, CONSTANTS, np.array([groups["pp"][0], 4]), np.array([groups["pp"][1], 2]))
    assert list(rate) == [1e10, 1e11] and list(latency) == [1e-5, 1e-6]


def test_all_to_all_leaves_the_node_through_its_own_adapter() -> None:
    where = cluster(16, "cuda", devices_per_node=8, links=(NEAR, FAR))
    rates = ring(where, CONSTANTS, np.array([16, 8]), np.array([1, 1])).bytes_per_second["all_to_all"]
    assert list(rates) == pytest.approx([15 / (8 / 1e10), 1e11])


def test_tensor_ranks_across_nodes_cost_more() -> None:
    where = cluster(16, "cuda", devices_per_node=8, links=(NEAR, FAR))
    context = PricedTask(model(), where, 64, 1)
    near, far = (axis_terms(context, plan(layout, 8))[0].value for layout in (Layout(dp_shard=2, tp=8), Layout(tp=16)))
    assert far > 2 * near


# Orders that hold whatever the numbers

layouts = st.sampled_from(
    [Layout(tp=4), Layout(cp=4), Layout(pp=4), Layout(dp_shard=2, tp=2), Layout(cp=2, tp=2), Layout(pp=2, tp=2),
     Layout(dp_replicate=2, pp=2), Layout(dp_shard=2, pp=2), Layout(dp_replicate=2, tp=2), Layout(dp_shard=2, cp=2)]
)  # fmt: skip
settings_of_a_plan = {
    "zero": st.sampled_from([1, 2, 3]),
    "recompute": st.sampled_from(["none", "selective", "full"]),
    "precision": st.sampled_from(["fp32", "bf16"]),
}


@settings(max_examples=80, deadline=None)
@given(layouts, st.sampled_from([1, 2, 4]), st.fixed_dictionaries(settings_of_a_plan))
def test_prices_are_positive_and_add_up(layout: Layout, micro_batch: int, changes: dict) -> None:
    chosen = plan(layout, micro_batch, **changes)
    context = context_of(layout)
    forecast = price(context, chosen)
    assert all(term.value >= 0 and math.isfinite(term.value) for term in (*forecast.time, *forecast.memory))
    assert forecast.step_seconds.value == pytest.approx(sum(term.value for term in forecast.time))


@settings(max_examples=40, deadline=None)
@given(layouts, st.fixed_dictionaries(settings_of_a_plan), st.integers(6, 12))
def test_state_is_divided_by_every_axis_but_copies(layout: Layout, changes: dict, layers: int) -> None:
    shape = model(layers * 4)
    whole = held(plan(Layout(dp_replicate=layout.devices), 1, **changes), shape)["optimizer state"]
    got = held(plan(layout, 1, **changes), shape)["optimizer state"]
    share = got / whole * layout.devices / layout.dp_replicate
    assert share == pytest.approx(1, rel=0.2), "stages are not quite equal"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_more_of_an_axis_computes_and_holds_less(recompute: str) -> None:
    shape = model(16)
    for axis in ("tp", "cp", "pp"):
        chosen = [plan(Layout(**{axis: degree}), 1, recompute=recompute) for degree in (1, 2, 4, 8)]
        work = [sum(t.value for t in compute_terms(context_of(p.layout, shape), p)) for p in chosen]
        assert all(later < before for before, later in pairwise(work)), axis
        # In flight, a pipeline's first stage holds as many layers as a device without one.
        short_lived = [held(p, shape)["activations"] for p in chosen]
        assert axis == "pp" or all(later < before for before, later in pairwise(short_lived)), axis
        optimizer = [optimizer_seconds(context_of(p.layout, shape), p) for p in chosen]
        assert all(later < before for before, later in pairwise(optimizer)), axis


def test_more_micro_batches_mean_less_bubble() -> None:
    shape = model(8)
    bubbles = [seconds(plan(Layout(pp=4), size), shape)["pipeline bubble"] for size in (16, 8, 4, 2, 1)]
    assert all(later < before for before, later in pairwise(bubbles))


def test_a_bubble_costs_ranks_that_take_turns_only_what_no_other_fills() -> None:
    shape = model(8)
    found = {}
    for share in (1.0, 0.5, 0.9):
        where = cluster(4)
        where = dataclasses.replace(where, device=dataclasses.replace(where.device, core_share=share))
        priced = price(PricedTask(shape, where, 64, 1), plan(Layout(pp=4), 32))
        terms = {term.name: term.value for term in priced.time}
        busy = terms["products, forward"] + terms["products, backward"] + terms["attention"]
        found[share] = terms["pipeline bubble"], busy
    bubble, busy = found[1.0]
    assert bubble > busy, "two micro-batches in four stages"
    assert 0 <= found[0.5][0] < bubble / 4
    assert found[0.5][0] < found[0.9][0] < 0.9 * bubble


def test_terms_have_the_clock_that_measures_them() -> None:
    layout = Layout(dp_shard=2, cp=2, tp=2, pp=2, ep=2)
    context = context_of(layout, mixture())
    chosen = plan(layout, 1)
    names = {term.name: term.clock for term in price(context, chosen).time}
    inside_names = ("tensor communication", "context communication", "expert all-to-all", "pipeline sends")
    assert {names[name] for name in (*inside_names, "gradient reduction", "parameter gathering")} == {"reduce"}
    assert names["pipeline bubble"] == "reduce"  # a rank that waits for its peers, as in a collective
    assert network_terms(context, chosen, 0.0)
