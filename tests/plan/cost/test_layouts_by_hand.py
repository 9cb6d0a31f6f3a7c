"""Three layouts of published models on H100, each term worked out on paper from the model's own numbers.

No figure here comes from a profile: parameters, FLOPs, bytes and hops are counted from the published shapes by the
papers' formulas, links by the data sheet's rates and the fitted shares of them.
"""

from __future__ import annotations

import dataclasses

import pytest
from plan_examples import axis_terms, bubble_seconds, compute_terms, memory_terms

from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.network import data_seconds, network_components
from paceline.spec.cluster import ClusterSpec
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec
from paceline.task.models.sizes import resolve_decoder
from paceline.task.profile.decoder import profile_decoder
from paceline.task.profile.moe import profile_moe

C = read_constants()
NVLINK, ADAPTER = 450e9 * C.node_link_share, 50e9 * C.network_link_share  # of a DGX H100, one direction
NEAR, FAR, START = C.node_hop_seconds, C.network_hop_seconds, C.collective_seconds
HBM = 3350e9 * C.memory_share


def context_of(name: str, sequence: int, devices: int, batch: int) -> PricedTask:
    config = resolve_decoder(ModelSpec(name), 0, sequence)
    shape = profile_moe(config, sequence) if "mixtral" in name else profile_decoder(config, sequence)
    return PricedTask(shape, resolve_cluster(ClusterSpec(device="h100-sxm", devices=devices))[0], batch, 1)


def plan_of(layout: Layout, micro_batch: int, accumulation: int, **changes: object) -> Plan:
    batch = layout.data_degree * micro_batch * accumulation
    base = Plan(layout, 3, micro_batch, accumulation, batch, "none", "bf16")
    return dataclasses.replace(base, **changes)


def by_name(terms: object) -> dict[str, float]:
    return {term.name: term.value for term in terms}


def test_experts_over_four_and_tensors_over_two() -> None:
    """Mixtral 8x7B, 32 H100: ep=4 tp=2, so that a node's 8 devices hold a layer's experts and tokens stay inside.

    All-to-alls: a token's row goes to each of its experts and back, forward and backward (Lepikhin et al. 2020, section
    3.2). Tensor ranks gather before and scatter after attention and after the feed-forward, in each pass (Korthikanti
    et al. 2022, section 4.2.2).
    """
    layers, hidden, ffn, keys, vocab, sequence, top_k = 32, 4096, 14336, 1024, 32000, 4096, 2
    layout, micro, rounds = Layout(dp_shard=16, ep=4, tp=2), 2, 2
    context, chosen = context_of("mixtral-8x7b", sequence, 32, 64), plan_of(layout, micro, rounds)
    attention, expert = 2 * hidden**2 + 2 * hidden * keys, 3 * hidden * ffn
    beside = 2 * vocab * hidden + hidden + layers * (attention + 8 * hidden + 2 * hidden)
    assert context.profile.parameters == beside + layers * 8 * expert == 46_702_792_704, "as Mistral publishes it"
    got, samples = by_name(axis_terms(context, chosen)), micro * rounds
    row = samples * sequence * top_k * hidden * 2  # bytes of a device's routed rows, in bf16
    # Of four devices that are reached at once one hears of itself; messages of one all-to-all travel side by side.
    calls = 4 * layers * rounds
    latency = START + 3 * NEAR
    assert got["expert all-to-all"] == pytest.approx(4 * layers * (3 / 4) * row / NVLINK + calls * latency)
    stream = samples * sequence * hidden * 2
    # Forward: the embedding's sum is scattered, four in each layer, and the head gathers; as many backward.
    count = 2 * (1 + 4 * layers + 1)
    half = stream / 2 / NVLINK
    loss = 3 * (2 * (1 / 2) * 4 * samples * sequence / NVLINK + rounds * (START + 2 * NEAR))
    assert got["tensor communication"] == pytest.approx(count * half + rounds * count * (START + NEAR) + loss)
    # Weights rest in fp32, over tp, and over the 16 data ranks: those of experts over 4 x 4 of them (ZeRO-3).
    held = by_name(memory_terms(context, chosen))
    for name, values in (("weights", 1), ("gradients", 1), ("optimizer state", 2)):
        assert held[name] == pytest.approx(4 * values * context.profile.parameters / 32), name
    # Gathered in bf16: the root and two layers, each with a quarter of its experts.
    root, layer = 2 * vocab * hidden + hidden, attention + 8 * hidden + 2 * hidden + 8 * expert / 4
    assert held["weight copies"] == pytest.approx(2 * (root + 2 * layer) / 2)
    # Dense weights are gathered over 16, experts over the four devices with the same ones: both over four nodes.
    moved = data_seconds(context.sheet(chosen))
    dense, experts = beside / 2, layers * 8 * expert / 2 / 4
    once = 2 * (2 * rounds * dense - rounds * root / 2), 2 * 2 * rounds * experts
    # 8 ranks of a group of 16 over 4 nodes stand 2 apart: 4 in a node, so four adapters serve a node's chain.
    wire = 15 / 16 * once[0] / (4 * ADAPTER) + 3 / 4 * once[1] / ADAPTER
    hops = (2 * (layers + 1) - 1) * rounds * (START + 11 * NEAR + 4 * FAR)
    hops += 2 * rounds * layers * (START + 3 * FAR)
    assert moved.gather_seconds[0] == pytest.approx(wire + hops + 2 * sum(once) / HBM)


def test_shards_over_eight_nodes_with_accumulation() -> None:
    """Llama 3.1 8B, ZeRO-3 over 64 H100, four micro-batches: what FSDP2 gathers twice and reduces once in each.

    An all-gather over n ranks leaves N bytes on each and brings it (n - 1) / n of them (Patarasu & Yuan 2009); of 16
    bytes of a parameter each device keeps 1/64 (Rajbhandari et al. 2020, section 5).
    """
    layers, hidden, ffn, keys, vocab, sequence = 32, 4096, 14336, 1024, 128_256, 8192
    layout, rounds = Layout(dp_shard=64), 4
    context, chosen = context_of("llama-8b", sequence, 64, 256), plan_of(layout, 1, rounds)
    layer = 2 * hidden**2 + 2 * hidden * keys + 3 * hidden * ffn + 2 * hidden
    root = 2 * vocab * hidden + hidden
    assert context.profile.parameters == root + layers * layer == 8_030_261_248, "as Meta publishes it"
    held = by_name(memory_terms(context, chosen))
    state = held["weights"] + held["gradients"] + held["optimizer state"]
    assert state == pytest.approx(16 * 8_030_261_248 / 64)
    assert held["weight copies"] == 2 * (root + 2 * layer)
    moved = data_seconds(context.sheet(chosen))
    gathered = rounds * (2 * layers * layer + root) * 2  # the root stays gathered from forward to backward
    reduced = rounds * 8_030_261_248 * 4  # in fp32
    node = 8 * ADAPTER  # eight adapters of a node, which is less than its fabric
    assert node < NVLINK
    hops = START + 55 * NEAR + 8 * FAR  # 63 hops, of which 8 leave a node
    units = layers + 1
    wire, copied = 63 / 64 * gathered / node, 2 * gathered / HBM
    assert moved.gather_seconds[0] == pytest.approx(wire + rounds * (2 * units - 1) * hops + copied)
    wire, copied = 63 / 64 * reduced / node, 2 * reduced / HBM
    assert moved.reduce_seconds[0] == pytest.approx(wire + rounds * units * hops + copied)
    # Beside 10 s of computing nothing shows but the first unit's gather and the last one's reduction.
    found = {each.name: each.values[0] for each in network_components(context.sheet(chosen), 10.0)}
    assert found["parameter gathering"] == pytest.approx(moved.gather_seconds[0] / units)
    assert found["gradient reduction"] == pytest.approx(moved.reduce_seconds[0] / units)
    # 6 FLOPs a parameter and token, and 12 s h a token of attention, its causal half (Chowdhery et al. 2022, app. B).
    tokens = sequence * rounds
    dense = 2 * tokens * (8_030_261_248 - vocab * hidden - hidden * (2 * layers + 1))
    rate = sum(by_name(compute_terms(context, chosen))[f"products, {way}"] for way in ("forward", "backward"))
    assert 0.45 < 3 * dense / rate / 989.4e12 < 0.75
    attention = by_name(compute_terms(context, chosen))["attention"]
    flops = 3.5 * 2 * sequence * tokens * hidden * layers  # forward 2 s h a token and layer; backward 2.5 times that
    assert 0.3 < flops / attention / 989.4e12 < 0.6


def test_eight_interleaved_stages() -> None:
    """Llama 3.1 70B, tp=8 pp=8 with two chunks a rank, 32 micro-batches (Narayanan et al. 2021, section 2.2).

    The bubble is (p - 1) / (m v) of a rank's time, and the first rank keeps p (1 + (p - 1) / (p v)) micro-batches
    (Korthikanti et al. 2022, section 4.2.3).
    """
    hidden, ffn, keys, vocab, sequence = 8192, 28672, 1024, 128_256, 4096
    ranks, chunks, micros = 8, 2, 32
    layout = Layout(tp=8, pp=ranks)
    context = context_of("llama-70b", sequence, 64, micros)
    chosen = plan_of(layout, 1, micros, schedule="interleaved", virtual_stages=chunks, stages=(5,) * 16)
    # Every rank has two chunks of five layers; the last one has the head beside them, 1.2 layers' work.
    layer = 2 * (2 * hidden**2 + 2 * hidden * keys + 3 * hidden * ffn)
    head = 2 * vocab * hidden / layer
    others = (ranks - 1) * 10 / (10 + head)
    own = by_name([*compute_terms(context, chosen), *axis_terms(context, chosen)])
    own.pop("pipeline sends")
    share = bubble_seconds(context, chosen) / sum(own.values())
    assert share == pytest.approx(others / (micros * chunks), rel=0.03)
    # Sends: each micro-batch leaves every chunk, and its gradient comes back; filling and draining take p - 1 each.
    stream = sequence * hidden * 2 / 8  # of one micro-batch, over the sequence's eight parts
    sends = 2 * micros * chunks + 2 * (ranks - 1)
    found = by_name(axis_terms(context, chosen))["pipeline sends"]
    assert found == pytest.approx(sends * (stream / ADAPTER + FAR)), "stages stand eight devices apart: a node each"
    # The fullest rank is the first: 8 (1 + 7/16) = 11.5 micro-batches of ten layers, and the embedding.
    layer_weights = layer / 2 + 2 * hidden
    held = by_name(memory_terms(context, chosen))
    state = (layer_weights * 10 + vocab * hidden) / 8
    assert held["weights"] == pytest.approx(4 * state) and held["optimizer state"] == pytest.approx(8 * state)
    # Kept of a layer: two inputs of norms; two gathered inputs of products, whole; attention's inputs and output;
    # gate, its activation, up and their product; in fp32 two scales of norms and a number a head.
    kept = sequence * (2 * 2 * hidden + 2 * (2 * hidden + 2 * hidden + 2 * keys + 4 * ffn) / 8 + 4 * (2 + 64) / 8)
    assert held["activations"] == pytest.approx(11.5 * 10 * kept, rel=1e-3)
