"""Topology: where devices stand. Slots are numbered node by node; racks hold equal runs of nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.spec.cluster import Cluster

LEVELS = ("device", "node", "rack", "network")  # how far apart two slots are, nearest first


@dataclass(frozen=True)
class Topology:
    """Slots in nodes, nodes in racks, and the rails that a node's adapters lead into. 0 rails or racks: unknown."""

    devices: int
    devices_per_node: int
    rails: int = 0
    nodes_per_rack: int = 0

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return -(-self.devices // self.devices_per_node)

    @property
    def racks(self) -> int:
        """The number of racks; 0 where racks are unknown."""
        return -(-self.nodes // self.nodes_per_rack) if self.nodes_per_rack else 0

    def node(self, slot: int) -> int:
        """Return the node that a slot is in."""
        return slot // self.devices_per_node

    def rack(self, slot: int) -> int:
        """Return the rack that a slot is in; 0 where racks are unknown."""
        return self.node(slot) // self.nodes_per_rack if self.nodes_per_rack else 0

    def rail(self, slot: int) -> int:
        """Return the rail of a slot's adapter, which neighbours share where rails are few; 0 where they are unknown."""
        return slot % self.devices_per_node * self.rails // self.devices_per_node

    def level(self, first: int, second: int) -> str:
        """Return the nearest level that holds two slots. Without racks, whatever leaves a node is on the network."""
        if first == second:
            return "device"
        if self.node(first) == self.node(second):
            return "node"
        return "rack" if self.nodes_per_rack and self.rack(first) == self.rack(second) else "network"


@dataclass(frozen=True)
class Span:
    """What the groups of an axis cross, in the worst of them.

    `members` stand side by side in one node at most, a group is in so many `nodes` and `racks` (0: unknown), `leaving`
    of the neighbours in its ring, last and first included, are in different nodes, and `on_rail` tells whether the
    members of every group share a rail.
    """

    level: str
    members: int
    nodes: int
    racks: int
    leaving: int
    on_rail: bool


def span(topology: Topology, axes: Sequence[tuple[int, int]]) -> Span:
    """Return what the groups of a mesh cross along axes of (degree, slots from one coordinate to the next).

    The pattern repeats after the smallest common multiple of a node (or rack) and of the outermost axis, so only that
    many slots are looked at.
    """
    offsets = [0]
    for degree, stride in sorted(axes, key=lambda axis: -axis[1]):
        offsets = [offset + stride * step for offset in offsets for step in range(degree)]
    unit = topology.devices_per_node * (topology.nodes_per_rack or 1)
    period = min(topology.devices, math.lcm(unit, max(degree * stride for degree, stride in axes)))
    starts = (slot for slot in range(period) if all(slot // stride % degree == 0 for degree, stride in axes))
    worst = Span("device", 1, 1, min(1, topology.nodes_per_rack), 0, topology.rails > 0)
    for found in {_span_of(topology, [start + offset for offset in offsets]) for start in starts}:
        worst = Span(
            max(worst.level, found.level, key=LEVELS.index),
            max(worst.members, found.members),
            max(worst.nodes, found.nodes),
            max(worst.racks, found.racks),
            max(worst.leaving, found.leaving),
            worst.on_rail and found.on_rail,
        )
    return worst


def _span_of(topology: Topology, slots: list[int]) -> Span:
    """Return what one group crosses; its slots rise, so a node's members are a run."""
    nodes = [topology.node(slot) for slot in slots]
    return Span(
        level=topology.level(slots[0], slots[-1]),
        members=max(len(list(run)) for _, run in itertools.groupby(nodes)),
        nodes=len(set(nodes)),
        racks=len({topology.rack(slot) for slot in slots}) if topology.nodes_per_rack else 0,
        leaving=sum(before != after for before, after in itertools.pairwise([*nodes, nodes[0]])),
        on_rail=topology.rails > 0 and len({topology.rail(slot) for slot in slots}) == 1,
    )


def topology_of(cluster: Cluster) -> Topology:
    """Return where a cluster's devices stand."""
    return Topology(cluster.devices, cluster.devices_per_node, cluster.rails, cluster.nodes_per_rack)
