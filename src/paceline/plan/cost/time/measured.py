"""Factors from what was measured of the task itself: measured seconds over those of the formulas, by shape of block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.plan.cost.columns import Floats
from paceline.plan.learn.measured import TaskMeasurement, measured_plan, measured_shapes
from paceline.spec.plan import Plan

if TYPE_CHECKING:
    from paceline.plan.cost.inputs import Sheet

SMALLEST, LARGEST = 0.1, 30.0  # factors beyond are no calibration: the time went elsewhere
CAST_BYTES = 12.0  # of casting a weight once forward and once backward, on one device


def sheet_plan(measurement: TaskMeasurement) -> Plan:
    """Return the plan that was measured."""
    return measured_plan(Plan(micro_batch=measurement.micro_batch, precision=measurement.precision))


def formula_seconds(sheet: Sheet) -> Floats:
    """Return what the formulas say of one sample's forward and backward in every shape (plan x shape), no factor in it.

    On a CPU the host that starts operators is the device that computes them; on others it works beside it.
    """
    seconds = 3 * sheet.product_seconds + sheet.attention_seconds + 3 * sheet.moving_seconds
    if sheet.rates.device.kind == "cpu":
        launches = 3 * sheet.context.shapes["operators"] * sheet.rates.launch_seconds.value
        seconds = seconds + launches / sheet.columns.micro_batch[:, None]
    return seconds


def block_factors(sheet: Sheet, measurement: TaskMeasurement) -> Floats:
    """Return the factor of every shape. `sheet` is that of `sheet_plan`.

    Casts of weights, which are a term of their own, are taken off what was measured.
    """
    shapes, rates = sheet.context.shapes, sheet.rates
    modelled = formula_seconds(sheet)[0] * measurement.micro_batch
    casts = shapes["parameters"] * (0.0 if rates.element_bytes >= 4 else CAST_BYTES / rates.memory_rate)
    repeated = shapes.repeated > 0
    factors = np.ones(len(shapes.blocks))
    places = {shape: index for index, shape in enumerate(shapes.blocks)}
    for shape, seconds in zip(measured_shapes(sheet.context.profile), measurement.block_seconds, strict=True):
        at = places[shape]
        factors[at] = (seconds - casts[at]) / modelled[at]
    rest = float(shapes.all_counts[~repeated] @ modelled[~repeated])
    beside = measurement.rest_seconds - float(shapes.all_counts[~repeated] @ casts[~repeated])
    factors[~repeated] = beside / rest if rest else 1.0
    clipped: Floats = np.clip(factors, SMALLEST, LARGEST)
    return clipped


def measured_text(measurement: TaskMeasurement) -> str:
    """Return the formula's mention of what was measured."""
    return f" x factors of its blocks, measured here at micro-batch {measurement.micro_batch}"
