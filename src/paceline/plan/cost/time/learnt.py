"""What finished runs add to the formulas: one more term of time and of memory, and narrower intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.plan.cost.columns import Floats
from paceline.plan.cost.components import Component, total
from paceline.plan.cost.intervals import memory_spread, time_spread
from paceline.plan.cost.sheet import Sheet
from paceline.spec.cluster import SOURCES

LAW = "Gaussian process over runs (Rasmussen & Williams 2006, equation 2.25)"
MEASURED = SOURCES.index("measured")


def learnt_time(sheet: Sheet, formulas: Sequence[Component]) -> list[Component]:
    """Return what runs here add to the step times that formulas give, negative where they were faster; [] without."""
    learnt = sheet.context.learnt
    if learnt is None:
        return []
    mean, _ = learnt.correct_time(sheet.columns, time_spread(sheet, formulas))
    return [_column(sheet, total(formulas), mean)]


def learnt_memory(sheet: Sheet, formulas: Sequence[Component]) -> list[Component]:
    """Return what runs here add to the bytes that formulas give for every plan's fullest device; [] without."""
    learnt = sheet.context.learnt
    if learnt is None or learnt.memory is None:
        return []
    mean, _ = learnt.correct_memory(sheet.columns, memory_spread(sheet))
    return [_column(sheet, total(formulas), mean)]


def learnt_time_spread(sheet: Sheet, time: Sequence[Component]) -> Floats | None:
    """Return the standard deviation of log(measured / forecast) of step times after learning; None without it.

    `time` are all terms, the learnt one included.
    """
    learnt = sheet.context.learnt
    return None if learnt is None else learnt.correct_time(sheet.columns, time_spread(sheet, time[:-1]))[1]


def learnt_memory_spread(sheet: Sheet) -> Floats | None:
    """Return the standard deviation of log(measured / forecast) of every plan's memory after learning; None without."""
    learnt = sheet.context.learnt
    if learnt is None or learnt.memory is None:
        return None
    return learnt.correct_memory(sheet.columns, memory_spread(sheet))[1]


def _column(sheet: Sheet, values: Floats, mean: Floats) -> Component:
    learnt = sheet.context.learnt
    assert learnt is not None
    return Component(
        learnt.name,
        "learnt",
        values * np.expm1(mean),
        MEASURED,
        lambda i: f"sum of the other terms x ({math.exp(mean[i]):.3f} - 1): {learnt.words(sheet.columns, i)}",
        LAW,
    )
