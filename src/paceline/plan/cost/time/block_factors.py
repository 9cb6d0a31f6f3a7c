"""Factors from what was measured of the task itself: measured seconds over those of the formulas, by shape of block."""

from __future__ import annotations

import numpy as np

from paceline.plan.cost.columns import Floats
from paceline.plan.cost.model_parts import Shapes
from paceline.plan.cost.rates import Rates
from paceline.plan.learn.task_measurement import TaskMeasurement, measured_plan, measured_shapes
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile

SMALLEST, LARGEST = 0.1, 30.0  # factors beyond are no calibration: the time went elsewhere
CAST_BYTES = 12.0  # of casting a weight once forward and once backward, on one device


def sheet_plan(measurement: TaskMeasurement) -> Plan:
    """Return the plan that was measured."""
    return measured_plan(Plan(micro_batch=measurement.micro_batch, precision=measurement.precision))


def block_factors(
    profile: ModelProfile, shapes: Shapes, rates: Rates, sample_seconds: Floats, measurement: TaskMeasurement
) -> Floats:
    """Return the factor of every shape. `sample_seconds` are the formulas' for one sample under `sheet_plan`.

    Casts of weights, which are a term of their own, are taken off what was measured.
    """
    modelled = sample_seconds * measurement.micro_batch
    casts = shapes["parameters"] * (0.0 if rates.element_bytes >= 4 else CAST_BYTES / rates.memory_rate)
    repeated = shapes.repeated > 0
    factors = np.ones(len(shapes.blocks))
    places = {shape: index for index, shape in enumerate(shapes.blocks)}
    for shape, seconds in zip(measured_shapes(profile), measurement.block_seconds, strict=True):
        at = places[shape]
        factors[at] = (seconds - casts[at]) / modelled[at]
    rest = float(shapes.all_counts[~repeated] @ modelled[~repeated])
    beside = measurement.rest_seconds - float(shapes.all_counts[~repeated] @ casts[~repeated])
    factors[~repeated] = beside / rest if rest else 1.0
    clipped: Floats = np.clip(factors, SMALLEST, LARGEST)
    return clipped


def measured_text(measurement: TaskMeasurement, at_home: bool = True) -> str:
    """Return the formula's mention of what was measured, on this machine or on a node of a cluster elsewhere."""
    where = "here" if at_home else f"on {measurement.machine}"
    return f" x factors of its blocks, measured {where} at micro-batch {measurement.micro_batch}"
