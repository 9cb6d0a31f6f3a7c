"""What frozen weights in four bits cost in time: they are unpacked for every product, whatever the micro-batch."""

from __future__ import annotations

import numpy as np

from paceline.plan.cost.columns import Floats
from paceline.plan.cost.components import Component, in_modes
from paceline.plan.cost.model_parts import AGAIN
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.time.block_factors import unpack_seconds
from paceline.spec.adapt.adapter import NF4_VALUE_BYTES
from paceline.spec.cluster import SOURCES
from paceline.units import format_bytes, format_seconds


def unpackings(sheet: Sheet, each: Floats) -> Floats:
    """Return the sum over the slowest part's blocks of `each`, one a shape, as often as a micro-batch unpacks them."""
    shapes = sheet.context.shapes
    again = sheet.over_modes(in_modes(shapes["unpacks_again"] * each, *AGAIN), sheet.slowest_row)
    found: Floats = sheet.slowest.number(shapes["unpacks"] * each) + again
    return found


def unpack_components(sheet: Sheet) -> list[Component]:
    """Return the seconds per step of unpacking weights, nothing for a model without any in four bits."""
    shapes, columns, rates = sheet.context.shapes, sheet.columns, sheet.rates
    if not shapes["packed_parameters"].any():
        return []
    once = unpack_seconds(shapes, rates)
    number = unpackings(sheet, once)
    values = sheet.slowest.total("packed_parameters")
    times = number / np.maximum(sheet.slowest.number(once), 1e-300)

    def text(i: int) -> str:
        each = once.sum() / shapes["packed_parameters"].sum() * rates.memory_rate
        return (
            f"{sheet.passes_made[i]:g} micro-batches x {times[i]:.3g} times x {values[i]:,.0f} weights in four bits x"
            f" {each:.3g} B / memory bandwidth; {where(i)}"
        )

    # What it would take to spread them, for whoever wonders why the plan does not.
    ranks = sheet.ring("data")
    moved = sheet.passes_made * NF4_VALUE_BYTES * unpackings(sheet, shapes["packed_parameters"])
    gathering = ranks.seconds("all_gather", moved, sheet.passes_made * unpackings(sheet, shapes["packed_layers"]))

    def where(i: int) -> str:
        if columns.common.frozen == "spread":
            return f"each of {ranks.size[i]} data ranks rests with a part, and gathers the rest (a term of its own)"
        whole = "they are whole on every device, so none is gathered"
        if ranks.size[i] == 1:
            return whole
        saved = NF4_VALUE_BYTES * values[i] * (1 - 1 / ranks.size[i])
        return (
            f"{whole}: frozen = spread over {ranks.size[i]} data ranks would save {format_bytes(saved)} a device, and "
            f"gathering take {format_seconds(float(gathering[i]))} a step"
        )

    return [
        Component("unpacking of four bits", "casts", sheet.passes_made * number,
                  SOURCES.index(rates.memory_source), text, "counted elements over bandwidth",
                  clock="forward_backward")
    ]  # fmt: skip
