"""Scores of forecasts against measurements. Errors are relative, forecast / measured - 1, as fractions."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.backtest.price import Priced
from paceline.backtest.rows import Case
from paceline.backtest.statistics import mean, median, spearman

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
SMALLEST_GROUP = 3  # rows among which a choice is scored


@dataclass(frozen=True)
class Scored:
    """A case with its forecast."""

    case: Case
    priced: Priced

    @property
    def time_error(self) -> float | None:
        """The relative error of the step's seconds; None where the row's time is not scored."""
        measured = self.case.step_seconds
        return None if measured is None else self.priced.step_seconds.value / measured - 1

    @property
    def memory_error(self) -> float | None:
        """The relative error of a device's memory; None where the row has none."""
        measured = self.case.memory_bytes
        return None if measured is None else self.priced.memory_bytes / measured - 1


@dataclass(frozen=True)
class Errors:
    """How far forecasts are off: mean and median of the absolute errors, mean error, largest absolute error."""

    n: int
    mape: float
    median: float
    bias: float
    worst: float


@dataclass(frozen=True)
class TimeScore(Errors):
    """Errors of step times; the null's error on the same rows; how often intervals hold the measurement."""

    null_mape: float
    coverage_80: float
    coverage_95: float


@dataclass(frozen=True)
class MemoryScore(Errors):
    """Errors of memory per device, and what was called feasible: out of memory, failed for whatever cause, ran."""

    oom_rows: int
    oom_called_feasible: int
    failed_rows: int
    failed_called_feasible: int
    ok_rows: int
    ok_called_infeasible: int
    coverage_80: float = math.nan
    coverage_95: float = math.nan


@dataclass(frozen=True)
class ChoiceScore:
    """How well forecasts rank layouts of one model, sequence length, batch and number of devices.

    Regret is how much slower the row that is forecast to be fastest was than the fastest one.
    """

    groups: int
    rows: int
    spearman_median: float
    spearman_worst: float
    regret_median: float
    regret_worst: float


def errors_of(errors: Sequence[float]) -> Errors:
    """Return the summary of relative errors; NaN of none."""
    sizes = [abs(error) for error in errors]
    return Errors(len(errors), mean(sizes), median(sizes), mean(errors), max(sizes, default=math.nan))


def timed(scored: Iterable[Scored]) -> list[Scored]:
    """Return those whose time is scored."""
    return [item for item in scored if item.case.step_seconds is not None]


def time_score(scored: Sequence[Scored]) -> TimeScore:
    """Return the score of step times over the rows that have one."""
    rows = timed(scored)
    errors = errors_of([error for item in rows if (error := item.time_error) is not None])
    null = null_errors(rows)
    return TimeScore(
        **vars(errors),
        null_mape=mean(abs(error) for error in null),
        coverage_80=mean(_within(item, 80) for item in rows),
        coverage_95=mean(_within(item, 95) for item in rows),
    )


def _within(item: Scored, share: int) -> float:
    interval, measured = item.priced.step_seconds, item.case.step_seconds
    assert measured is not None
    low, high = (interval.low_80, interval.high_80) if share == 80 else (interval.low_95, interval.high_95)
    return float(low <= measured <= high)


def flops_rate(item: Scored) -> float:
    """Return the measured FLOP/s of a device, in the null's convention."""
    assert item.case.step_seconds is not None
    return item.case.flops_per_step / item.case.step_seconds / item.case.cluster.devices


def null_rates(rows: Sequence[Scored]) -> dict[tuple[str, str], float]:
    """Return the null: by accelerator and precision the median FLOP/s of a device over these very rows."""
    return {key: median(flops_rate(item) for item in members) for key, members in grouped(rows, machine_of).items()}


def machine_of(item: Scored) -> tuple[str, str]:
    """Return the accelerator and the precision of a row."""
    return item.case.cluster.device.name, item.priced.plan.precision


def null_seconds(rows: Sequence[Scored]) -> list[float]:
    """Return the step time of each row if all reached their accelerator's median MFU: no knowledge of the layout."""
    rates = null_rates(rows)
    return [item.case.flops_per_step / rates[machine_of(item)] / item.case.cluster.devices for item in rows]


def null_errors(rows: Sequence[Scored]) -> list[float]:
    """Return the null's relative errors on these rows."""
    return [
        seconds / item.case.step_seconds - 1
        for seconds, item in zip(null_seconds(rows), rows, strict=True)
        if item.case.step_seconds is not None
    ]


def memory_score(scored: Sequence[Scored]) -> MemoryScore:
    """Return the score of memory per device and of feasibility over all rows."""
    errors = errors_of([error for item in scored if (error := item.memory_error) is not None])

    def count(status: str, fits: bool | None = None) -> int:
        rows = [item for item in scored if item.case.row.status == status]
        return sum(fits is None or item.priced.fits == fits for item in rows)

    return MemoryScore(
        **vars(errors),
        oom_rows=count("oom"),
        oom_called_feasible=count("oom", True),
        failed_rows=count("failed"),
        failed_called_feasible=count("failed", True),
        ok_rows=count("ok"),
        ok_called_infeasible=count("ok", False),
        coverage_80=mean(_memory_within(item, 0) for item in scored if item.memory_error is not None),
        coverage_95=mean(_memory_within(item, 1) for item in scored if item.memory_error is not None),
    )


def _memory_within(item: Scored, which: int) -> float:
    """Return whether an interval of memory holds what was measured: the 80 % one, or the 95 % one."""
    missed = abs(math.log(1 + (item.memory_error or 0.0)))
    return float(missed <= item.priced.memory_widths[which])


def choice_score(scored: Sequence[Scored]) -> ChoiceScore:
    """Return how well forecasts rank the rows of each group, over groups of at least three rows and two plans."""
    groups = [
        rows
        for rows in grouped(timed(scored), lambda item: item.case.group).values()
        if len(rows) >= SMALLEST_GROUP and len({item.priced.plan for item in rows}) > 1
    ]
    correlations, regrets = [], []
    for rows in groups:
        measured = [item.case.step_seconds or math.nan for item in rows]
        forecast = [item.priced.step_seconds.value for item in rows]
        correlation = spearman(forecast, measured)
        correlations += [correlation] if math.isfinite(correlation) else []
        regrets.append(measured[forecast.index(min(forecast))] / min(measured) - 1)
    return ChoiceScore(
        groups=len(groups),
        rows=sum(map(len, groups)),
        spearman_median=median(correlations),
        spearman_worst=min(correlations, default=math.nan),
        regret_median=median(regrets),
        regret_worst=max(regrets, default=math.nan),
    )


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by key, in the order in which keys first occur."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
