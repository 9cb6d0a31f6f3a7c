"""What survivors hold together: whether the whole state of one moment is left in the ranks that are."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.spec.plan import Plan


def step_held(plan: Plan, steps: Mapping[int, int]) -> int | None:
    """Return the last step after which some ranks hold the whole state between them, or None.

    `steps` has the step of each surviving rank's state, -1 for one that was inside an update. Copies of the model hold
    the same, so of each part any copy will do; copies that keep something of their own do not replace one another.
    """
    wanted = {_part(plan, rank) for rank in range(plan.layout.devices)}
    for step in sorted({step for step in steps.values() if step >= 0}, reverse=True):
        if {_part(plan, rank) for rank, of in steps.items() if of == step} == wanted:
            return step
    return None


def _part(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return which part of the state a rank holds."""
    place = plan.layout.coordinates(rank)
    return tuple(at for axis, at in sorted(place.items()) if axis != "dp_replicate" or not plan.sync.is_plain)
