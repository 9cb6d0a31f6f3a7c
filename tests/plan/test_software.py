"""What other programs do differently, by hand on round numbers; and the pipeline against its own events."""

from __future__ import annotations

import dataclasses

import pytest
from plan_examples import block, cluster, opened, plan, profile

from paceline.plan.cost.inputs import REPLICATED_MOVES, Context
from paceline.plan.cost.recompute import WHOLE_INPUTS
from paceline.plan.cost.software import MEGATRON, PACELINE, Software
from paceline.plan.cost.total import memory_of, price
from paceline.plan.layout import Layout
from paceline.plan.plan import Plan

MODEL = opened(profile(4))


def context(software: Software, devices: int = 4, kind: str = "cpu") -> Context:
    return Context(MODEL, cluster(devices, kind), 64, 1, software=software)


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
    found = {t.name: t.value for t in price(Context(model, cluster(1), 64, 1, software=MEGATRON), chosen).time}
    assert found["recompute"] == pytest.approx(found["attention"] / 3.5)


def test_unfused_attention_takes_whole_scores_and_three_passes() -> None:
    layer = block("layers.0", fused_attention=False, heads=4)
    model = dataclasses.replace(MODEL, blocks=(layer,))
    found = {t.name: t.value for t in price(Context(model, cluster(1), 64, 1), plan(Layout(), 8)).time}
    assert found["attention"] == pytest.approx(64 * 3 * 1e8 / 5e10)


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
    context = Context(model, where, 64, 1)
    found = {t.name: t.value for t in price(context, chosen).time}
    inner = sum(found[name] for name in ("products, forward", "products, backward", "attention",
                                         "memory-bound operators", "pipeline bubble"))  # fmt: skip
    one = context.sheet(plan(Layout(), 4)).busy_seconds[0] / 8 * 4  # of one layer, one micro-batch
    forward = [size * one / 3 for size in sizes]
    played = one_f_one_b(4, 16, forward, [2 * time for time in forward])
    assert inner == pytest.approx(played, rel=0.01)
