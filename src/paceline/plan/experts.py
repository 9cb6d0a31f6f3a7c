"""The expert axis in the search: which layouts spread a model's experts, and why others cannot."""

from __future__ import annotations

import dataclasses
import math

from paceline.errors import ConfigError
from paceline.plan.layout import Layout
from paceline.task.profile import ModelProfile


def refusal(layout: Layout, profile: ModelProfile) -> str | None:
    """Return why a layout cannot spread the model's experts, or None where it can or does not."""
    if layout.ep == 1:
        return None
    if not profile.experts:
        return "the model has no experts to spread"
    if profile.experts % layout.ep:
        return f"{profile.experts} experts cannot be spread evenly over {layout.ep} devices: each holds whole ones"
    remaining = layout.dp_shard * layout.cp // layout.ep
    uneven = [width for width in profile.expert_widths if width % remaining]
    if uneven:
        return (
            f"experts of width {uneven[0]} cannot be sharded over dp_shard x cp / ep = {remaining} devices:"
            " FSDP2 shards a dimension other than the first evenly or not at all"
        )
    return None


def with_experts(layouts: list[Layout], profile: ModelProfile, demanded: int) -> list[Layout]:
    """Return the layouts with every degree of the expert axis that fits each; `demanded` is the only one if not 0.

    Raises ConfigError where none has the demanded degree, with the reason.
    """
    if not profile.experts:
        return layouts
    spread = []
    because = ""
    for layout in layouts:
        for degree in divisors(layout.dp_shard * layout.cp):
            candidate = dataclasses.replace(layout, ep=degree)
            if degree == (demanded or degree):
                reason = refusal(candidate, profile)
                because = because or reason or ""
                spread += [] if reason else [candidate]
    if not spread:
        largest = max(layout.dp_shard * layout.cp for layout in layouts)
        raise ConfigError(
            f"plan.ep = {demanded}",
            because or "experts are spread over the dp_shard and cp axes, so ep must divide their product",
            f"plan.ep = {math.gcd(profile.experts, largest)}",
        )
    return spread


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in order."""
    return [degree for degree in range(1, number + 1) if number % degree == 0]
