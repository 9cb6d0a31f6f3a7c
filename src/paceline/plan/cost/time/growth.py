"""What a run takes whose global batch grows: the steps of every batch at the price of that batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.plan.cost.bill import bill, busy_share
from paceline.plan.cost.memory.usable import needed_terms, usable_bytes
from paceline.plan.cost.pricing import memory_of, price
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.feasible.stages import fill_pipeline
from paceline.spec.forecast import Estimate, Forecast
from paceline.spec.layout import accumulation_for
from paceline.spec.plan import Plan


def with_batch(plan: Plan, samples: int) -> Plan:
    """Return the plan as it passes a global batch of another size: its rows in proportion, its micro-batch the same."""
    degree = plan.layout.data_degree
    rows = tuple(len(plan.rows_of(rank, samples)) for rank in range(degree)) if plan.rows else ()
    passes = accumulation_for(samples, degree, plan.micro_batch, rows)
    passes = fill_pipeline(passes, plan.layout.pp, plan.schedule) if plan.layout.pp > 1 else passes
    return dataclasses.replace(plan, batch_samples=samples, accumulation=passes, rows=rows)


def with_growth(context: PricedTask, plan: Plan, forecast: Forecast, stretches: Sequence[tuple[int, int]]) -> Forecast:
    """Return the forecast of a run of several stretches, each of so many steps of so many samples.

    The step's own terms stay those of the first batch. The intervals of the run are as wide as those of a step.
    """
    seconds = sum(count * seconds_at(context, plan, samples) for count, samples in stretches)
    ratio = seconds / forecast.run_seconds.value
    run = _scaled(forecast.run_seconds, ratio)
    paid = bill(context.cluster, run, busy_share(forecast.time))
    usd, kwh, carbon = (
        Estimate(term.value, term.low, term.high, term.source, term.low95, term.high95) for term in paid
    )
    return dataclasses.replace(forecast, run_seconds=run, usd=usd, kwh=kwh, carbon_g=carbon, bill=paid)


def seconds_at(context: PricedTask, plan: Plan, samples: int) -> float:
    """Return the forecast of a step of so many samples."""
    return price(dataclasses.replace(context, batch_samples=samples), with_batch(plan, samples)).step_seconds.value


def too_large(context: PricedTask, plan: Plan, samples: int) -> float:
    """Return the bytes that the fullest device needs at a batch, where those are more than there are; else 0."""
    at = dataclasses.replace(context, batch_samples=samples)
    needed = sum(term.value for term in needed_terms(context.cluster, memory_of(at, with_batch(plan, samples))))
    return needed if needed > usable_bytes(context.cluster) else 0.0


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(
        estimate.value * factor,
        estimate.low * factor,
        estimate.high * factor,
        estimate.source,
        estimate.low95 * factor,
        estimate.high95 * factor,
    )
