"""What a step communicates: ring collectives over the data axes of the mesh, and what of it computing hides.

A ring over n ranks moves (n - 1) / n of the buffer in n - 1 hops for an all-gather or a reduce-scatter, and twice that
for an all-reduce, which is optimal in bandwidth (Patarasu & Yuan 2009; Thakur, Rabenseifner & Gropp 2005).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.cluster.cluster import Cluster
from paceline.plan.cost.compute import state_bytes
from paceline.plan.cost.inputs import BYTES, Context, weakest
from paceline.plan.forecast import Term
from paceline.plan.plan import Plan

# What collectives reach of a published link, inside a node and over k nodes: LINK / (1 + log2 k). Read off measured
# bus bandwidths: 8 x A100 NVLink 230 of 300 GB/s (vTrain's nccl-tests); 8 x H100 nodes over EFA, 256 MB, 361, 160,
# 100, 85, 65, 33 GB/s over 2 to 64 nodes for all-reduce, 185 to 11 for all-gather (Ultra-Scale Playbook).
LINK_EFFICIENCY = 0.75
BUCKET_BYTES = 25 * 2**20  # gradients of plain copies are reduced in buckets of this size


@dataclass(frozen=True)
class Ring:
    """The ring that a group of `size` devices, `stride` ranks apart, forms: its bandwidth and latency."""

    size: int
    nodes: int
    bytes_per_second: dict[str, float]
    pass_latency_seconds: float  # of size - 1 hops
    source: str

    def seconds(self, collective: str, total_bytes: float, launches: float) -> float:
        """Return the seconds of `launches` collectives that together cover `total_bytes`."""
        if self.size == 1:
            return 0.0
        passes = 2 if collective == "all_reduce" else 1
        wire = passes * (self.size - 1) / self.size * total_bytes / self.bytes_per_second[collective]
        return wire + passes * launches * self.pass_latency_seconds


def ring(cluster: Cluster, size: int, stride: int) -> Ring:
    """Return the ring of a group. Groups `stride` apart run at once and share their nodes' adapters."""
    per_node = max(1, min(size, cluster.devices_per_node // stride))
    nodes = -(-size // per_node)
    near, far = cluster.links[0], cluster.links[-1]
    names = ("all_reduce", "all_gather", "reduce_scatter")
    inside = {
        name: near.collective_bytes_per_second.get(name)
        or near.bytes_per_second.value * (LINK_EFFICIENCY if near.bytes_per_second.source == "published" else 1.0)
        for name in names
    }
    near_latency = near.latency_seconds.value
    if nodes == 1:
        return Ring(size, 1, inside, (size - 1) * near_latency, near.bytes_per_second.source)
    # Every member brings its adapter's share; a chain through the node's members joins them.
    across = per_node * far.bytes_per_second.value * LINK_EFFICIENCY / (1 + math.log2(nodes))
    latency = (size - nodes) * near_latency + (nodes - 1) * far.latency_seconds.value
    source = weakest(far.bytes_per_second.source, near.bytes_per_second.source if per_node > 1 else "measured")
    return Ring(size, nodes, {name: min(inside[name], across) for name in names}, latency, source)


@dataclass(frozen=True)
class Traffic:
    """Seconds of communication in a step before any of it is hidden, and how it is computed."""

    gather_seconds: float
    gather_text: str
    reduce_seconds: float
    reduce_text: str
    source: str


def traffic(context: Context, plan: Plan) -> Traffic:
    """Return what a step communicates. The classes follow the table in run/parallel/data.py."""
    layout = plan.layout
    shard = ring(context.cluster, layout.dp_shard, 1)
    copies = ring(context.cluster, layout.dp_replicate, layout.dp_shard)
    parameters, units = context.parameters, context.units
    gather_seconds, gather_text, reduce_parts = 0.0, "", []
    rounds = plan.accumulation
    if layout.dp_shard > 1:
        compute_bytes, blocks = BYTES[plan.precision], parameters - context.root_parameters
        if plan.zero == 3:  # the root unit stays gathered from forward to backward
            gathered, launches = rounds * (2 * blocks + context.root_parameters), rounds * (2 * units - 1)
            gather_text = f"{rounds} micro-batches x all-gather in forward and backward"
        else:
            gathered, launches = parameters, units
            gather_text = "one all-gather per step"
        gather_seconds = shard.seconds("all_gather", gathered * compute_bytes, launches)
        gather_seconds += 2 * gathered * compute_bytes / context.rates(plan.precision).memory_rate
        gather_text += f" over {shard.size} ({compute_bytes} B/parameter), and a copy out of the buffer"
        times = rounds if plan.zero >= 2 else 1
        size = state_bytes(plan)
        reduce_seconds = shard.seconds("reduce_scatter", times * parameters * size, times * units)
        reduce_seconds += 2 * times * parameters * size / context.rates(plan.precision).memory_rate
        reduce_parts.append(f"{times} x reduce-scatter over {shard.size} ({size} B/parameter)")
    else:
        reduce_seconds = 0.0
    if layout.dp_replicate > 1:
        total = parameters * state_bytes(plan) / layout.dp_shard
        launches = units if layout.dp_shard > 1 else math.ceil(total / BUCKET_BYTES)
        reduce_seconds += copies.seconds("all_reduce", total, launches)
        reduce_parts.append(
            f"one all-reduce of the {'shard' if layout.dp_shard > 1 else 'gradients'} over {copies.size}"
        )
    moved = context.gathered_share(plan)
    return Traffic(
        moved * gather_seconds,
        gather_text,
        moved * reduce_seconds,
        " + ".join(reduce_parts),
        weakest(*(group.source for group in (shard, copies) if group.size > 1), "measured"),
    )


def network_terms(context: Context, plan: Plan, forward_backward_seconds: float) -> list[Term]:
    """Return what communication adds to a step.

    Processes on CPUs share their cores with gloo's threads, so nothing is hidden there. On accelerators gathering runs
    beside the whole of forward and backward, reduction beside the backward pass (two thirds) of the micro-batches that
    communicate; the first gather and the last reduction have nothing to hide behind.
    """
    if plan.layout.devices == 1:
        return []
    moved = traffic(context, plan)
    gather, reduce, how = moved.gather_seconds, moved.reduce_seconds, "not overlapped (CPU)"
    if context.cluster.device.kind != "cpu":
        ends = 1 / max(1, context.units)
        reduces_always = plan.layout.dp_shard > 1 and plan.zero >= 2
        window = 2 / 3 * forward_backward_seconds / (1 if reduces_always else plan.accumulation)
        gather_window = forward_backward_seconds / (1 if plan.zero == 3 else plan.accumulation)
        # Both share the links: the backward pass hides reduction first, and gathering takes what is left.
        exposed_reduce = reduce * ends + max(0.0, reduce * (1 - ends) - window)
        left = max(0.0, gather_window - (reduce - exposed_reduce))
        exposed_gather = gather * ends + max(0.0, gather * (1 - ends) - left)
        how = f"of {gather + reduce:.3g} s, the rest overlaps computing (assumed)"
        gather, reduce = exposed_gather, exposed_reduce
    terms = []
    if moved.gather_text:
        terms.append(Term("parameter gathering", gather, f"{moved.gather_text}; {how}", moved.source))
    if moved.reduce_text:
        terms.append(Term("gradient reduction", reduce, f"{moved.reduce_text}; {how}", moved.source))
    return terms
