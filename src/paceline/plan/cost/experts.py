"""What spreading experts changes in a plan's price: rows travel in an all-to-all, and fewer weights are gathered.

The load of experts is taken to be even. Nothing hides the exchange: products wait for the rows, and the layer for the
results.
"""

from __future__ import annotations

from paceline.plan.cost.inputs import BYTES, Context
from paceline.plan.cost.network import ring
from paceline.plan.forecast import Term
from paceline.plan.plan import Plan


def exchange_terms(context: Context, plan: Plan) -> list[Term]:
    """Return the seconds per step of sending rows to their experts and results back; nothing where ep is 1."""
    if plan.layout.ep == 1:
        return []
    group = ring(context.cluster, plan.layout.ep, 1)
    layers = sum(1 for block in context.profile.blocks if block.routed_elements)
    elements = context.device_samples(plan) * sum(block.routed_elements for block in context.profile.blocks)
    times = 4 if plan.recompute == "none" else 6  # there and back, in forward, backward and recompute
    size = BYTES[plan.precision]
    seconds = group.seconds("all_gather", times * elements * size, times * layers * plan.accumulation)
    text = f"{times} x rows of chosen experts ({size} B/element) to and from {group.size} devices, not overlapped"
    return [Term("expert exchange", seconds, text, "assumed")]
