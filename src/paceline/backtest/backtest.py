"""Backtest: forecasts beside published or own measurements, file by file, with the reason for every row not scored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from paceline.backtest.machine import Machines
from paceline.backtest.price import Priced, constants_sha256, price_cases
from paceline.backtest.rows import Reader, with_one_micro_batch
from paceline.backtest.schema import Origin, StepRow
from paceline.backtest.score import (
    ChoiceScore,
    Errors,
    MemoryScore,
    Scored,
    TimeScore,
    choice_score,
    errors_of,
    grouped,
    machine_of,
    memory_score,
    null_rates,
    time_score,
    timed,
)
from paceline.backtest.step_parts import Compared, compare_collectives, compare_layers, compare_power, compare_runs
from paceline.backtest.table import MeasuredTable, read_table
from paceline.backtest.words.plausible import another_unit
from paceline.plan.cost.constants import Constants


@dataclass(frozen=True)
class NullRate:
    """The null of an accelerator in a precision: the MFU that it takes all rows to have."""

    accelerator: str
    precision: str
    mfu: float  # NaN where the peak is unknown
    tflops_per_device: float
    rows: int


@dataclass(frozen=True)
class FileScore:
    """What a file's rows say of the forecasts. Scores that do not apply to the file's kind are None."""

    file: str
    kind: str
    rows: int
    scored: int
    not_scored: dict[str, int]
    marks: dict[str, int]  # what was assumed, and for how many of the scored rows
    ignored_columns: tuple[str, ...]
    step_time: TimeScore | None = None
    memory: MemoryScore | None = None
    choice: ChoiceScore | None = None
    null: tuple[NullRate, ...] = ()
    power: Errors | None = None
    collectives: Errors | None = None
    layers: Errors | None = None
    energy: Errors | None = None
    learnt: TimeScore | None = None  # of one's own runs, each forecast after learning from those before it


@dataclass(frozen=True)
class Unscored:
    """A row that was not scored, and why."""

    row: Origin
    reason: str


@dataclass(frozen=True)
class FileResult:
    """A file's score with the rows that it rests on."""

    score: FileScore
    steps: tuple[Scored, ...]
    parts: tuple[Compared, ...]
    unscored: tuple[Unscored, ...]


@dataclass(frozen=True)
class Backtest:
    """The scores of all files, and the hash of the constants that were scored."""

    constants_sha256: str
    files: tuple[FileResult, ...]

    def steps(self) -> list[Scored]:
        """Return the scored steps of all files."""
        return [item for file in self.files for item in file.steps]


def run_backtest(paths: Sequence[Path]) -> Backtest:
    """Return the backtest of the tables in these files. Raises DataError for a file that is no table."""
    tables = [read_table(path) for path in paths]
    reader = Reader()
    return Backtest(constants_sha256(), tuple(_score_file(table, reader) for table in tables))


# Kind of table -> (the score it makes, how its rows are compared).
PARTS: dict[str, tuple[str, Callable[[Any, Machines], tuple[list[Compared], list[tuple[Origin, str]]]]]] = {
    "collectives": ("collectives", compare_collectives),
    "layers": ("layers", compare_layers),
    "power": ("power", compare_power),
    "runs": ("energy", compare_runs),
}


def _score_file(table: MeasuredTable, reader: Reader) -> FileResult:
    return score_steps(table, reader) if table.kind == "steps" else _score_parts(table, reader)


def score_steps(table: MeasuredTable, reader: Reader, constants: Constants | None = None) -> FileResult:
    """Return the scores of a table of steps, by these constants or by those that came with this version."""
    rows = cast(tuple[StepRow, ...], table.rows)
    found = [(row, *reader.case(row)) for row in rows]
    cases = with_one_micro_batch([case for _, case, _ in found if case is not None])
    unscored = [Unscored(row, reason) for row, case, reason in found if case is None]
    scored = []
    for case, priced in zip(cases, price_cases(cases, constants), strict=True):
        reason = priced if isinstance(priced, str) else another_unit(case.step_seconds, priced.step_seconds.value)
        if isinstance(priced, Priced) and not reason:
            scored.append(Scored(case, priced))
        else:
            unscored.append(Unscored(case.row, reason))
    score = FileScore(
        **_head(table, len(scored), unscored),
        marks=_marks(item.case for item in scored),
        step_time=time_score(scored),
        memory=memory_score(scored),
        choice=choice_score(scored),
        null=_null(scored),
    )
    return FileResult(score, tuple(scored), (), tuple(unscored))


def _head(table: MeasuredTable, scored: int, unscored: Sequence[Unscored]) -> dict[str, Any]:
    return {
        "file": table.file,
        "kind": table.kind,
        "rows": len(table.rows),
        "scored": scored,
        "not_scored": dict(Counter(item.reason for item in unscored).most_common()),
        "ignored_columns": table.ignored_columns,
    }


def _marks(cases: Any) -> dict[str, int]:
    return dict(Counter(mark for case in cases for mark in case.marks).most_common())


def _null(scored: Sequence[Scored]) -> tuple[NullRate, ...]:
    groups = grouped(timed(scored), machine_of)
    rates = null_rates(timed(scored))
    return tuple(
        NullRate(name, precision, rates[name, precision] / _peak(items[0]), rates[name, precision] / 1e12, len(items))
        for (name, precision), items in groups.items()
    )


def _peak(item: Scored) -> float:
    return item.case.cluster.device.peak_flops.get(item.priced.plan.precision, math.nan)


def _score_parts(table: MeasuredTable, reader: Reader) -> FileResult:
    name, compare = PARTS[table.kind]
    found, unscored = compare(table.rows, reader.machines)
    reasons = [Unscored(row, reason) for row, reason in unscored]
    errors: dict[str, Any] = {name: errors_of([item.error for item in found])}
    score = FileScore(**_head(table, len(found), reasons), marks=_marks(found), **errors)
    return FileResult(score, (), tuple(found), tuple(reasons))


@dataclass(frozen=True)
class Breakdown:
    """The step times of the rows that have one source, accelerator or model, over all files."""

    name: str
    step_time: TimeScore
    choice: ChoiceScore


def break_down(backtest: Backtest, by: str) -> list[Breakdown]:
    """Return the scores of step times by `source`, `accelerator` or `model`, over all files."""

    def name(item: Scored) -> str:
        return item.case.cluster.device.name if by == "accelerator" else str(getattr(item.case.row, by))

    groups = grouped(timed(backtest.steps()), name)
    return [Breakdown(key, time_score(items), choice_score(items)) for key, items in sorted(groups.items())]
