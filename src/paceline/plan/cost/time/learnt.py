"""What finished runs add to the formulas: one more term of time and of memory, and narrower intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.plan.cost.columns import Floats
from paceline.plan.cost.components import MEASURED, Component, only, total, without
from paceline.plan.cost.intervals import memory_spread, time_spread
from paceline.plan.cost.sheet import Sheet

# Launches that take longer than the device's work by this part of the work hide it whole: nothing of the work is seen.
# Assumed; in proportion below, so that plans near the balance of the two are kin to both sides.
HIDDEN = 0.5
LAW = "Gaussian process over runs (Rasmussen & Williams 2006, equation 2.25)"


def learnt_time(sheet: Sheet, formulas: Sequence[Component]) -> list[Component]:
    """Return what runs here add to the step times that formulas give, negative where they were faster; [] without."""
    learnt = sheet.context.learnt
    if learnt is None:
        return []
    hosts = host_shares(sheet, formulas)
    mean, _ = learnt.correct_time(sheet.columns, time_spread(sheet, formulas), hosts)
    return [_column(sheet, total(formulas), mean, hosts)]


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
    learnt, formulas = sheet.context.learnt, time[:-1]
    if learnt is None:
        return None
    return learnt.correct_time(sheet.columns, time_spread(sheet, formulas), host_shares(sheet, formulas))[1]


def host_shares(sheet: Sheet, formulas: Sequence[Component]) -> Floats:
    """Return which part of every plan's step the host decides, 0 to 1; 0 on CPUs, which start operators themselves.

    That is what the host adds to the device's work, and that work as far as it is hidden behind longer launches.
    Example: 3 ms of fixed work, launches 2 ms longer than 4 ms of work: (3 + 2 + 4) / 9 = 1, and with launches that are
    1 ms longer (3 + 1 + 4 x 0.5) / 8 = 0.75.
    """
    if sheet.rates.device.kind == "cpu":
        return np.zeros(len(sheet.columns))
    passes = [column for column in formulas if column.clock == "forward_backward"]
    work, longer = total(without(passes, "host")), total(only(passes, "host"))
    hidden = np.minimum(work, longer / HIDDEN)
    found: Floats = np.nan_to_num((total(only(formulas, "host")) + hidden) / total(formulas))
    return found


def learnt_memory_spread(sheet: Sheet) -> Floats | None:
    """Return the standard deviation of log(measured / forecast) of every plan's memory after learning; None without."""
    learnt = sheet.context.learnt
    if learnt is None or learnt.memory is None:
        return None
    return learnt.correct_memory(sheet.columns, memory_spread(sheet))[1]


def _column(sheet: Sheet, values: Floats, mean: Floats, hosts: Floats | None = None) -> Component:
    learnt = sheet.context.learnt
    assert learnt is not None
    return Component(
        learnt.name,
        "learnt",
        values * np.expm1(mean),
        MEASURED,
        lambda i: f"sum of the other terms x ({math.exp(mean[i]):.3f} - 1): {learnt.words(sheet.columns, i, hosts)}",
        LAW,
    )
