"""The layouts that a twin runs as: every axis of the real one, with few enough ranks for one machine.

Two of a data axis compute what any number does. Of the axes that split a model the third rank does what no other does:
the middle stage of a pipeline, keys that are passed on in a ring, groups that are no pairs. Where the layout has three
of such an axis a twin has them too, one axis at a time: three of each at once would be 27 ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.plan.layout import Layout

DATA_AXES = ("dp_replicate", "dp_shard")
MODEL_AXES = ("cp", "tp", "pp")
LARGEST_WORLD = 16  # ranks of a twin that has three of an axis; beyond it, other axes are left out of that twin


def twin_layout(layout: Layout) -> Layout:
    """Return the first of a layout's twins."""
    return twin_layouts(layout)[0]


def twin_layouts(layout: Layout) -> tuple[Layout, ...]:
    """Return the layouts that a proof runs in place of this one: one, or one for each axis of which three matter.

    Every axis is in one of them at least, and all of them together, unless that takes more than LARGEST_WORLD ranks.
    """
    lowest = {axis: _least(layout, axis, 2) for axis in (*DATA_AXES, *MODEL_AXES)}
    deep = [axis for axis in MODEL_AXES if _least(layout, axis, 3) > lowest[axis]]
    found: list[dict[str, int]] = []
    for axis in deep:
        found.append(_within({**lowest, axis: _least(layout, axis, 3)}, axis))
    whole = any(all(twin[axis] >= lowest[axis] for axis in lowest) for twin in found)
    if not whole:
        found.insert(0, lowest if deep else _with_more_data_ranks(layout, lowest))
    twins = [Layout(**twin, ep=_expert_degree(layout, twin["dp_shard"] * twin["cp"])) for twin in found]
    return tuple(dict.fromkeys(twins))


def _least(layout: Layout, axis: str, least: int) -> int:
    """Return the smallest degree of an axis that is no less than `least` and can stand for the layout's.

    It divides the layout's where ranks share a width, so that what can be shared by the one can be by the other. Rows,
    blocks and sequences may be shared by any number.
    """
    degree = getattr(layout, axis)
    divides = axis == "tp" or (axis == "cp" and max(layout.tp, layout.ep) > 1)
    return next((fewer for fewer in range(least, degree) if not divides or degree % fewer == 0), degree)


def _within(twin: dict[str, int], axis: str) -> dict[str, int]:
    """Return the twin without so many axes, data axes first, that it has LARGEST_WORLD ranks at most."""
    for other in (*DATA_AXES, *MODEL_AXES):
        if Layout(**twin).devices > LARGEST_WORLD and other != axis:
            twin = {**twin, other: 1}
    return twin


def _with_more_data_ranks(layout: Layout, lowest: Mapping[str, int]) -> dict[str, int]:
    """Return the degrees with three or four of the data axis, where it is the only one and has them."""
    axes = [axis for axis, degree in lowest.items() if degree > 1]
    if len(axes) != 1 or axes[0] not in DATA_AXES:
        return dict(lowest)
    degree = getattr(layout, axes[0])
    return {**lowest, axes[0]: min(degree, 4 if degree % 4 == 0 else 3)}


def _expert_degree(layout: Layout, devices: int) -> int:
    """Return a degree of `ep` over so many devices: above one, and below all, where the layout's is."""
    if layout.ep == 1 or devices == 1:
        return 1
    shared = layout.ep < layout.dp_shard * layout.cp  # several devices hold the same experts
    fitting = [degree for degree in range(2, devices + 1) if devices % degree == 0]
    fitting = [degree for degree in fitting if degree < devices or not shared] or fitting
    return max((degree for degree in fitting if degree <= layout.ep), default=fitting[0])


def ran_as(layout: Layout) -> str:
    """Return what a layout's proof ran as, in words: its twins."""
    return "; ".join(map(str, twin_layouts(layout)))
