"""Placement as a picture: nodes as boxes, devices as cells with their mesh coordinates. Plain SVG."""

from __future__ import annotations

from paceline import svg
from paceline.plan.placement.in_words import axis_text
from paceline.plan.placement.place import Placement

SHOWN_NODES, SHOWN_DEVICES = 8, 16
COLUMNS, NODES_A_ROW = 8, 2
CELL_WIDTH, CELL_HEIGHT, GAP = 44, 34, 3
UPPER_WORDS, LOWER_WORDS = 14, 28  # base lines of a cell's rank and coordinates
LINE = 18
COLOURS = ("#2360c5", "#12806f", "#a8600c", "#8457d8", "#c0407a", "#63781c", "#626e7a", "#a05f33")
STYLE = "".join(
    f".placement {rule}"
    for rule in (
        "text{font:12px system-ui,-apple-system,sans-serif;fill:#6a7480}",
        ".in{font-size:11px;fill:#fff;text-anchor:middle}",
        ".box{fill:none;stroke:#a0a9b4}",
    )
)


def placement_svg(placement: Placement, alone: bool = True) -> str:
    """Return the map of the first nodes: a cell per device with its rank and coordinates, coloured by one axis.

    Below it stands, for every axis, what its groups cross. The style holds inside the picture. A file that stands
    `alone` needs the format's name space, a picture inside a page does not.
    """
    topology, layout = placement.topology, placement.layout
    named = [axis for axis in placement.order if getattr(layout, axis) > 1]
    nodes = min(topology.nodes, SHOWN_NODES)
    coloured = _coloured(placement, named, nodes)
    devices = min(topology.devices_per_node, SHOWN_DEVICES)
    columns = min(COLUMNS, devices)
    box_width = columns * (CELL_WIDTH + GAP) + GAP
    box_height = -(-devices // columns) * (CELL_HEIGHT + GAP) + GAP
    parts = []
    for node in range(nodes):
        left = 8 + node % NODES_A_ROW * (box_width + 24)
        top = 24 + node // NODES_A_ROW * (box_height + 30)
        parts.append(svg.text(left, top - 6, _node_title(placement, node)))
        parts.append(svg.box(left, top, box_width, box_height, "box", rx=4))
        for index, rank in enumerate(placement.ranks(node)[:devices]):
            x = left + GAP + index % columns * (CELL_WIDTH + GAP)
            y = top + GAP + index // columns * (CELL_HEIGHT + GAP)
            parts += _cell(placement, rank, x, y, named, coloured)
    bottom = 24 + -(-nodes // NODES_A_ROW) * (box_height + 30)
    notes = [f"each cell: rank, and {' · '.join(named) or 'nothing to tell apart'}; colours: {coloured}"]
    if nodes < topology.nodes or devices < topology.devices_per_node:
        notes.append(f"shown: {nodes} of {topology.nodes:,} nodes, {devices} of {topology.devices_per_node:,} devices")
    notes += [axis_text(axis) for axis in placement.axes]
    parts += [svg.text(8, bottom + LINE * line, note) for line, note in enumerate(notes)]
    width = max(16 + min(nodes, NODES_A_ROW) * (box_width + 24), 520)
    height = bottom + LINE * len(notes)
    label = f"{layout} on {topology.nodes:,} nodes of {topology.devices_per_node:,} devices"
    return svg.picture(width, height, label, parts, name="placement", rules=STYLE, alone=alone, fixed=True)


def _coloured(placement: Placement, named: list[str], nodes: int) -> str:
    """Return the outermost axis that tells some of the shown devices apart."""
    shown = [placement.coordinates(rank) for node in range(nodes) for rank in placement.ranks(node)]
    apart = (axis for axis in named if len({place[axis] for place in shown}) > 1)
    return next(apart, placement.order[-1])


def _node_title(placement: Placement, node: int) -> str:
    topology = placement.topology
    rack = f", rack {topology.rack(node * topology.devices_per_node)}" if topology.racks else ""
    return f"node {node}{rack}"


def _cell(placement: Placement, rank: int, x: int, y: int, named: list[str], coloured: str) -> list[str]:
    place = placement.coordinates(rank)
    rail = f", rail {placement.topology.rail(rank)}" if placement.topology.rails else ""
    tip = f"rank {rank}{rail}: {', '.join(f'{axis} {place[axis]}' for axis in named)}"
    middle = x + CELL_WIDTH // 2
    colour = COLOURS[place[coloured] % len(COLOURS)]
    cells = [
        svg.box(x, y, CELL_WIDTH, CELL_HEIGHT, words=tip, rx=3, fill=colour),
        svg.text(middle, y + UPPER_WORDS, f"{rank}", "in"),
    ]
    if named:
        cells.append(svg.text(middle, y + LOWER_WORDS, "·".join(f"{place[axis]}" for axis in named), "in"))
    return cells
