"""The scores of the forecast grid's rows, and its page: errors, null, "always copies", Spearman and regret."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grid.pace import STEADY, STEADY_WAITS, is_steady
from paceline.backtest.statistics import spearman
from paceline.plan.learn.correct import Learnt, LearntRun

Z80 = 1.2816
SMALLEST = 3  # rows among which a choice is scored
BEST, COPIES = "forecast", "copies"


@dataclass(frozen=True)
class Row:
    """One plan of one task: forecast by the formulas, after learning from the other half, and measured."""

    task: str
    devices: int
    plan: str
    is_copies: bool  # of the whole model, and nothing else
    measured_seconds: float
    forecast_seconds: float
    learnt_seconds: float
    measured_bytes: float
    forecast_bytes: float
    flops: float  # of a step
    limit_bytes: float  # of a device's memory; 0: the machine's own
    covered_80: bool
    learnt_covered_80: bool
    early_bytes: float = math.nan  # of `measured_bytes`, after two steps
    pace: float = math.nan  # of the machine beside it: 1.3 where it was slower than its probe by as much
    waits: float = math.nan  # the same of an all-reduce after computing

    @property
    def group(self) -> tuple[str, int]:
        """The rows among which the planner chooses."""
        return self.task, self.devices


def halves(count: int) -> list[int]:
    """Return for each of so many rows which half it belongs to; the same ones in every run."""
    places = list(range(count))
    random.Random(0).shuffle(places)
    return [int(place < count // 2) for place in places]


def rows_of(runs: Sequence[LearntRun], lines: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of measured lines; each is forecast anew from what the half that it is not in has taught."""
    half = halves(len(runs))
    taught = [tuple(run for run, side in zip(runs, half, strict=True) if side != own) for own in (0, 1)]
    return [_row(run, line, taught[side]) for run, line, side in zip(runs, lines, half, strict=True)]


def _row(run: LearntRun, line: dict[str, Any], others: tuple[LearntRun, ...]) -> Row:
    found = run.observation
    mean, spread = Learnt(found.task, others).correct_run(run) if others else (0.0, run.time_spread)
    layout = found.plan.layout
    return Row(
        task=found.name, devices=found.devices, plan=str(found.plan),
        is_copies=layout.dp_replicate == found.devices and layout.ep == 1,
        measured_seconds=found.step_seconds, forecast_seconds=run.forecast_seconds,
        learnt_seconds=run.forecast_seconds * math.exp(mean),
        measured_bytes=found.peak_bytes or math.nan, forecast_bytes=run.forecast_bytes,
        flops=3 * found.profile.forward_flops * found.plan.batch_samples, limit_bytes=line["limit_bytes"],
        early_bytes=line.get("early_bytes") or math.nan, pace=line.get("pace", math.nan),
        waits=line.get("waits", math.nan),
        covered_80=abs(run.time_residual) <= Z80 * run.time_spread,
        learnt_covered_80=abs(run.time_residual - mean) <= Z80 * spread,
    )  # fmt: skip


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each task on each number of processes."""
    return [[row for row in rows if row.group == key] for key in dict.fromkeys(row.group for row in rows)]


def regrets(rows: Sequence[Row], field: str) -> list[float]:
    """Return how much slower the plan that `field` says is fastest was than the fastest, of each group."""
    found = []
    for group in groups_of(rows):
        if len(group) >= SMALLEST:
            chosen = min(group, key=lambda row: getattr(row, field))
            found.append(chosen.measured_seconds / min(row.measured_seconds for row in group) - 1)
    return found


def copies_regrets(rows: Sequence[Row]) -> tuple[list[float], int]:
    """Return the same of always taking copies, and in how many groups there are none: they do not fit, or cannot be."""
    found, without = [], 0
    for group in groups_of(rows):
        if len(group) < SMALLEST or group[0].devices == 1:
            continue
        copies = [row for row in group if row.is_copies]
        if copies:
            chosen = min(copies, key=lambda row: row.forecast_seconds)
            found.append(chosen.measured_seconds / min(row.measured_seconds for row in group) - 1)
        else:
            without += 1
    return found, without


def null_errors(rows: Sequence[Row]) -> list[float]:
    """Return the errors of a forecast that knows no layout: every row at the median FLOP/s of a device over all."""
    rates = [row.flops / row.measured_seconds / row.devices for row in rows]
    rate = statistics.median(rates)
    return [abs(own / rate - 1) for own in rates]


def group_errors(rows: Sequence[Row]) -> list[float]:
    """Return the errors of the median time of each group: what knowing the task alone would reach."""
    found = []
    for group in groups_of(rows):
        middle = statistics.median(row.measured_seconds for row in group)
        found += [abs(middle / row.measured_seconds - 1) for row in group]
    return found


def spearmans(rows: Sequence[Row], field: str) -> list[float]:
    """Return the rank correlation of forecast and measured seconds of each group."""
    groups = [group for group in groups_of(rows) if len(group) >= SMALLEST]
    pairs = [([getattr(row, field) for row in group], [row.measured_seconds for row in group]) for group in groups]
    return [value for value in (spearman(*pair) for pair in pairs) if math.isfinite(value)]


def score(rows: Sequence[Row]) -> dict[str, float]:
    """Return the errors and regrets of rows, as fractions; NaN where none applies."""

    def error(forecast: str, measured: str) -> float:
        return statistics.fmean(abs(getattr(row, forecast) / getattr(row, measured) - 1) for row in rows)

    def of(summary: Callable[[list[float]], float], values: list[float]) -> float:
        return summary(values) if values else math.nan

    found = {"rows": len(rows), "null_mape": statistics.fmean(null_errors(rows)),
             "group_median_mape": statistics.fmean(group_errors(rows)),
             "memory_mape": error("forecast_bytes", "measured_bytes"),
             "memory_growth": statistics.fmean(row.measured_bytes / row.early_bytes - 1 for row in rows),
             "over_limit": sum(0 < row.limit_bytes < row.measured_bytes for row in rows),
             "unsteady": sum(not is_steady(row.pace, row.waits) for row in rows)}  # fmt: skip
    steady = [row for row in rows if is_steady(row.pace, row.waits)]
    found["steady_time_mape"] = of(statistics.fmean, [
        abs(row.forecast_seconds / row.measured_seconds - 1) for row in steady
    ])  # fmt: skip
    for name, field, covered in (
        ("", "forecast_seconds", "covered_80"),
        ("learnt_", "learnt_seconds", "learnt_covered_80"),
    ):
        found[f"{name}time_mape"] = error(field, "measured_seconds")
        found[f"{name}covered_80"] = statistics.fmean(getattr(row, covered) for row in rows)
        found[f"{name}spearman_median"] = of(statistics.median, spearmans(rows, field))
        found[f"{name}regret_mean"] = of(statistics.fmean, regrets(rows, field))
        found[f"{name}regret_worst"] = of(max, regrets(rows, field))
    always, without = copies_regrets(rows)
    found["copies_regret_mean"], found["copies_regret_worst"] = of(statistics.fmean, always), of(max, always)
    found["copies_none"] = without
    return found


def parts_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by task, by number of processes, and all of them."""
    found = {task: [row for row in rows if row.task == task] for task in dict.fromkeys(row.task for row in rows)}
    for devices in dict.fromkeys(row.devices for row in rows):
        found[f"{devices} process{'es' if devices > 1 else ''}"] = [row for row in rows if row.devices == devices]
    return {**found, "all": list(rows)}


HEAD = ("rows of", "n", "time error", "after learning", "null", "median of its group", "Spearman", "regret (worst)",
        "after learning", "always copies (worst)", "memory error")  # fmt: skip


def table(rows: Sequence[Row]) -> list[str]:
    """Return the scores by task, by number of processes and of all, as Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for name, members in parts_of(rows).items():
        found = score(members)
        cells = [name, str(found["rows"]), *(_percent(found[key]) for key in (
            "time_mape", "learnt_time_mape", "null_mape", "group_median_mape"))]  # fmt: skip
        cells.append(_number(found["spearman_median"]))
        for kind in ("regret", "learnt_regret", "copies_regret"):
            cells.append(f"{_percent(found[f'{kind}_mean'])} ({_percent(found[f'{kind}_worst'])})")
        if found["copies_none"]:
            cells[-1] += f", none in {found['copies_none']}"
        lines.append(f"| {' | '.join([*cells, _percent(found['memory_mape'])])} |")
    return lines


def _percent(share: float) -> str:
    return f"{share:.1%}" if math.isfinite(share) else "–"


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "–"


def _pace_lines(whole: dict[str, float]) -> list[str]:
    """Return what is said of the machine's own speed between its probe and the rows."""
    if not whole["unsteady"]:
        return [f"Beside every row a fixed training step took within {STEADY:.0%} of its time in the probe, and an",
                f"all-reduce within a factor of {1 + STEADY_WAITS:g}.", ""]  # fmt: skip
    return [
        f"Beside {whole['unsteady']} rows a fixed training step took over {STEADY:.0%} more or less than in the probe,",
        f"or an all-reduce by a factor of {1 + STEADY_WAITS:g}, after several tries: the machine's own speed had",
        f"changed. They are in all scores; without them the time error is {_percent(whole['steady_time_mape'])}.", "",
    ]  # fmt: skip


def _growth_lines(whole: dict[str, float]) -> list[str]:
    """Return what is said of memory after many steps."""
    if not math.isfinite(whole["memory_growth"]):
        return []
    return [f"Memory is that of many steps, {_percent(whole['memory_growth'])} more than two steps took in the mean."]


def aim_line(whole: dict[str, float]) -> str:
    """Return what is aimed at over all rows, and which of it is missed."""
    reached = {
        "time error at most 8 %": whole["time_mape"] <= 0.08,
        "memory error at most 5 %": whole["memory_mape"] <= 0.05,
        "80 % intervals that hold 75 to 85 %": 0.75 <= whole["covered_80"] <= 0.85,
        "regret of at most 3 % in the mean": whole["regret_mean"] <= 0.03,
    }
    missed = ", ".join(aim for aim, is_reached in reached.items() if not is_reached)
    return f"Aimed at are {', '.join(reached)}. Missed: {missed or 'none'}."


def document(result: dict[str, Any], rows: Sequence[Row], command: str) -> str:
    """Return the Markdown page of a result."""
    facts, whole = result["machine"], result["scores"]
    lines = [
        "# Forecasts of layouts on one machine", "", f"`{command}`", "",
        f"{facts['date']} · {facts['cpu']}, {facts['cores']} cores · torch {facts['torch']} · fp32 · medians over "
        f"{result['rounds']} rounds of {result['steps']} steps or more, after half a second of others · {len(rows)} of "
        f"{result['asked']} plans", "",
        *table(rows), "",
        "Errors are means of |forecast / measured - 1|. \"After learning\": every row as it is forecast once the half",
        "of the rows that it is not in has been learnt from. Null: every row at the median FLOP/s of a process over",
        "all rows. Median of its group: one time for all layouts of a task and a number of processes. Regret: the plan",
        "forecast to be fastest against the fastest, of each such group; always copies: the best of the plans that",
        "copy the whole model to every process, where one fits. The 80 % intervals hold "
        f"{_percent(whole['covered_80'])} of the rows, {_percent(whole['learnt_covered_80'])} after learning. "
        f"{whole['over_limit']} rows took more memory than they were allowed.",
        *_growth_lines(whole), "",
        *_pace_lines(whole),
        aim_line(whole), "",
        "| task | processes | plan | measured | forecast | after learning | memory | forecast |", f"|{'---|' * 8}",
    ]  # fmt: skip
    for row in rows:
        times = (row.measured_seconds, row.forecast_seconds, row.learnt_seconds)
        sizes = (row.measured_bytes, row.forecast_bytes)
        cells = [*(f"{seconds * 1e3:.1f} ms" for seconds in times), *(f"{size / 2**20:.0f} MiB" for size in sizes)]
        lines.append(f"| {row.task} | {row.devices} | {row.plan} | {' | '.join(cells)} |")
    failed = [f"- {one['task']}, {one['devices']} processes: {one['because']}" for one in result["not_measured"]]
    return "\n".join([*lines, "", *(["Not measured:", "", *failed, ""] if failed else [])])
