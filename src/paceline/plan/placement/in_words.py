"""Placement in words: what every axis crosses, which ranks share a node, and which order would be better."""

from __future__ import annotations

import math

from paceline.plan.placement.place import AxisPlace, Placement
from paceline.units import format_rate

LISTED_NODES = 4


def placement_lines(placement: Placement) -> list[str]:
    """Return the map in lines of at most 100 columns: axes busiest first, then ranks by node."""
    topology = placement.topology
    room = f"{_count(topology.nodes, 'node')} of {_count(topology.devices_per_node, 'device')}"
    room += f", {topology.rails} rails" if topology.rails else ", rails unknown"
    room += f", {_count(topology.racks, 'rack')}" if topology.racks else ", racks unknown"
    if not placement.axes:
        return [f"placement: {room}; nothing is sent"]
    lines = [f"placement: {room}", f"  ranks count {', '.join(_axes_shown(placement))}, the last one fastest"]
    lines.append(f"  {'sent':>9}  {'leaves node':>11}  axis")
    lines += [f"  {_rate(axis.bytes_per_second)}  {_rate(axis.leaving_bytes_per_second, 11)}  {axis_text(axis)}"
              for axis in placement.axes]  # fmt: skip
    for node in range(min(LISTED_NODES, topology.nodes)):
        lines.append(f"  node {node}: ranks {_ranks(placement, node)}")
    if topology.nodes > LISTED_NODES:
        lines.append(f"  and {topology.nodes - LISTED_NODES:,} more nodes, alike")
    if placement.better:
        order = ", ".join(axis for axis in placement.better if getattr(placement.layout, axis) > 1)
        now, then = placement.leaving_bytes_per_second, placement.better_leaving
        lines.append(f"  counting {order} would send {format_rate(then, 'B')} out of a node instead of")
        lines.append(f"  {format_rate(now, 'B')} per device; ranks are not started in that order yet")
    return lines


def axis_text(axis: AxisPlace) -> str:
    """Return an axis with what its groups cross: "tp=8: inside a node"."""
    crossed = axis.span
    if crossed.nodes == 1:
        return f"{axis.axis}={axis.size}: inside a node"
    where = f"{crossed.members} in each of {crossed.nodes} nodes"
    where += ", one rail" if crossed.on_rail else ""
    where += ", inside a rack" if crossed.level == "rack" else f", {crossed.racks} racks" if crossed.racks else ""
    return f"{axis.axis}={axis.size}: {where}"


def _axes_shown(placement: Placement) -> list[str]:
    return [axis for axis in placement.order if getattr(placement.layout, axis) > 1] or ["one device"]


def _ranks(placement: Placement, node: int) -> str:
    ranks = placement.ranks(node)
    first, last = placement.coordinates(ranks[0]), placement.coordinates(ranks[-1])
    spread = [
        f"{axis} {first[axis]}" + (f" to {last[axis]}" if last[axis] != first[axis] else "")
        for axis in placement.order
        if getattr(placement.layout, axis) > 1
    ]
    return f"{ranks[0]} to {ranks[-1]}: {', '.join(spread)}" if len(ranks) > 1 else f"{ranks[0]}: {', '.join(spread)}"


def _rate(per_second: float, width: int = 9) -> str:
    return f"{format_rate(per_second, 'B') if math.isfinite(per_second) else 'unknown':>{width}}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
