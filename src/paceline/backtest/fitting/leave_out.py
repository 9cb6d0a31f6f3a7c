"""Leave one source out: a table of a source is forecast with constants that were fitted to all other sources.

What a new table is to expect. The constants are fitted on tables that may be fitted on, less those that share a source
with the table that is scored; intervals are as wide as what is missed of the other tables so left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.backtest.backtest import FileResult, score_steps
from paceline.backtest.fitting.fit import FittedTable, Fitting, Residuals, quantile, seen_in
from paceline.backtest.price import Priced
from paceline.backtest.rows import Case, Reader
from paceline.backtest.score import Scored, timed
from paceline.backtest.statistics import mean, median
from paceline.backtest.table import MeasuredTable, read_table
from paceline.plan.cost.columns import Floats
from paceline.plan.cost.constants import Constants
from paceline.plan.cost.intervals import waiting_parts
from paceline.plan.cost.unknown import time_widths

SCALES = (8, 64, 512)  # bounds of numbers of devices that errors are told by: a node, a rack or so, a pod


@dataclass(frozen=True)
class ScaleErrors:
    """Errors of step times on up to so many devices, and on more than the bound before; of the last, on any more."""

    devices: int  # the most of the rows
    rows: int
    tables: int
    mape: float
    bias: float  # the median error


@dataclass(frozen=True)
class LeftOut:
    """The scores of tables each of which the constants were not fitted on, and what they come to over all tables."""

    files: tuple[FileResult, ...]
    median_mape: float  # of step times, over tables
    worst_mape: float
    worse_than_null: int  # tables that the median MFU of their chip forecasts better
    tables: int
    coverage_80: float  # of step times, over rows
    coverage_95: float
    by_devices: tuple[ScaleErrors, ...] = ()


def leave_sources_out(paths: Sequence[Path], fit_on: Sequence[Path]) -> LeftOut:
    """Return the scores of tables of steps, each with constants fitted on `fit_on` without its source."""
    reader = Reader()
    tables = [table for path in paths if (table := read_table(path)).kind == "steps"]
    fitting = Fitting([read_table(path) for path in fit_on], reader)
    fitted = [_without(table, fitting) for table in tables]
    first = [score_steps(table, reader, constants) for table, constants in zip(tables, fitted, strict=True)]
    missed = [_missed(result.steps, constants) for result, constants in zip(first, fitted, strict=True)]
    files = []
    for place, (table, constants) in enumerate(zip(tables, fitted, strict=True)):
        others = [one for at, one in enumerate(missed) if at != place and len(one.values)]
        if others:
            constants = replace(constants, time_80=quantile(others, 0.80), time_95=quantile(others, 0.95))
        files.append(score_steps(table, reader, constants))
    return _summary(files)


def _without(table: MeasuredTable, fitting: Fitting) -> Constants:
    """Return the constants fitted without the table's sources, with what the tables left had."""
    sources = {getattr(row, "source", "") for row in table.rows}
    left_out = [part for part in fitting.parts if part.file == table.file or part.sources & sources]
    kept: list[FittedTable] = [part for part in fitting.parts if part not in left_out]
    return replace(fitting.without(left_out), seen=seen_in(kept))


def _missed(steps: Sequence[Scored], constants: Constants) -> Residuals:
    """Return what is missed of a table beyond what is known to be unknown of its rows: half-widths as logarithms."""
    found = [
        beyond_unknown(math.log(1 + (item.time_error or 0.0)), item.case, item.priced, constants)
        for item in timed(steps)
    ]
    values: Floats = np.array(found, dtype=np.float64)
    return Residuals(str(steps[0].case.row.file) if steps else "", values)


def beyond_unknown(miss: float, case: Case, priced: Priced, constants: Constants) -> float:
    """Return what a forecast misses beyond what is known to be unknown of the row, in quadrature of logarithms.

    `miss` is the logarithm of the forecast over what was measured: of a step that took longer it is negative, and what
    is unknown upwards counts.

    Example: of a step that took e^0.5 of its forecast, of a program that no table had (0.35) and with launches for a
    fifth of it (0.16, and 0.24 of what they would take by themselves), 0.21 is left; of one that took e^-0.4 of it, of
    which three tenths of these are unknown, 0.376.
    """
    bare, device, cluster = replace(constants, time_80=0.0, time_95=0.0), case.cluster.device, case.cluster
    precision, program = priced.plan.precision, priced.program
    experts = bool(case.row.experts)
    widths = time_widths(bare, device.name, precision, program, cluster.devices, device.assumed_rates, experts=experts)
    parts = waiting_parts([(term.kind, term.seconds) for term in priced.terms])
    of_step = widths.of_step(*parts, priced.starting, is_open=case.is_open)
    expected = of_step.narrow if miss < 0 else of_step.downwards[0]
    return math.sqrt(max(0.0, miss**2 - expected**2))


def _summary(files: Sequence[FileResult]) -> LeftOut:
    scores = [file.score.step_time for file in files if file.score.step_time and file.score.step_time.n]
    rows = sum(score.n for score in scores)
    return LeftOut(
        files=tuple(files),
        median_mape=median(score.mape for score in scores),
        worst_mape=max((score.mape for score in scores), default=math.nan),
        worse_than_null=sum(score.mape > score.null_mape for score in scores),
        tables=len(scores),
        coverage_80=mean(score.coverage_80 for score in scores for _ in range(score.n)) if rows else math.nan,
        coverage_95=mean(score.coverage_95 for score in scores for _ in range(score.n)) if rows else math.nan,
        by_devices=by_devices([item for file in files for item in file.steps]),
    )


def by_devices(steps: Sequence[Scored]) -> tuple[ScaleErrors, ...]:
    """Return the errors of step times by the number of devices, of numbers that there are rows of."""
    rows, found, least = timed(steps), list[ScaleErrors](), 0.0
    for most in (*SCALES, math.inf):
        members = [item for item in rows if least < item.case.cluster.devices <= most]
        least = most
        if members:
            errors = [item.time_error or 0.0 for item in members]
            found.append(
                ScaleErrors(
                    devices=max(item.case.cluster.devices for item in members),
                    rows=len(members),
                    tables=len({item.case.row.file for item in members}),
                    mape=mean(map(abs, errors)),
                    bias=median(errors),
                )
            )
    return tuple(found)


def left_out_lines(found: LeftOut) -> list[str]:
    """Return what was found, for people."""
    lines = ["each table by constants that were fitted without its source:"]
    for file in found.files:
        score = file.score.step_time
        if score and score.n:
            lines.append(
                f"  {Path(file.score.file).stem:28}{score.n:6} rows, MAPE {score.mape:6.1%}, bias {score.bias:+6.1%}, "
                f"null {score.null_mape:6.1%}, 80 % hold {score.coverage_80:4.0%}, 95 % hold {score.coverage_95:4.0%}"
            )
    lines += [
        f"  up to {one.devices:6,} devices: {one.rows:5} rows of {one.tables} tables, MAPE {one.mape:.1%}, median "
        f"{one.bias:+.1%}"
        for one in found.by_devices
    ]
    return [
        *lines,
        f"  median table {found.median_mape:.1%}, worst {found.worst_mape:.1%}; {found.worse_than_null} of "
        f"{found.tables} worse than the null; over all rows 80 % hold {found.coverage_80:.0%}, 95 % hold "
        f"{found.coverage_95:.0%}",
    ]
