"""Leave one source out: a table of a source is forecast with constants that were fitted to all other sources.

What a new table is to expect. The constants are fitted on tables that may be fitted on, less those that share a source
with the table that is scored; intervals are as wide as the sources of other tables so left out differ, and their rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.backtest.backtest import FileResult, score_steps
from paceline.backtest.fitting.fit import FEWEST, FittedTable, Fitting, seen_in
from paceline.backtest.rows import Reader
from paceline.backtest.score import Scored, timed
from paceline.backtest.statistics import mean, median
from paceline.backtest.table import MeasuredTable, read_table
from paceline.plan.cost.columns import Floats
from paceline.plan.cost.constants import Constants
from paceline.spec.forecast import Z80, Z95

DEVIATION = 1.4826  # standard deviations of a normal law in one median deviation
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
    missed = [(_missed(result.steps), _sources(table)) for result, table in zip(first, tables, strict=True)]
    files = []
    for place, (table, constants) in enumerate(zip(tables, fitted, strict=True)):
        own = _sources(table) - {""}
        others = [values for at, (values, sources) in enumerate(missed) if at != place and not sources & own]
        narrow, wide = widths_of_a_new_source(others)
        if math.isfinite(narrow):
            constants = replace(constants, time_80=narrow, time_95=wide)
        files.append(score_steps(table, reader, constants))
    return _summary(files)


def _without(table: MeasuredTable, fitting: Fitting) -> Constants:
    """Return the constants fitted without the table's sources, with what the tables left had."""
    sources = _sources(table)
    left_out = [part for part in fitting.parts if part.file == table.file or part.sources & sources]
    kept: list[FittedTable] = [part for part in fitting.parts if part not in left_out]
    return replace(fitting.without(left_out), seen=seen_in(kept))


def widths_of_a_new_source(missed: Sequence[Floats]) -> tuple[float, float]:
    """Return the half-widths of the 80 % and the 95 % interval of a source that nobody has seen, as logarithms.

    `missed` has log(forecast / measured) of the rows of each other table. Rows of one table miss alike, so a miss is
    one of the source and one of the row, each with a variance of its own (a random effect: Gelman et al. 2013, Bayesian
    Data Analysis, chapter 5). Sources' is told by the median rows of tables, rows' by how far they lie from these, both
    as median deviations, since some tables are off for reasons of their own. What is known to be unknown of a row
    (plan/cost/unknown.py) comes in addition. No table tells anything with less than FEWEST rows.

    Example: median rows 0.05 off, and rows 0.05 off their median, are 1.2816 x 1.4826 x sqrt(0.05^2 + 0.05^2) = 0.134.
    """
    middles = [(values, float(np.median(values))) for values in missed if len(values) >= FEWEST]
    if not middles:
        return math.inf, math.inf
    of_sources = median(abs(middle) for _, middle in middles)
    of_rows = median(float(np.median(np.abs(values - middle))) for values, middle in middles)
    deviation = DEVIATION * math.hypot(of_sources, of_rows)
    return Z80 * deviation, Z95 * deviation


def _missed(steps: Sequence[Scored]) -> Floats:
    """Return what is missed of a table: log(forecast / measured) of each row."""
    return np.array([math.log(1 + (item.time_error or 0.0)) for item in timed(steps)], dtype=np.float64)


def _sources(table: MeasuredTable) -> set[str]:
    return {getattr(row, "source", "") for row in table.rows}


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
