"""The least that any plan of a layout takes: what lets a search leave out layouts that cannot win."""

from __future__ import annotations

import dataclasses

from paceline.plan.cost.axes import IDLE_SHARE, axis_terms
from paceline.plan.cost.inputs import Context
from paceline.plan.plan import Plan


def least_seconds(context: Context, plan: Plan) -> float:
    """Return seconds per step that no plan of this layout, precision, recompute, schedule and split undercuts.

    Counted are the arithmetic of the slowest stage, the communication inside it with as few micro-batches as the
    pipeline needs, and a bubble of as many as there are samples. NaN where rates are unknown.
    """
    layout = plan.layout
    fewest = dataclasses.replace(plan, micro_batch=1, accumulation=layout.pp)
    samples = context.device_samples(fewest)
    inside = (term.value for term in axis_terms(context, fewest) if term.name != "pipeline sends")
    one = context.busy_seconds(context.slowest(fewest), fewest)
    seconds = samples * one + sum(inside)
    others = sum(context.busy_seconds(stage.part, fewest) * stage.ranks for stage in context.stages(fewest)) / one - 1
    share = min(IDLE_SHARE.values()) if layout.pp > 1 else 0.0
    return seconds * (1 + share * others / (samples * plan.virtual_stages))
