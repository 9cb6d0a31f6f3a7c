"""A backtest as text for people, and as a table of every row's forecast beside its measurement."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from paceline.backtest.backtest import Backtest, Breakdown, FileResult, FileScore
from paceline.backtest.schema import StepRow
from paceline.backtest.score import ChoiceScore, Errors, Scored, TimeScore, null_seconds, timed
from paceline.backtest.step_parts import Compared
from paceline.errors import StorageError
from paceline.units import plural

NULL_TEXT = (
    "null: every row at the median MFU of its accelerator and precision over these rows, 3 x forward, attention whole"
)
MOST_REASONS = 4
ROW_COLUMNS = (
    "file", "line", "source", "model", "accelerator", "n_devices", "plan", "reason", "marks", "measured_step_s",
    "forecast_step_s", "error", "low_80_s", "high_80_s", "low_95_s", "high_95_s", "null_step_s", "measured_memory_gib",
    "forecast_memory_gib", "memory_error", "memory_kind", "status", "fits", "quantity", "measured", "forecast", "terms",
)  # fmt: skip


def listing(backtest: Backtest, broken_down: list[Breakdown]) -> list[str]:
    """Return the lines for people: a paragraph per file, and what was asked to be broken down."""
    lines = [f"constants {backtest.constants_sha256[:12]}", NULL_TEXT]
    for file in backtest.files:
        lines += ["", *_file_lines(file.score)]
    for part in broken_down:
        lines += ["", f"{part.name}", *_indented(_time_lines(part.step_time)), *_indented(_choice_lines(part.choice))]
    return lines


def _indented(lines: Iterator[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _file_lines(score: FileScore) -> list[str]:
    reasons = [f"{count} {reason}" for reason, count in score.not_scored.items()]
    more = f" and {len(reasons) - MOST_REASONS} other reasons" if len(reasons) > MOST_REASONS else ""
    lines = [f"{Path(score.file).name or score.file}: {plural(score.rows, 'row')}, {score.scored:,} scored"]
    if reasons:
        lines.append(f"  not scored: {'; '.join(reasons[:MOST_REASONS])}{more}")
    if score.step_time:
        lines += _indented(_time_lines(score.step_time))
    if score.learnt:
        learnt = [
            line.replace("step time:", "after learning from the runs before it:") for line in _time_lines(score.learnt)
        ]
        lines += _indented(iter(learnt))
    if score.null:
        rates = (f"{rate.accelerator} {rate.precision} {_percent(rate.mfu)}" for rate in score.null)
        lines.append(f"  null MFU: {', '.join(rates)}")
    if score.memory:
        lines += _indented(_memory_lines(score))
    if score.choice:
        lines += _indented(_choice_lines(score.choice))
    for name in ("collectives", "layers", "power", "energy"):
        errors = getattr(score, name)
        if errors is not None and errors.n:
            lines.append(f"  {name}: {_errors_text(errors)}")
    if score.marks:
        marks = [f"{count} {mark}" for mark, count in score.marks.items()]
        lines.append(f"  assumed: {'; '.join(marks[:MOST_REASONS])}{' and more' if len(marks) > MOST_REASONS else ''}")
    return lines


def _percent(value: float, signed: bool = False) -> str:
    if not math.isfinite(value):
        return "unknown"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _errors_text(errors: Errors) -> str:
    return (
        f"n {errors.n}, MAPE {_percent(errors.mape)}, median {_percent(errors.median)}, "
        f"bias {_percent(errors.bias, signed=True)}, worst {_percent(errors.worst)}"
    )


def _time_lines(score: TimeScore) -> Iterator[str]:
    if score.n:
        yield f"step time: {_errors_text(score)}; null {_percent(score.null_mape)}"
        yield f"intervals: 80 % hold {_percent(score.coverage_80)}, 95 % hold {_percent(score.coverage_95)}"


def _memory_lines(file: FileScore) -> Iterator[str]:
    score = file.memory
    assert score is not None
    if score.n:
        yield f"memory: {_errors_text(score)}"
        if math.isfinite(score.coverage_80):
            held = f"80 % hold {_percent(score.coverage_80)}, 95 % hold {_percent(score.coverage_95)}"
            yield f"intervals of memory: {held}"
    called = [
        f"{wrong} of {rows} {what}"
        for wrong, rows, is_told, what in (
            (score.oom_called_feasible, score.oom_rows, True, "out of memory called feasible"),
            (score.failed_called_feasible, score.failed_rows, True, "failed, for whatever cause, called feasible"),
            (score.ok_called_infeasible, score.ok_rows, score.ok_called_infeasible > 0, "that ran called infeasible"),
        )
        if rows and is_told
    ]
    if called:
        yield f"feasible: {', '.join(called)}"


def _choice_lines(score: ChoiceScore) -> Iterator[str]:
    if score.groups:
        yield (
            f"choice: {score.groups} groups of {score.rows} rows, Spearman median {score.spearman_median:.2f}, "
            f"worst {score.spearman_worst:.2f}; regret median {_percent(score.regret_median)}, "
            f"worst {_percent(score.regret_worst)}"
        )


def write_rows(backtest: Backtest, path: Path) -> int:
    """Write every row with its forecast, or the reason for which it has none, as CSV; return how many there are."""
    count = 0
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ROW_COLUMNS)
            writer.writeheader()
            for result in backtest.files:
                for cells in _rows(result):
                    writer.writerow(cells)
                    count += 1
    except OSError as error:
        raise StorageError(f"{path} cannot be written", str(error), "another path for --rows") from error
    return count


def _rows(result: FileResult) -> Iterator[dict[str, object]]:
    with_time = timed(result.steps)
    nulls = {id(item): seconds for item, seconds in zip(with_time, null_seconds(with_time), strict=True)}
    for item in result.steps:
        yield _step_cells(item, nulls.get(id(item)))
    for part in result.parts:
        yield _part_cells(part)
    for missing in result.unscored:
        row = missing.row
        cells = {"file": row.file, "line": row.line, "reason": missing.reason, "model": getattr(row, "model", "")}
        if isinstance(row, StepRow):
            cells |= {"source": row.source, "accelerator": row.accelerator, "n_devices": row.n_devices}
            cells |= {"measured_step_s": row.measured_step_s, "measured_memory_gib": row.measured_memory_gib}
            cells |= {"status": row.status}
        yield cells


def _step_cells(item: Scored, null: float | None) -> dict[str, object]:
    row, case, seconds = item.case.row, item.case, item.priced.step_seconds
    return {
        "file": row.file,
        "line": row.line,
        "source": row.source,
        "model": row.model,
        "accelerator": case.cluster.device.name,
        "n_devices": row.n_devices,
        "plan": str(item.priced.plan),
        "reason": case.time_excluded,
        "marks": "; ".join(case.marks),
        "measured_step_s": case.step_seconds,
        "forecast_step_s": seconds.value,
        "error": item.time_error,
        "low_80_s": seconds.low_80,
        "high_80_s": seconds.high_80,
        "low_95_s": seconds.low_95,
        "high_95_s": seconds.high_95,
        "null_step_s": null,
        "measured_memory_gib": row.measured_memory_gib if case.memory_bytes else None,
        "forecast_memory_gib": item.priced.memory_bytes / 2**30,
        "memory_error": item.memory_error,
        "memory_kind": case.memory_kind,
        "status": row.status,
        "fits": item.priced.fits,
        "terms": "; ".join(f"{term.name}={term.seconds:.4g}" for term in item.priced.terms),
    }


def _part_cells(part: Compared) -> dict[str, object]:
    return {
        "file": part.row.file,
        "line": part.row.line,
        "source": getattr(part.row, "source", ""),
        "model": getattr(part.row, "model", ""),
        "accelerator": getattr(part.row, "accelerator", ""),
        "marks": "; ".join(part.marks),
        "quantity": part.unit,
        "measured": part.measured,
        "forecast": part.forecast,
        "error": part.error,
    }
