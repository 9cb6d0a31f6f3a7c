"""The layouts that a twin runs as: every axis of the real one, with few enough ranks for one machine.

Two of a data axis compute what any number does. Of the axes that split a model the third rank does what no other does:
the middle stage of a pipeline, keys that are passed on in a ring, groups that are no pairs. Where the layout has three
of such an axis a twin has them too, one axis at a time: three of each at once would be 27 ranks.

Before training, twins are light: instead of one of all axes there are some in which every two axes meet, and for what
shows on every axis by itself, such as the format of what ranks send, the smallest that have it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from paceline.spec.layout import DATA_AXES, MODEL_AXES, Layout

SPLIT_AXES = tuple(axis for axis in MODEL_AXES if axis != "ep")  # a twin has experts on ranks that are there anyway
LARGEST_WORLD = 16  # ranks of a twin that has three of an axis; beyond it, other axes are left out of that twin
LIGHT_WORLD = 12  # ranks of a twin before training: what ranks take grows faster than their number


def twin_layout(layout: Layout) -> Layout:
    """Return the first of a layout's twins."""
    return twin_layouts(layout)[0]


def twin_layouts(layout: Layout) -> tuple[Layout, ...]:
    """Return the layouts that a proof runs in place of a layout: one, or one for each axis that needs three ranks.

    Every axis is in one of them at least, and all of them together, unless that takes more than LARGEST_WORLD ranks.
    """
    lowest = _lowest(layout)
    found = _deep_twins(layout, LARGEST_WORLD)
    if not any(all(twin[axis] >= lowest[axis] for axis in lowest) for twin in found):
        found.insert(0, lowest if found else _with_more_data_ranks(layout, lowest))
    return _layouts(layout, found)


def light_layouts(layout: Layout) -> tuple[Layout, ...]:
    """Return the layouts that the proof before training runs: the same, or of few ranks, every two axes in one of them.

    A mistake that takes three axes at once shows in `twin_layouts` alone.
    """
    twins = twin_layouts(layout)
    if max(twin.devices for twin in twins) <= LIGHT_WORLD:
        return twins
    lowest = _lowest(layout)
    found = _deep_twins(layout, LIGHT_WORLD)
    used = [axis for axis, degree in lowest.items() if degree > 1]
    for pair in itertools.combinations(used, 2):
        if not any(all(twin[axis] > 1 for axis in pair) for twin in found):
            found.append(_filled({axis: lowest[axis] if axis in pair else 1 for axis in lowest}, lowest))
    return _layouts(layout, found)


def smallest_layouts(layout: Layout) -> tuple[Layout, ...]:
    """Return layouts of two or four ranks in which each axis of this one is at work at least once.

    Copies go with another axis where there is one: alone they are summed by other code (run/parallel/apply.py).
    """
    lowest = _lowest(layout)
    used = [axis for axis, degree in lowest.items() if degree > 1]
    together = [used[:2], *([axis] for axis in used[2:])] if "dp_replicate" in used else [[axis] for axis in used]
    return _layouts(layout, [{axis: lowest[axis] if axis in some else 1 for axis in lowest} for some in together])


def _lowest(layout: Layout) -> dict[str, int]:
    return {axis: _least(layout, axis, 2) for axis in (*DATA_AXES, *SPLIT_AXES)}


def _deep_twins(layout: Layout, world: int) -> list[dict[str, int]]:
    """Return a twin for each axis of which the layout has three, with so many of it and up to `world` ranks."""
    lowest = _lowest(layout)
    deep = {axis: _least(layout, axis, 3) for axis in SPLIT_AXES}
    return [_within({**lowest, axis: degree}, axis, world) for axis, degree in deep.items() if degree > lowest[axis]]


def _layouts(layout: Layout, twins: Iterable[Mapping[str, int]]) -> tuple[Layout, ...]:
    found = (Layout(**twin, ep=_expert_degree(layout, twin["dp_shard"] * twin["cp"])) for twin in twins)
    return tuple(dict.fromkeys(found))


def _filled(twin: Mapping[str, int], lowest: Mapping[str, int]) -> dict[str, int]:
    """Return the twin with more of the axes, as long as it has no more than LIGHT_WORLD ranks."""
    for axis, degree in lowest.items():
        more = {**twin, axis: max(degree, twin[axis])}
        twin = more if Layout(**more).devices <= LIGHT_WORLD else twin
    return dict(twin)


def _least(layout: Layout, axis: str, least: int) -> int:
    """Return the smallest degree of an axis that is no less than `least` and can stand for the layout's.

    It divides the layout's where ranks share a width, so that what can be shared by the one can be by the other. Rows,
    blocks and sequences may be shared by any number.
    """
    degree = getattr(layout, axis)
    divides = axis == "tp" or (axis == "cp" and max(layout.tp, layout.ep) > 1)
    return next((fewer for fewer in range(least, degree) if not divides or degree % fewer == 0), degree)


def _within(twin: dict[str, int], axis: str, world: int) -> dict[str, int]:
    """Return the twin without so many axes, data axes first, that it has `world` ranks at most."""
    for other in (*DATA_AXES, *SPLIT_AXES):
        if Layout(**twin).devices > world and other != axis:
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
