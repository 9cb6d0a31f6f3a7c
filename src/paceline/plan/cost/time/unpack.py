"""What frozen weights in four bits cost in time: they are unpacked for every product, whatever the micro-batch."""

from __future__ import annotations

import numpy as np

from paceline.plan.cost.components import Component, in_modes
from paceline.plan.cost.model_parts import AGAIN
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.time.block_factors import unpack_seconds
from paceline.spec.adapt.adapter import NF4_BYTES
from paceline.spec.cluster import SOURCES
from paceline.units import format_bytes, format_seconds


def unpack_components(sheet: Sheet) -> list[Component]:
    """Return the seconds per step of unpacking weights, nothing for a model without any in four bits."""
    shapes, columns, rates = sheet.context.shapes, sheet.columns, sheet.rates
    if not shapes["packed_parameters"].any():
        return []
    once = unpack_seconds(shapes, rates)
    again = sheet.over_modes(in_modes(shapes["unpacks_again"] * once, *AGAIN), sheet.slowest_row)
    number = sheet.slowest.number(shapes["unpacks"] * once) + again
    values = sheet.slowest.total("packed_parameters")
    times = number / np.maximum(sheet.slowest.number(once), 1e-300)

    def text(i: int) -> str:
        each = once.sum() / shapes["packed_parameters"].sum() * rates.memory_rate
        return (
            f"{columns.accumulation[i]} micro-batches x {times[i]:.3g} times x {values[i]:,.0f} weights in four bits x"
            f" {each:.3g} B / memory bandwidth; they are whole on every device, so none is gathered{whole(i)}"
        )

    # What it would take to hold shards, for whoever wonders why the plan does not.
    shards = sheet.ring("fsdp")
    moved = columns.accumulation * times * NF4_BYTES * values
    gathering = shards.seconds("all_gather", moved, columns.accumulation * times * sheet.slowest.units)

    def whole(i: int) -> str:
        if shards.size[i] == 1:
            return ""
        saved = NF4_BYTES * values[i] * (1 - 1 / shards.size[i])
        return (
            f": shards over {shards.size[i]} would save {format_bytes(saved)} a device, and gathering them take "
            f"{format_seconds(float(gathering[i]))} a step"
        )

    return [
        Component("unpacking of four bits", "casts", columns.accumulation * number,
                  SOURCES.index(rates.memory_source), text, "counted elements over bandwidth",
                  clock="forward_backward")
    ]  # fmt: skip
