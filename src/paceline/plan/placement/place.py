"""Placement: mesh coordinates to nodes, racks and rails, so that the axis that talks most has the nearest links.

Ranks are started node by node, so a rank's number is its slot. What the mesh's order costs is shown beside the order
that the plan's own traffic asks for: the axis with the most bytes a second innermost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.cluster.topology import Span, Topology, span, topology_of
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.placement.traffic import AxisTraffic, axis_traffic
from paceline.spec.cluster import Cluster
from paceline.spec.layout import MESH_ORDER, Layout
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile

# Innermost first, where traffic does not tell axes apart.
PREFERENCE = ("tp", "cp", "dp_shard", "pp", "dp_replicate")
NOTABLE = 0.95  # another order is worth a word where it sends less than this share of the bytes out of the nodes


@dataclass(frozen=True)
class AxisPlace:
    """An axis of the mesh: what its groups send, and what they cross."""

    axis: str
    size: int
    bytes_per_second: float  # that a device sends; NaN where the step's time is unknown
    leaving_bytes_per_second: float  # of those, what leaves the node
    text: str
    span: Span


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a plan stand. `order` is outermost first; `better` is empty where none is notably better."""

    topology: Topology
    layout: Layout
    order: tuple[str, ...]
    axes: tuple[AxisPlace, ...]  # busiest first
    better: tuple[str, ...] = ()
    better_leaving: float = math.nan  # bytes per second that leave a node per device, in the better order

    @property
    def leaving_bytes_per_second(self) -> float:
        """Bytes per second that a device sends out of its node, over all axes."""
        return math.fsum(axis.leaving_bytes_per_second for axis in self.axes)

    def coordinates(self, slot: int) -> dict[str, int]:
        """Return the mesh coordinates of the rank in a slot."""
        place = {}
        for axis in reversed(self.order):
            slot, place[axis] = divmod(slot, getattr(self.layout, axis))
        return {axis: place[axis] for axis in MESH_ORDER}

    def ranks(self, node: int) -> range:
        """Return the ranks on a node."""
        first = node * self.topology.devices_per_node
        return range(first, min(first + self.topology.devices_per_node, self.topology.devices))


def placement_from_dict(data: Mapping[str, Any]) -> Placement:
    """Return the placement that `dataclasses.asdict` took apart; KeyError, TypeError or ValueError for other data."""
    axes = tuple(AxisPlace(**{**axis, "span": Span(**axis["span"])}) for axis in data["axes"])
    return Placement(
        **{
            **data,
            "topology": Topology(**data["topology"]),
            "layout": Layout(**data["layout"]),
            "order": tuple(data["order"]),
            "axes": axes,
            "better": tuple(data["better"]),
        }
    )


def place(
    profile: ModelProfile, cluster: Cluster, plan: Plan, step_seconds: float, optimizer: str = "adamw"
) -> Placement:
    """Return where the plan's ranks stand on the cluster, and whether another order of its axes would be better."""
    topology = topology_of(cluster)
    traffic = axis_traffic(PricedTask(profile, cluster, plan.batch_samples, 1, optimizer), plan)
    axes = _axes(topology, plan.layout, MESH_ORDER, traffic, step_seconds)
    best = best_order(plan.layout, traffic)
    leaving = math.fsum(
        axis.leaving_bytes_per_second for axis in _axes(topology, plan.layout, best, traffic, step_seconds)
    )
    now = math.fsum(axis.leaving_bytes_per_second for axis in axes)
    is_better = leaving < NOTABLE * now
    return Placement(
        topology, plan.layout, MESH_ORDER, axes, best if is_better else (), leaving if is_better else math.nan
    )


def best_order(layout: Layout, traffic: tuple[AxisTraffic, ...]) -> tuple[str, ...]:
    """Return the mesh's axes, outermost first, the one that sends most innermost.

    What devices that share a copy's state send counts for both of that group's axes, and experts' all-to-alls for those
    that they are spread over.
    """
    sent = dict.fromkeys(MESH_ORDER, 0.0)
    for one in traffic:
        for axis in _mesh_axes(layout, one.axis):
            sent[axis] += one.bytes_per_step
    return tuple(sorted(MESH_ORDER, key=lambda axis: (sent[axis], -PREFERENCE.index(axis))))


def _mesh_axes(layout: Layout, axis: str) -> tuple[str, ...]:
    if axis == "ep":
        return ("cp",) if layout.cp >= layout.ep else ("cp", "dp_shard") if layout.cp > 1 else ("dp_shard",)
    if axis == "dp_shard":
        return tuple(name for name in ("cp", "dp_shard") if getattr(layout, name) > 1)
    return (axis,)


def _axes(
    topology: Topology, layout: Layout, order: tuple[str, ...], traffic: tuple[AxisTraffic, ...], step_seconds: float
) -> tuple[AxisPlace, ...]:
    """Return the axes that send anything, busiest first, under an order of the mesh's axes."""
    places = []
    for one in traffic:
        members = _group(layout, order, one.axis)
        size, crossed = math.prod(degree for degree, _ in members), span(topology, members)
        rate = one.bytes_per_step / step_seconds if step_seconds > 0 else math.nan
        out = 1 - (crossed.members - 1) / (size - 1) if one.axis == "ep" else crossed.leaving / size
        places.append(AxisPlace(one.axis, size, rate, rate * out, one.text, crossed))
    return tuple(sorted(places, key=lambda place: -place.bytes_per_second))


def _group(layout: Layout, order: tuple[str, ...], axis: str) -> list[tuple[int, int]]:
    """Return (degree, slots from one to the next) of the mesh axes that an axis's groups extend along."""
    strides = {name: math.prod(getattr(layout, inner) for inner in order[order.index(name) + 1 :]) for name in order}
    if axis == "ep":  # the inner part of dp_shard x cp, whatever order those stand in on the machines
        inside = min(layout.ep, layout.cp)
        parts = [(inside, strides["cp"]), (layout.ep // inside, strides["dp_shard"])]
    elif axis == "dp_shard":
        parts = [(layout.cp, strides["cp"]), (layout.dp_shard, strides["dp_shard"])]
    else:
        parts = [(getattr(layout, axis), strides[axis])]
    return [part for part in parts if part[0] > 1]
