"""What optimizers gather that need whole parameters, where those are sharded: run/updates/one_rule.py, WholePart.

One parameter after the other, its weight, its gradient and what its state has of its shape become whole on every rank,
by an all-gather for each over every axis that shards it; every rank computes the whole update, and keeps its part.
How many values a rule gathers of a parameter is in spec/optimizers.py; parameters that other rules of the task train
(vectors, groups) are counted as if they were gathered too, so this is a bound from above.
"""

from __future__ import annotations

import numpy as np

from paceline.plan.cost.collectives.of_weights import gathers, update_collectives
from paceline.plan.cost.columns import Columns, Floats
from paceline.plan.cost.components import ASSUMED, Component
from paceline.plan.cost.model_parts import Parts
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.time.axes import RING, seconds_of
from paceline.plan.cost.time.compute import state_bytes
from paceline.spec.optimizers import gathered_values


def gather_components(sheet: Sheet) -> list[Component]:
    """Return the seconds per step of gathering for the update; nothing where the optimizer needs none."""
    columns, part, optimizer = sheet.columns, sheet.heaviest, sheet.context.optimizer
    values = gathered_values(optimizer)
    if not values:
        return []
    shards, tensor = update_collectives(sheet)
    rings = sheet.ring("fsdp"), sheet.ring("tp")
    seconds = seconds_of(rings[0], shards) + seconds_of(rings[1], tensor)
    seconds = seconds + 2 * (shards.buffer_bytes + tensor.buffer_bytes) / sheet.rates.memory_rate

    def text(i: int) -> str:
        size = state_bytes(columns.precision)
        words = f"{values:g} values x {size} B x {part.parameters[i]:,.0f} parameters, all-gathered"
        over = [f"dp_shard x cp {columns.state_degree[i]}"] if columns.state_degree[i] > 1 else []
        over += [f"tp {columns.tp[i]}"] if columns.tp[i] > 1 else []
        calls = f"in about {shards.calls[i]:,.0f} collectives ({optimizer})"
        return f"{words} over {' and '.join(over)} {calls}; not overlapped"

    known = np.where(columns.state_degree > 1, rings[0].source, rings[1].source)
    applies = gathers(columns, optimizer)
    return [Component("optimizer gathering", "sync", seconds, known, text, RING, applies, "optimizer")]


def gathered_memory(columns: Columns, part: Parts, optimizer: str, idle: Floats) -> Component:
    """Return the bytes of the largest parameter while it is whole: it comes when `idle` bytes of the step are free.

    A profile knows units of sharding and not their parameters, so it is the largest unit: a bound from above.
    """
    values, size = gathered_values(optimizer), state_bytes(columns.precision)
    largest = part.largest_unit(np.ones_like(columns.ep))
    whole = gathers(columns, optimizer)
    held = np.where(whole, np.maximum(0.0, values * size * largest - idle), 0.0)

    def text(i: int) -> str:
        words = f"{values:g} values x {size} B x {largest[i]:,.0f} parameters of the largest unit, at most"
        return f"{words}; {'more than' if held[i] else 'within'} what forward and backward have left free"

    known = np.full(len(columns), ASSUMED)
    return Component("gathered for the update", "buffers", held, known, text, "counted", whole)
