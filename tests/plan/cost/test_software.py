"""What other programs do differently, by hand on round numbers; and the pipeline against its own events."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from plan_examples import block, cluster, measured, opened, plan, profile

from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.collectives.within_passes import _copies_share
from paceline.plan.cost.components import total
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.memory.activations import activations
from paceline.plan.cost.memory.held_at_peak import HeldAtPeak
from paceline.plan.cost.memory.peak_memory import memory_components
from paceline.plan.cost.memory.recompute import WHOLE_INPUTS
from paceline.plan.cost.memory.usable import HEADROOM, needed
from paceline.plan.cost.pricing import memory_of, needed_bytes, price
from paceline.plan.cost.programs.known import MEGATRON
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.software import PACELINE, Software
from paceline.plan.cost.time.block_seconds import REPLICATED_MOVES
from paceline.spec.cluster import Cluster, ClusterSpec, Link
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan

MODEL = opened(profile(4))
NEAR, FAR = (Link(level, measured(1e-6), measured(1e9)) for level in ("node", "network"))


def published_cluster(name: str, devices: int) -> Cluster:
    return resolve_cluster(ClusterSpec(device=name, devices=devices))[0]


def context(software: Software, devices: int = 4, kind: str = "cpu") -> PricedTask:
    return PricedTask(MODEL, cluster(devices, kind), 64, 1, software=software)


def held(software: Software, chosen: Plan) -> dict[str, float]:
    return {term.name: term.value for term in memory_of(context(software, chosen.layout.devices), chosen)}


def seconds(software: Software, chosen: Plan, kind: str = "cpu") -> dict[str, float]:
    return {t.name: t.value for t in price(context(software, chosen.layout.devices, kind), chosen).time}


def test_master_weights_are_eighteen_bytes_a_parameter_of_which_twelve_are_sharded() -> None:
    whole = held(MEGATRON, plan(Layout(), 2, precision="bf16"))
    assert [whole[name] / 5e6 for name in ("weights", "gradients", "optimizer state")] == [2, 4, 12]
    sharded = held(MEGATRON, plan(Layout(dp_shard=4), 2, precision="bf16", zero=1))
    assert [sharded[name] / 5e6 for name in ("weights", "gradients", "optimizer state")] == [2, 4, 3]
    assert sharded["weight copies"] == 0
    third = held(MEGATRON, plan(Layout(dp_shard=4), 2, precision="bf16", zero=3))
    assert third["weights"] == 2 * 5e6 / 4 and third["weight copies"] == 2 * 3e6


def test_a_buffer_of_gradients_is_whole_where_one_micro_batch_fills_it_too() -> None:
    for accumulation, alone in ((1, 4 / 4), (2, 4 + 4 / 4)):
        chosen = plan(Layout(dp_shard=4), 16 // accumulation, precision="bf16", zero=1)
        assert held(MEGATRON, chosen)["gradients"] / 5e6 == 4, "one contiguous buffer, of ZeRO-1 too"
        assert held(PACELINE, chosen)["gradients"] / 5e6 == alone, "scattered as they come"


def test_gradients_that_wait_for_the_last_micro_batch_are_whole_and_reduced_once() -> None:
    late = dataclasses.replace(PACELINE, sums_whole=True)
    chosen = plan(Layout(dp_shard=4), 2)  # ZeRO-3 of eight micro-batches, in fp32
    assert held(PACELINE, chosen)["gradients"] == 4 * 5e6 / 4
    assert held(late, chosen)["gradients"] == 4 * (5e6 + 5e6 / 4), "all of them, and what the last one leaves"
    each, once = (seconds(software, chosen)["gradient reduction"] for software in (PACELINE, late))
    assert each == pytest.approx(8 * once)
    gathers = (seconds(software, chosen)["parameter gathering"] for software in (PACELINE, late))
    assert len(set(gathers)) == 1, "weights are gathered for every micro-batch all the same"


def test_without_sequence_parallel_every_tensor_rank_moves_and_keeps_the_stream() -> None:
    alone = dataclasses.replace(PACELINE, sequence_parallel=False)
    chosen = plan(Layout(tp=4), 8)
    split, whole = (seconds(software, chosen)["memory-bound operators"] for software in (PACELINE, alone))
    extra = 64 * 4 * REPLICATED_MOVES * 5e4 * (1 - 1 / 4) * 4 * 3 / 1e10  # four layers, three passes
    assert whole - split == pytest.approx(extra)
    kept = held(alone, plan(Layout(tp=4), 1))["activations"] - held(PACELINE, plan(Layout(tp=4), 1))["activations"]
    assert kept == pytest.approx(4 * 4 * (WHOLE_INPUTS - 2) * 5e4 * (1 - 1 / 4))


def test_gathered_inputs_are_kept_or_gathered_again() -> None:
    again = dataclasses.replace(PACELINE, keeps_gathered=False)
    kept, gathered = (held(software, plan(Layout(tp=4), 1))["activations"] for software in (PACELINE, again))
    assert kept - gathered == pytest.approx(4 * 4 * 2 * 5e4 * (1 - 1 / 4))


def test_sums_of_gradients_may_cost_nothing_and_nothing_may_overlap() -> None:
    chosen = plan(Layout(dp_replicate=4), 4)
    fused = dataclasses.replace(PACELINE, fuses_gradient_sums=True)
    assert seconds(PACELINE, chosen)["casts and gradient sums"] > 0 == seconds(fused, chosen)["casts and gradient sums"]
    apart = dataclasses.replace(PACELINE, overlaps=False)
    hidden, shown = (seconds(software, chosen, "cuda")["gradient reduction"] for software in (PACELINE, apart))
    assert shown == pytest.approx(5 * hidden), "of five units only the last has nothing to hide behind"


def test_selective_recompute_of_attention_alone() -> None:
    shapes = [dataclasses.replace(one, selective_elements=one.saved_elements) for one in MODEL.blocks]
    model = dataclasses.replace(MODEL, blocks=tuple(shapes))
    chosen = plan(Layout(), 8, recompute="selective")
    found = {t.name: t.value for t in price(PricedTask(model, cluster(1), 64, 1, software=MEGATRON), chosen).time}
    assert found["recompute"] == pytest.approx(found["attention"] / 3.5)


def test_unfused_attention_takes_whole_scores_and_three_passes() -> None:
    layer = block("layers.0", fused_attention=False, heads=4)
    model = dataclasses.replace(MODEL, blocks=(layer,))
    found = {t.name: t.value for t in price(PricedTask(model, cluster(1), 64, 1), plan(Layout(), 8)).time}
    assert found["attention"] == pytest.approx(64 * 3 * 1e8 / 5e10)


def test_tensor_collectives_in_pieces_show_one_piece() -> None:
    pieces = dataclasses.replace(PACELINE, hides_tensor=True)
    chosen = plan(Layout(tp=4), 8)
    whole, shown = (seconds(software, chosen)["tensor communication"] for software in (PACELINE, pieces))
    assert shown == pytest.approx(whole / 4), "this profile has no head, whose loss is reduced in one piece"


def test_interleaved_sends_are_hidden_but_for_filling_and_draining() -> None:
    hidden = dataclasses.replace(PACELINE, hides_sends=True)
    interleaved = plan(Layout(pp=2), 8, schedule="interleaved", virtual_stages=2, stages=(1, 1, 1, 1))
    shown, left = (seconds(software, interleaved)["pipeline sends"] for software in (PACELINE, hidden))
    assert left / shown == pytest.approx(2 * 1 / (2 * (8 * 2 + 1))), "of 2 x (8 micro-batches x 2 chunks + 1)"
    plain = plan(Layout(pp=2), 8, stages=(2, 2))
    assert seconds(hidden, plain)["pipeline sends"] == seconds(PACELINE, plain)["pipeline sends"]


@pytest.mark.parametrize(("nodes", "chosen"), [(2, 8), (8, 8), (4, 2), (1, 8)])
def test_copies_of_a_token_are_as_many_as_the_nodes_that_its_experts_lie_on(nodes: int, chosen: int) -> None:
    routed = block("layers.0", "experts", routed_elements=chosen * 5e4, experts=64, expert_parameters=900_000.0)
    model = opened(dataclasses.replace(MODEL, blocks=(routed,)))
    sheet = PricedTask(model, cluster(4), 64, 1).sheet(plan(Layout(dp_shard=4, ep=4), 1))
    share = float(_copies_share(sheet, np.array([nodes]))[0])
    drawn = np.random.default_rng(0).integers(0, nodes, size=(20_000, chosen))
    counted = np.mean([len(set(row)) for row in drawn.tolist()]) / chosen
    assert share == pytest.approx(counted if nodes > 1 else 1.0, rel=0.02)


def test_unfused_attention_on_heads_that_are_not_aligned_leaves_the_matrix_units() -> None:
    def attention(width: int) -> float:
        layer = block("layers.0", fused_attention=False, heads=4, attention_flops=4.0 * 256**2 * 4 * width)
        model = dataclasses.replace(MODEL, blocks=(layer,))
        device = published_cluster("a100-80", 1)
        chosen = plan(Layout(), 8, precision="bf16")
        return {t.name: t.value for t in price(PricedTask(model, device, 64, 1), chosen).time}["attention"] / width

    assert 0.9 < attention(136) / attention(128) < 1.0, "wider heads take less to move"
    assert attention(132) > 4 * attention(128), "264 bytes a row: no multiple of 16"


def test_a_program_of_separate_kernels_launches_more_of_them_and_writes_the_loss_alike() -> None:
    head = block("head", "head", recomputable=False, matmul_flops=0.0, attention_flops=0.0, moved_elements=4e6)
    model = dataclasses.replace(MODEL, blocks=(*MODEL.blocks, head))
    apart = dataclasses.replace(PACELINE, fused=False)
    moves = {}
    for software in (PACELINE, apart):
        priced = price(PricedTask(model, cluster(1), 64, 1, software=software), plan(Layout(), 8))
        moves[software] = next(term.value for term in priced.time if term.name == "memory-bound operators")
    constants = read_constants()
    of_layers, of_others = 4 * 1e6, 1e6 + 4e6  # four layers; the embedding and the head
    wanted = (of_layers * constants.unfused_moves + of_others) / (of_layers + of_others)
    assert moves[apart] / moves[PACELINE] == pytest.approx(wanted)
    launches = [seconds(software, plan(Layout(), 8))["operator launches"] for software in (PACELINE, apart)]
    assert launches[1] / launches[0] == pytest.approx((4 * constants.unfused_launches + 1) / 5)


def test_tensor_ranks_wait_for_each_other_where_a_pipeline_leaves_the_node() -> None:
    waits = dataclasses.replace(PACELINE, pipeline_waits=True)

    slow = dataclasses.replace(read_constants(), pipeline_wait_seconds=1.0)

    def launches(software: Software, per_node: int) -> float:
        where = dataclasses.replace(cluster(8, "cuda"), devices_per_node=per_node, links=(NEAR, FAR))
        chosen = plan(Layout(tp=4, pp=2), 8, stages=(2, 2))
        priced = price(PricedTask(MODEL, where, 64, 1, software=software, constants=slow), chosen)
        return next(term.value for term in priced.time if term.name == "operator launches")

    assert launches(waits, 8) == launches(PACELINE, 8)
    more = 8 * 2 * 4 * (2 * 4 + 1)  # micro-batches x passes x ranks x collectives of two layers and the embedding
    assert launches(waits, 4) == pytest.approx(more, rel=0.01), "the device's own work is small beside it"


def test_an_allocator_that_would_outgrow_the_device_is_emptied_every_micro_batch() -> None:
    flushes = dataclasses.replace(PACELINE, flushes=True)
    chosen = plan(Layout(tp=4), 8)
    sheet = PricedTask(MODEL, cluster(4, "cuda"), 64, 1, software=flushes).sheet(chosen)
    memory = memory_components(sheet)
    peak, least = (float(values[0]) for values in (total(memory), needed(sheet, memory)))
    assert least < peak, "what the allocator keeps it can give back"
    found = {}
    for room in (peak * 1.01, peak * 0.99):
        where = cluster(4, "cuda", memory_bytes=room / (1 - HEADROOM))
        priced = price(PricedTask(MODEL, where, 64, 1, software=flushes), chosen)
        found[room > peak] = {term.name: term.value for term in priced.time}.get("allocator flushes", 0.0)
    assert found == {True: 0.0, False: 8 * read_constants().flush_seconds}


def test_what_must_be_there_is_all_on_a_cpu_and_without_the_cache_on_an_accelerator() -> None:
    for kind in ("cpu", "cuda"):
        context = PricedTask(MODEL, cluster(4, kind), 64, 1)
        columns = context.sheet(plan(Layout(tp=2, dp_shard=2), 8)).columns
        terms = {term.name: term.value for term in memory_of(context, columns.plan(0))}
        left_out = terms["allocator buffers"] if kind == "cuda" else 0.0
        assert float(needed_bytes(context, columns)[0]) == pytest.approx(sum(terms.values()) - left_out)


def test_the_head_of_an_interleaved_pipeline_keeps_one_micro_batch() -> None:
    head = block("head", "head", recomputable=False, saved_elements=7e5, saved_fp32_elements=0.0)
    model = dataclasses.replace(MODEL, blocks=(*MODEL.blocks, head))
    fields = {"schedule": "interleaved", "virtual_stages": 2, "stages": (1, 1, 1, 1)}
    kept = {}
    for layers in (MODEL, model):
        sheet = PricedTask(layers, cluster(2), 64, 1).sheet(plan(Layout(pp=2), 4, **fields))
        kept[layers is model] = activations(HeldAtPeak(sheet))[0].values[-1]
    assert kept[True] - kept[False] == pytest.approx(4 * 4 * 7e5), "a micro-batch of four samples in fp32"


def one_f_one_b(stages: int, micro_batches: int, forward: list[float], backward: list[float]) -> float:
    """Return when the last rank ends: every rank's order played event by event, another way than the formula's."""
    orders = []
    for rank in range(stages):
        ahead = min(micro_batches, stages - rank)
        order = [("F", i) for i in range(ahead)]
        for i in range(micro_batches):
            order.append(("B", i))
            if ahead + i < micro_batches:
                order.append(("F", ahead + i))
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    clock, place = [0.0] * stages, [0] * stages
    while any(place[rank] < len(orders[rank]) for rank in range(stages)):
        for rank in range(stages):
            while place[rank] < len(orders[rank]):
                kind, i = orders[rank][place[rank]]
                if kind == "B":
                    needs = ("F", rank, i) if rank == stages - 1 else ("B", rank + 1, i)
                else:
                    needs = None if rank == 0 else ("F", rank - 1, i)
                if needs is not None and needs not in done:
                    break
                begin = max(clock[rank], done.get(needs, 0.0) if needs else 0.0)
                clock[rank] = begin + (forward if kind == "F" else backward)[rank]
                done[kind, rank, i] = clock[rank]
                place[rank] += 1
    return max(clock)


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1, 2, 2, 3), (3, 2, 2, 1), (1, 3, 2, 2)])
def test_fill_and_drain_of_uneven_stages_are_those_of_the_schedule(sizes: tuple[int, ...]) -> None:
    layers = tuple(block(f"layers.{i}", operators=0) for i in range(8))
    where = cluster(4)
    model = dataclasses.replace(MODEL, blocks=layers)
    chosen = plan(Layout(pp=4), 4, stages=sizes)
    context = PricedTask(model, where, 64, 1)
    found = {t.name: t.value for t in price(context, chosen).time}
    inner = sum(found[name] for name in ("products, forward", "products, backward", "attention",
                                         "memory-bound operators", "pipeline bubble"))  # fmt: skip
    one = context.sheet(plan(Layout(), 4)).busy_seconds[0] / 8 * 4  # of one layer, one micro-batch
    forward = [size * one / 3 for size in sizes]
    played = one_f_one_b(4, 16, forward, [2 * time for time in forward])
    assert inner == pytest.approx(played, rel=0.01)


def test_inputs_that_are_not_kept_whole_are_gathered_once_more() -> None:
    again = dataclasses.replace(PACELINE, keeps_gathered=False)
    hidden = dataclasses.replace(again, hides_second_gather=True)
    alone = dataclasses.replace(again, sequence_parallel=False)
    chosen = plan(Layout(tp=4), 8)
    kept, shown = (seconds(software, chosen)["tensor communication"] for software in (PACELINE, again))
    # Two of four layers' inputs each: of eight collectives a layer in both passes, two more.
    assert shown / kept == pytest.approx(1 + 2 / 8)
    assert seconds(hidden, chosen)["tensor communication"] == shown, "on a CPU nothing runs beside another"
    assert seconds(alone, chosen)["tensor communication"] == kept, "inputs are whole already"
    on_device = [seconds(software, chosen, "cuda")["tensor communication"] for software in (PACELINE, again, hidden)]
    gathers = on_device[1] - on_device[0]
    room = read_constants().overlap * 64 * 4 * 2e9 / 4 / 1e11  # products of one pass
    assert on_device[2] == pytest.approx(on_device[1] - min(gathers, room))
    # Half of the eight collectives are reduce-scatters, half of those sum up inputs' gradients: as much as the gathers.
    both = dataclasses.replace(hidden, hides_input_sums=True)
    assert seconds(both, chosen, "cuda")["tensor communication"] == pytest.approx(on_device[2] - min(gathers, room))
    assert seconds(both, chosen)["tensor communication"] == shown


def test_gradients_that_autograd_adds_up_are_read_and_written_in_their_own_width() -> None:
    chosen = plan(Layout(tp=4), 8)  # eight micro-batches
    plain = dataclasses.replace(PACELINE, master_weights=True, fuses_gradient_sums=False)
    wide, narrow = (seconds(dataclasses.replace(plain, gradient_bytes=size), chosen)["casts and gradient sums"]
                    for size in (4, 2))  # fmt: skip
    assert wide == pytest.approx(8 * MODEL.parameters / 4 * 3 * 4 / 1e10), "two read, one written"
    assert narrow == pytest.approx(wide / 2)


def test_ranks_that_broadcast_what_they_updated_wait_for_as_many_rings_as_there_are_ranks_or_tensors() -> None:
    alone = dataclasses.replace(PACELINE, overlaps=False, bucket_parameters=1e9, master_weights=True)
    each = dataclasses.replace(alone, broadcasts_shards=True)
    for ranks, calls in ((4, 4), (64, 17)):  # an embedding, and four layers of 1e6 parameters in matrices of 512 x 512
        chosen = plan(Layout(dp_shard=ranks), 1, zero=1)
        gathered, sent = (seconds(software, chosen)["parameter gathering"] for software in (alone, each))
        assert sent - gathered == pytest.approx((calls - 1) * (ranks - 1) * 1e-4), "a hop takes 1e-4 s"
