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
# Of unpacking a value of four bits (task/adapt/nf4.py): half a byte is read, an index of two bytes is written and read,
# the fp32 value is written and read, and written times its scale.
UNPACKED_BYTES = 0.5 + 2 + 2 + 4 + 4 + 4
FP32 = 4
CAST_BYTES = 12.0  # of casting a weight once forward and once backward, on one device


def sheet_plan(measurement: TaskMeasurement) -> Plan:
    """Return the plan that was measured."""
    return measured_plan(Plan(micro_batch=measurement.micro_batch, precision=measurement.precision))


def block_factors(
    profile: ModelProfile, shapes: Shapes, rates: Rates, sample_seconds: Floats, measurement: TaskMeasurement
) -> Floats:
    """Return the factor of every shape. `sample_seconds` are the formulas' for one sample under `sheet_plan`.

    Casts of weights, and unpacking those in four bits, which are terms of their own, are taken off what was measured.
    """
    modelled = sample_seconds * measurement.micro_batch
    casts = shapes["parameters"] * (0.0 if rates.element_bytes >= 4 else CAST_BYTES / rates.memory_rate)
    casts = casts + shapes["unpacks"] * unpack_seconds(shapes, rates)
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


def unpack_seconds(shapes: Shapes, rates: Rates) -> Floats:
    """Return the seconds of unpacking the weights in four bits of every different block once, with a cast from fp32."""
    cast = 0 if rates.element_bytes == FP32 else FP32 + rates.element_bytes
    seconds: Floats = (UNPACKED_BYTES + cast) * shapes["packed_parameters"] / rates.memory_rate
    return seconds


def measured_text(measurement: TaskMeasurement, at_home: bool = True) -> str:
    """Return the formula's mention of what was measured, on this machine or on a node of a cluster elsewhere."""
    where = "here" if at_home else f"on {measurement.machine}"
    return f" x factors of its blocks, measured {where} at micro-batch {measurement.micro_batch}"
