"""What finished runs add to the formulas: one more term of time and of memory, and narrower intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.cluster.cluster import SOURCES
from paceline.plan.cost.columns import Floats
from paceline.plan.cost.inputs import Column, Sheet, total
from paceline.plan.learn.process import Z80

# Relative half-width of the 80 % interval that the model itself earns, by how its figures are known.
TIME_ERROR = {"measured": 0.20, "published": 0.35, "assumed": 0.60, "unknown": math.nan}
LAW = "Gaussian process over runs (Rasmussen & Williams 2006, equation 2.25)"
MEASURED = SOURCES.index("measured")


def time_spread(sheet: Sheet, formulas: Sequence[Column]) -> Floats:
    """Return the standard deviation of log(measured / forecast) that every plan's unlearnt step time states."""
    by_source = np.array([TIME_ERROR[source] for source in SOURCES])
    errors = [np.where(column.values == 0, 0.0, column.values * by_source[column.known]) for column in formulas]
    error = np.sum(errors, axis=0) / total(formulas)
    spread: Floats = np.log1p(np.hypot(error, sheet.rates.relative_spread)) / Z80
    return spread


def memory_spread(sheet: Sheet) -> Floats:
    """Return the same of every plan's memory."""
    return np.full(len(sheet.columns), sheet.context.constants.memory_80 / Z80)


def learnt_time(sheet: Sheet, formulas: Sequence[Column]) -> list[Column]:
    """Return what runs here add to the step times that formulas give, negative where they were faster; [] without."""
    learnt = sheet.context.learnt
    if learnt is None:
        return []
    mean, _ = learnt.correct_time(sheet.columns, time_spread(sheet, formulas))
    return [_column(sheet, total(formulas), mean)]


def learnt_memory(sheet: Sheet, formulas: Sequence[Column]) -> list[Column]:
    """Return the same of the bytes on every plan's fullest device."""
    learnt = sheet.context.learnt
    if learnt is None or learnt.memory is None:
        return []
    mean, _ = learnt.correct_memory(sheet.columns, memory_spread(sheet))
    return [_column(sheet, total(formulas), mean)]


def learnt_time_spread(sheet: Sheet, time: Sequence[Column]) -> Floats | None:
    """Return the standard deviation of log(measured / forecast) of step times after learning; None without it.

    `time` are all terms, the learnt one included.
    """
    learnt = sheet.context.learnt
    return None if learnt is None else learnt.correct_time(sheet.columns, time_spread(sheet, time[:-1]))[1]


def learnt_memory_spread(sheet: Sheet) -> Floats | None:
    """Return the same of every plan's memory."""
    learnt = sheet.context.learnt
    if learnt is None or learnt.memory is None:
        return None
    return learnt.correct_memory(sheet.columns, memory_spread(sheet))[1]


def _column(sheet: Sheet, values: Floats, mean: Floats) -> Column:
    learnt = sheet.context.learnt
    assert learnt is not None
    return Column(
        learnt.name,
        values * np.expm1(mean),
        MEASURED,
        lambda i: f"sum of the other terms x ({math.exp(mean[i]):.3f} - 1): {learnt.words(sheet.columns, i)}",
        LAW,
    )
