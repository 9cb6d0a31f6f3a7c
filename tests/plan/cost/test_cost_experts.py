"""What experts cost on accelerators, by hand: products of few rows, groups of experts, tokens sent beside computing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from plan_examples import block, cluster, opened, profile

from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.collectives.of_a_step import collectives
from paceline.plan.cost.collectives.within_passes import _copies_share, expert_collective
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.pricing import price
from paceline.plan.cost.programs.known import MEGATRON, MEGATRON_BRIDGE
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.software import PACELINE, Software
from paceline.plan.cost.time.axes import SENDING_UNITS, seconds_of
from paceline.plan.cost.time.compute import ROUTED_STARTS
from paceline.spec.cluster import Cluster, ClusterSpec, Figure
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.profile import ROUTING_MOVES, Fill, ModelProfile

MODEL = opened(profile(4))
ROUTED = {"experts": 64, "expert_parameters": 6_400_000, "routed_elements": 8 * 5e4, "expert_widths": (512, 128),
          "routed_flops": 1.5e9, "parameters": 7_000_000}  # fmt: skip


def published_cluster(name: str, devices: int) -> Cluster:
    return resolve_cluster(ClusterSpec(name, devices=devices))[0]


def mixture(**changes: object) -> ModelProfile:
    """Return four layers that send every token to 8 of 64 experts; three quarters of their products are experts'."""
    layers = tuple(block(f"layers.{index}", "experts", **{**ROUTED, **changes}) for index in range(4))
    return opened(dataclasses.replace(MODEL, blocks=layers))


def plan(layout: Layout, micro: int = 2, **changes: object) -> Plan:
    base = Plan(layout=layout, zero=1, micro_batch=micro, batch_samples=64, precision="bf16")
    return dataclasses.replace(base, accumulation=64 // micro // layout.data_degree, **changes)


def test_an_expert_multiplies_its_part_of_its_groups_tokens_and_the_rest_all_of_them() -> None:
    layout = Layout(dp_shard=8, ep=8)
    sheet = PricedTask(mixture(), published_cluster("h100-sxm", 8), 64, 1).sheet(plan(layout))
    tokens = 2 * 256
    rows = tokens * 8 / 64 * 8  # of an expert: its part of what eight devices route
    rates = sheet.rates

    def seconds(flops: float, width: float, of: float) -> float:
        return flops * float(rates.product_seconds_per_flop(np.array(width), np.array(of), np.array(1.0)))

    by_hand = seconds(0.5e9, 512, tokens) + seconds(1.5e9, math.sqrt(512 * 128), rows)
    assert sheet.product_seconds[0, 0] == pytest.approx(by_hand)


def test_tensor_ranks_with_whole_experts_of_their_own_split_no_width_and_are_in_the_group() -> None:
    layout = Layout(dp_shard=4, tp=2, ep=4)
    spread = dataclasses.replace(PACELINE, spreads_experts=True)
    device = published_cluster("h100-sxm", 8)
    contexts = [PricedTask(mixture(), device, 64, 1, software=software) for software in (spread, PACELINE)]
    apart, split = (context.sheet(plan(layout)) for context in contexts)
    assert apart.product_seconds[0, 0] < split.product_seconds[0, 0]
    assert int(apart.ring("ep").size[0]) == 8 and int(split.ring("ep").size[0]) == 4


def test_tensor_ranks_with_a_part_of_every_expert_each_move_all_tokens_and_keep_all_rows() -> None:
    """Every rank routes the whole sequence alike: four tensor ranks move and keep as much of it as one does."""
    device, moved = published_cluster("h100-sxm", 8), ROUTING_MOVES * ROUTED["routed_elements"]
    model = mixture(moved_elements=moved + 8e5, saved_elements=2 * ROUTED["routed_elements"] + 6e5, input_elements=1e5)

    def both(software: Software, tp: int) -> tuple[float, float]:
        context = PricedTask(model, device, 64, 1, software=software)
        sheet = context.sheet(plan(Layout(dp_shard=8 // tp, tp=tp)))
        return float(sheet.moving_seconds[0, 0]), float(sheet.kept_bytes[0][0, 0])

    (alone_seconds, alone_bytes), (seconds, kept) = both(PACELINE, 1), both(PACELINE, 4)
    assert seconds == pytest.approx(alone_seconds * (moved + 8e5 / 4) / (moved + 8e5))
    inputs = 2e5  # of products, gathered
    fp32 = alone_bytes - 2 * (2 * ROUTED["routed_elements"] + 6e5)
    by_hand = 2 * (2 * ROUTED["routed_elements"] + inputs + 4e5 / 4) + fp32 / 4
    assert kept == pytest.approx(by_hand)
    assert both(MEGATRON, 4)[0] == pytest.approx(both(MEGATRON, 1)[0] / 4)  # each routes its part of the sequence
    spread = dataclasses.replace(PACELINE, spreads_experts=True)
    assert both(spread, 4)[0] == pytest.approx(both(spread, 1)[0] / 4)


@pytest.mark.parametrize(("nodes", "groups"), [(8, (8, 4)), (4, (8, 4)), (2, (8, 3)), (16, (8, 4)), (8, (8, 8))])
def test_a_token_lies_on_no_more_nodes_than_its_groups_stand_on(nodes: int, groups: tuple[int, int]) -> None:
    model = mixture(routed_groups=groups)
    sheet = PricedTask(model, cluster(4), 64, 1).sheet(plan(Layout(dp_shard=4, ep=4)))
    share = float(_copies_share(sheet, np.array([nodes]))[0])
    drawn, counts = np.random.default_rng(0), []
    for _ in range(5_000):
        chosen = drawn.permutation(groups[0])[: groups[1]]  # groups, of which the token's eight experts are
        places = drawn.choice(chosen, 8) + drawn.random(8)  # experts of a group may stand on several nodes
        counts.append(len({int(place * nodes / groups[0]) for place in places}))
    assert share == pytest.approx(np.mean(counts) / 8, rel=0.05)
    assert share * 8 <= groups[1] * max(1, nodes / groups[0]) + 1e-9


def test_inside_of_a_node_a_token_goes_once_to_each_device() -> None:
    sent = dataclasses.replace(PACELINE, sends_once_per_node=True)
    contexts = [PricedTask(mixture(), cluster(8), 64, 1, software=software) for software in (PACELINE, sent)]
    apart, once = (context.sheet(plan(Layout(dp_shard=8, ep=8))) for context in contexts)
    share = float((expert_collective(once).buffer_bytes / expert_collective(apart).buffer_bytes)[0])
    chosen = max(float(block.routed_elements / block.input_elements) for block in mixture().blocks)
    assert share == pytest.approx(8 * (1 - (7 / 8) ** chosen) / chosen)


def test_tokens_that_travel_beside_computing_hold_it_up_by_the_units_that_send_them() -> None:
    layout = Layout(dp_shard=16, pp=2, ep=16)
    chosen = plan(layout, 1, schedule="interleaved", virtual_stages=2, stages=(1, 1, 1, 1))
    shown = dataclasses.replace(MEGATRON_BRIDGE, hides_experts=False)
    device = published_cluster("h100-sxm", 32)
    sheet = PricedTask(mixture(), device, 64, 1, software=shown).sheet(chosen)
    whole = float(seconds_of(sheet.ring("ep"), expert_collective(sheet))[0])
    filling = whole * 1 / 4 / 2  # one other stage, of four micro-batches in two chunks
    room = read_constants().overlap * 4 * float(sheet.busy_seconds[sheet.slowest_row][0])
    hidden = min(whole - filling, room)

    def priced(software: Software, of: Plan) -> float:
        terms = price(PricedTask(mixture(), device, 64, 1, software=software), of).time
        return next(term.value for term in terms if term.name == "expert all-to-all")

    assert priced(shown, chosen) == pytest.approx(whole)
    assert priced(MEGATRON_BRIDGE, chosen) == pytest.approx(whole - hidden + SENDING_UNITS * hidden)
    plain = plan(layout, 1, stages=(2, 2))
    assert priced(MEGATRON_BRIDGE, plain) == priced(shown, plain), "without interleaving nothing else is there"
    inside = plan(Layout(dp_shard=16, pp=2, ep=8), 1, schedule="interleaved", virtual_stages=2, stages=(1, 1, 1, 1))
    assert priced(MEGATRON_BRIDGE, inside) == priced(shown, inside), "a group inside a node is fast without it"


def test_devices_wait_for_operators_that_follow_the_count_of_each_experts_rows() -> None:
    def launches(model: ModelProfile, recompute: str = "none") -> float:
        large = dataclasses.replace(model, blocks=tuple(
            dataclasses.replace(one, matmul_flops=one.matmul_flops * 1e4) for one in model.blocks))  # fmt: skip
        chosen = plan(Layout(), recompute=recompute)
        terms = price(PricedTask(large, published_cluster("h100-sxm", 1), 64, 1), chosen).time
        return next(term.value for term in terms if term.name == "operator launches")

    waits = 32 * 4 * ROUTED_STARTS * read_constants().launch_seconds
    assert launches(mixture()) == pytest.approx(waits)
    assert launches(mixture(), "full") == pytest.approx(2 * waits), "what is routed again is counted again"
    assert launches(MODEL) == 0


def test_rows_that_are_picked_by_index_take_what_the_probe_says() -> None:
    """400,000 elements of a sample are picked twice, 4 B each at 8 GB/s there and back: 0.5 ns, 0.1667 ns a pass.

    Reading and writing them is counted already, 8 B at 80 GB/s are 0.1 ns of these: 0.0667 ns are left, 53 us a sample
    in each of three passes; either of two tensor ranks picks all rows. A probe without the figure adds nothing, and
    neither does one that says that picking is as fast as copying.
    """

    def moving(rate: float | None, tp: int = 1, kind: str = "cpu") -> float:
        figure = None if rate is None else Figure(rate, "measured")
        device = dataclasses.replace(
            cluster(4, kind).device, memory_bytes_per_second=Figure(80e9, "measured"), picked_bytes_per_second=figure
        )
        layout = Layout(dp_shard=4 // tp, tp=tp)
        task = PricedTask(mixture(), dataclasses.replace(cluster(4, kind), device=device), 64, 1)
        return float(task.sheet(plan(layout, precision="fp32")).moving_seconds[0, 0])

    beyond = 2 * 8 * 5e4 * (4 / 8e9 / 3 - 2 * 4 / 80e9)
    assert moving(8e9) - moving(None) == pytest.approx(beyond) and beyond == pytest.approx(53.3e-6, rel=1e-3)
    assert moving(8e9, tp=2) - moving(None, tp=2) == pytest.approx(beyond), "either tensor rank picks all rows"
    assert moving(1e12) == moving(None)
    assert moving(8e9, kind="cuda") == moving(None, kind="cuda"), "there the probe has timed how kernels start"


@pytest.mark.parametrize(("axis", "layout"), [("tp", Layout(dp_shard=2, tp=2)), ("ep", Layout(dp_shard=4, ep=4))])
def test_tokens_that_do_not_come_are_not_sent(axis: str, layout: Layout) -> None:
    """Of batches of a budget of tokens: computing was priced by those that come, and sending by full rows."""

    def sent(profile: ModelProfile) -> float:
        sheet = PricedTask(profile, cluster(4), 64, 1).sheet(plan(layout))
        return sum(float(each.buffer_bytes[0]) for each in collectives(sheet) if each.axis == axis)

    half = dataclasses.replace(mixture(), fills=(Fill(micro_batch=2, tokens=0.5, pairs=0.25, passes=1.0),))
    assert 0 < sent(half) == pytest.approx(sent(mixture()) / 2)


def test_weights_are_gathered_in_every_pass_that_comes() -> None:
    """Of batches of a budget of tokens: twice as many passes as planned gather and reduce twice as much of ZeRO-3."""

    def moved(profile: ModelProfile) -> float:
        sheet = PricedTask(profile, cluster(4), 64, 1).sheet(plan(Layout(dp_shard=4), zero=3))
        return sum(float(each.buffer_bytes[0]) for each in collectives(sheet) if each.axis == "fsdp")

    twice = dataclasses.replace(MODEL, fills=(Fill(micro_batch=2, tokens=1.0, pairs=1.0, passes=2.0),))
    assert 0 < moved(twice) == pytest.approx(2 * moved(MODEL))
