"""What a collective over a group of devices takes, on the links that the group crosses.

A ring over n ranks moves (n - 1) / n of the buffer in n - 1 hops for an all-gather or a reduce-scatter, and twice that
for an all-reduce, which is optimal in bandwidth (Patarasu & Yuan 2009; Thakur, Rabenseifner & Gropp 2005). An
all-to-all sends 1 / n of every member's buffer to each other member, directly. Groups are columns: one for each plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.plan.cost.columns import Floats, Ints
from paceline.plan.cost.constants import Constants
from paceline.plan.cost.rates import interpolate, weakest
from paceline.spec.cluster import SOURCES, Cluster, Link

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
RING_PASSES = {"all_reduce": 2}  # of the others one


def wire_share(collective: str, size: Ints | int) -> Floats:
    """Return the part of a buffer that a device of a group of `size` sends; of a "send", to one neighbour, all of it.

    Example: of an all-gather that leaves 8 kB on each of 4 devices, each sends 6 kB; of an all-reduce of 8 kB, 12 kB.
    """
    members = np.asarray(size)
    if collective == "send":
        return np.where(members > 1, 1.0, 0.0)
    share: Floats = RING_PASSES.get(collective, 1) * (members - 1) / members
    return share


@dataclass(frozen=True)
class Rings:
    """The rings that groups of `size` devices, `stride` ranks apart, form: their bandwidths and latencies."""

    size: Ints
    nodes: Ints
    bytes_per_second: dict[str, Floats]
    pass_latency_seconds: Floats  # of size - 1 hops
    tree_latency_seconds: Floats  # up or down a tree over nodes
    source: Ints  # places in SOURCES
    start_seconds: float = 0.0  # of any collective, before a byte moves
    is_measured: bool = False  # a measured latency is of a whole collective, whichever it is

    def seconds(self, collective: str, total_bytes: Floats, launches: Floats | Ints) -> Floats:
        """Return the seconds of `launches` collectives that together cover `total_bytes`; 0 in a group of one."""
        passes, latency = RING_PASSES.get(collective, 1), self.pass_latency_seconds
        if collective == "all_reduce":  # NCCL has had both since 2.4, and takes the faster one
            latency = np.minimum(latency, self.tree_latency_seconds)
        elif collective == "all_to_all":  # one message to everybody, all under way at once
            latency = self.tree_latency_seconds
        waits = 1 if self.is_measured else passes
        wire = wire_share(collective, self.size) * total_bytes / self.bytes_per_second[collective]
        return np.where(self.size > 1, wire + launches * (waits * latency + self.start_seconds), 0.0)

    def source_of(self, index: int) -> str:
        """Return how the links of one plan's group are known."""
        return SOURCES[self.source[index]]


def ring(cluster: Cluster, constants: Constants, size: Ints, stride: Ints) -> Rings:
    """Return the rings of groups. Groups `stride` apart run at once and share their nodes' adapters."""
    size, stride = np.broadcast_arrays(size, stride)
    per_node = np.maximum(1, np.minimum(size, cluster.domain // stride))
    nodes = -(-size // per_node)
    near, far = cluster.links[0], cluster.links[-1]
    inside = {name: _inside(near, name, per_node, cluster, constants) for name in COLLECTIVES}
    # Every member brings its adapter's share; a chain through the node's members joins them.
    adapter = rate_of(far, constants.network_link_share)
    across = per_node * adapter
    single = nodes == 1
    rates = {name: np.where(single, inside[name], np.minimum(inside[name], across)) for name in COLLECTIVES}
    # Members of other nodes are reached through one's own adapter alone, the node's members beside that.
    slowest = np.maximum((size - per_node) / adapter, (per_node - 1) / inside["all_to_all"])
    leaving = np.maximum(size - 1, 1) / np.where(size > 1, slowest, 1.0)
    rates["all_to_all"] = np.where(single, inside["all_to_all"], leaving)
    # What the last member waits for has gone around the ring: one hop out of every node, the others inside.
    near_hop, far_hop = _near_hop(near, per_node, cluster, constants), hop_seconds(far, constants)
    leaving_hops = np.where(single, 0, np.minimum(nodes, size - 1))
    latency = np.asarray((size - 1 - leaving_hops) * near_hop + leaving_hops * far_hop, dtype=np.float64)
    tree = (np.minimum(size, per_node) - 1) * near_hop + np.log2(np.maximum(nodes, 1)) * far_hop
    near_source, far_source = near.bytes_per_second.source, far.bytes_per_second.source
    mixed = SOURCES.index(weakest(near_source, far_source))
    source = np.where(single, SOURCES.index(near_source), np.where(per_node > 1, mixed, SOURCES.index(far_source)))
    is_measured = near.latency_seconds.source == "measured"
    start = 0.0 if is_measured else constants.collective_seconds
    return Rings(size, nodes, rates, latency, np.where(single, latency, tree), source, start, is_measured)


def _inside(near: Link, collective: str, size: Ints, cluster: Cluster, constants: Constants) -> Floats:
    """Return the bytes per second of a collective inside nodes, by group size where that was measured or is published.

    Of published links a group has the same share as all of a node's devices.
    """
    whole = near.collective_bytes_per_second.get(collective) or rate_of(near, constants.node_link_share)
    share = rate_of(near, constants.node_link_share) / near.bytes_per_second.value
    known = {group.size: share * group.collective_bytes_per_second.get(collective, whole / share)
             for group in near.groups if group.size <= cluster.domain}  # fmt: skip
    points = tuple(sorted({cluster.domain: whole, **known}.items()))
    return interpolate(points, size.astype(np.float64))


def _near_hop(near: Link, size: Ints, cluster: Cluster, constants: Constants) -> Floats:
    """Return the latency of one hop inside nodes, by group size where that was measured."""
    groups = near.groups if near.latency_seconds.source == "measured" else ()
    smaller = [(group.size, group.hop_seconds) for group in groups]
    return interpolate((*smaller, (cluster.domain, hop_seconds(near, constants))), size.astype(np.float64))


def rate_of(link: Link, share: float) -> float:
    """Return the bytes per second that a link gives: as measured, or the share of a published rate."""
    is_known = link.bytes_per_second.source == "measured" or link.level == "process"
    return link.bytes_per_second.value * (1.0 if is_known else share)


def hop_seconds(link: Link, constants: Constants) -> float:
    """Return the latency of one hop over a link: as measured, or fitted where nobody measured it."""
    figure = link.latency_seconds
    if figure.source == "measured" or link.level == "process":
        return figure.value
    return constants.node_hop_seconds if link.level == "node" else constants.network_hop_seconds


def hop(cluster: Cluster, constants: Constants, size: Ints, stride: Ints) -> tuple[Floats, Floats, Ints]:
    """Return (bytes per second, latency, place in SOURCES) of sends between neighbours, on their slowest pair."""
    far = size * stride > cluster.domain
    near_link, far_link = cluster.links[0], cluster.links[-1]
    rate = np.where(far, rate_of(far_link, constants.network_link_share), rate_of(near_link, constants.node_link_share))
    latency = np.where(far, hop_seconds(far_link, constants), hop_seconds(near_link, constants))

    def known(link: Link) -> int:
        return SOURCES.index(weakest(link.bytes_per_second.source, link.latency_seconds.source))

    return rate, latency, np.where(far, known(far_link), known(near_link))
