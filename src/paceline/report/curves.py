"""What the steps say: losses, speed, and the curves that show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.history.records import SECONDS, Records, StepTable, number, table
from paceline.plan.flops import CONVENTIONS, OWN
from paceline.report.compare import Basis, median
from paceline.report.series import Series, thin, trend
from paceline.spec.journal.kinds import EvaluationRecord, RunStarted
from paceline.spec.journal.steady import FIRST

SLOWEST, SLOW = 5, 1.2  # at most so many steps are named, and only those this much above the median


@dataclass(frozen=True)
class Losses:
    """Mean loss per item, in nats, of the steps that count; `unigram` is the loss of guessing by frequency alone."""

    first: float | None
    last: float | None
    best: float | None
    best_step: int | None
    held_out_first: float | None
    held_out_last: float | None
    held_out_best: float | None
    held_out_best_step: int | None
    unigram: float | None


@dataclass(frozen=True)
class SlowStep:
    """A step at least SLOW times the median: which part took longer than its own median, and by how much."""

    step: int
    attempt: int
    seconds: float
    slower_part: str
    slower_by_seconds: float | None
    remark: str


@dataclass(frozen=True)
class Speed:
    """Step time in seconds and throughput in items per second over the steps that medians are taken over."""

    median_seconds: float | None
    p5_seconds: float | None
    p95_seconds: float | None
    items_per_second: float | None
    p5_items_per_second: float | None
    p95_items_per_second: float | None
    mfu: float | None
    mfu_forecast: float | None
    mfu_convention: str
    slowest: tuple[SlowStep, ...]


def held_out(records: Records) -> list[tuple[float, float]]:
    """Return (step, loss) of the evaluations, the last one of each step, in rising order."""
    by_step = {record.step: number(record.loss) for record in records.of(EvaluationRecord)}
    return sorted((step, loss) for step, loss in by_step.items() if step is not None and loss is not None)


def losses_of(records: Records, steps: StepTable, facts: Mapping[str, object]) -> Losses:
    """Return the losses of the steps that count and of the evaluations."""
    number_of, loss = steps.column("step"), steps.column("loss")
    finite = np.isfinite(loss)
    number_of, loss = number_of[finite], loss[finite]
    best = int(np.argmin(loss)) if len(loss) else None
    evaluations = held_out(records)
    best_held_out = min(evaluations, key=lambda pair: pair[1], default=None)
    return Losses(
        first=float(loss[0]) if len(loss) else None,
        last=float(loss[-1]) if len(loss) else None,
        best=None if best is None else float(loss[best]),
        best_step=None if best is None else int(number_of[best]),
        held_out_first=evaluations[0][1] if evaluations else None,
        held_out_last=evaluations[-1][1] if evaluations else None,
        held_out_best=best_held_out[1] if best_held_out else None,
        held_out_best_step=int(best_held_out[0]) if best_held_out else None,
        unigram=number(facts.get("unigram_loss")),
    )


def _throughput(steps: StepTable) -> np.ndarray[Any, np.dtype[np.float64]]:
    recorded = steps.column("tokens_per_second")
    with np.errstate(divide="ignore", invalid="ignore"):
        derived = steps.column("weight") / steps.column("total")
    return np.where(np.isfinite(recorded), recorded, derived)


def _percentile(values: np.ndarray[Any, np.dtype[np.float64]], percent: float) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.percentile(finite, percent)) if len(finite) else None


def _slowest(records: Records, basis: Basis) -> tuple[SlowStep, ...]:
    steps = records.steps
    totals = steps.column("total")
    usual = {name: median(basis.steps.column(name)) for name in SECONDS}
    typical = usual.pop("total")
    if typical is None:
        return ()
    found = []
    for row in np.argsort(-np.nan_to_num(totals), kind="stable")[:SLOWEST]:
        if not totals[row] > SLOW * typical:
            break
        attempt, step = int(steps.column("attempt")[row]), int(steps.column("step")[row])
        excess = {name: float(steps.column(name)[row]) - value for name, value in usual.items() if value is not None}
        excess = {name: value for name, value in excess.items() if np.isfinite(value)}
        part = max(excess, key=lambda name: excess[name], default="")
        why = records.unsteady.get((attempt, step), "")
        remark = f"first step of start {attempt}" if why == FIRST else why
        found.append(SlowStep(step, attempt, float(totals[row]), part, excess.get(part), remark))
    return tuple(found)


def speed_of(records: Records, reference: RunStarted, basis: Basis) -> Speed:
    """Return step time, throughput and model FLOP utilisation over the basis' steps.

    MFU = model FLOPs per step / (devices x peak x median step seconds) is the forecast's MFU times forecast over
    measured step seconds: FLOPs (3 x forward, causal attention, no recompute) and peak are the forecast's own.
    """
    totals, items = basis.steps.column("total"), _throughput(basis.steps)
    forecast, seconds = reference.forecast, median(totals)
    precision = str(reference.plan.get("precision", ""))
    published = number(table(table(reference.cluster.get("device")).get("peak_flops")).get(precision))
    peak = f"the published dense {precision} peak" if published else "the best measured matrix rate"
    mfu, expected = number(forecast.get("mfu")), number(table(forecast.get("step_seconds")).get("value"))
    return Speed(
        median_seconds=seconds,
        p5_seconds=_percentile(totals, 5),
        p95_seconds=_percentile(totals, 95),
        items_per_second=median(items),
        p5_items_per_second=_percentile(items, 5),
        p95_items_per_second=_percentile(items, 95),
        mfu=None if mfu is None or expected is None or not seconds else mfu * expected / seconds,
        mfu_forecast=mfu,
        mfu_convention="the device's peak is unknown" if mfu is None else f"{OWN}: {CONVENTIONS[OWN]}, over {peak}",
        slowest=_slowest(records, basis),
    )


def series_of(records: Records, steps: StepTable) -> dict[str, Series]:
    """Return the curves of the steps that count, thinned for drawing."""
    x = steps.column("step")
    evaluations = np.array(held_out(records), dtype=np.float64).reshape(-1, 2)
    return {
        "loss": thin(x, steps.column("loss")),
        "loss_trend": trend(x, steps.column("loss")),
        "held_out": thin(evaluations[:, 0], evaluations[:, 1]),
        "step_seconds": thin(x, steps.column("total")),
        "items_per_second": thin(x, _throughput(steps)),
        "grad_norm": thin(x, steps.column("grad_norm")),
        "lr": thin(x, steps.column("lr")),
    }
