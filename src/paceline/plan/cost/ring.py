"""What a collective over a group of devices takes, on the links that the group crosses.

A ring over n ranks moves (n - 1) / n of the buffer in n - 1 hops for an all-gather or a reduce-scatter, and twice that
for an all-reduce, which is optimal in bandwidth (Patarasu & Yuan 2009; Thakur, Rabenseifner & Gropp 2005). An
all-to-all sends 1 / n of every member's buffer to each other member, directly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.cluster.cluster import Cluster
from paceline.plan.cost.rates import weakest

# What collectives reach of a published link, inside a node and over k nodes: LINK / (1 + log2 k). Read off measured
# bus bandwidths: 8 x A100 NVLink 230 of 300 GB/s (vTrain's nccl-tests); 8 x H100 nodes over EFA, 256 MB, 361, 160,
# 100, 85, 65, 33 GB/s over 2 to 64 nodes for all-reduce, 185 to 11 for all-gather (Ultra-Scale Playbook).
LINK_EFFICIENCY = 0.75


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
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
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
    rates = {name: min(inside[name], across) for name in names}
    # Members of other nodes are reached through one's own adapter alone, the node's members beside that.
    leaving = (size - per_node) / (far.bytes_per_second.value * LINK_EFFICIENCY)
    rates["all_to_all"] = (size - 1) / max(leaving, (per_node - 1) / inside["all_to_all"])
    return Ring(size, nodes, rates, latency, source)


def hop(cluster: Cluster, size: int, stride: int) -> tuple[float, float, str]:
    """Return (bytes per second, latency, source) of a send between neighbours of a group, on its slowest pair."""
    link = cluster.links[-1 if size * stride > cluster.devices_per_node else 0]
    share = LINK_EFFICIENCY if link.bytes_per_second.source == "published" else 1.0
    source = weakest(link.bytes_per_second.source, link.latency_seconds.source)
    return link.bytes_per_second.value * share, link.latency_seconds.value, source
