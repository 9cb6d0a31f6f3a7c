"""The price of one plan: terms summed, with intervals, money, energy and utilisation."""

from __future__ import annotations

import math

from paceline.cluster.cluster import Cluster
from paceline.plan.cost.axes import axis_terms, bubble_terms
from paceline.plan.cost.compute import compute_terms, fixed_term, matrix_peak, optimizer_term
from paceline.plan.cost.inputs import Context
from paceline.plan.cost.memory import memory_terms
from paceline.plan.cost.network import network_terms
from paceline.plan.cost.offload import offload_terms
from paceline.plan.cost.price import bill, busy_share
from paceline.plan.cost.rates import weakest
from paceline.plan.forecast import Estimate, Forecast, Term
from paceline.plan.plan import Plan
from paceline.task.profile import ModelProfile

# Relative half-width of the 80 % interval that the model itself earns, by how its figures are known.
TIME_ERROR = {"measured": 0.20, "published": 0.35, "assumed": 0.60, "unknown": math.nan}
MEMORY_ERROR = 0.15  # bytes are counted, not timed: what is missed is allocation, rounding and libraries
NEGLIGIBLE = 0.05  # a term below this share of the sum does not decide how the sum is known


def forecast_plan(
    profile: ModelProfile,
    cluster: Cluster,
    plan: Plan,
    *,
    batch_samples: int,
    steps: int,
    optimizer: str = "adamw",
) -> Forecast:
    """Return what the plan will take for `steps` steps of `batch_samples` samples. Values are NaN where unknown."""
    return price(Context(profile, cluster, batch_samples, steps, optimizer), plan)


def price(context: Context, plan: Plan, memory: tuple[Term, ...] | None = None) -> Forecast:
    """Return what a plan will take, from a context that many plans share; `memory` where its terms are known."""
    compute = compute_terms(context, plan)
    inside = axis_terms(context, plan)
    bubble = bubble_terms(context, plan, compute, inside)
    network = network_terms(context, plan, sum(term.value for term in compute))
    moved = offload_terms(context, plan, sum(term.value for term in compute))
    time = (*compute, *inside, *bubble, *network, optimizer_term(context, plan), *moved, fixed_term(context, plan))
    memory = memory or tuple(memory_terms(context, plan))
    step = time_estimate(time, context.rates(plan.precision).relative_spread)
    run = _scaled(step, context.steps)
    flops = 3 * context.profile.forward_flops * context.batch_samples
    peak, _ = matrix_peak(context, plan.precision)
    devices = context.cluster.devices
    paid = bill(context.cluster, run, busy_share(time))
    usd, kwh, carbon = (Estimate(term.value, term.low, term.high, term.source) for term in paid)
    return Forecast(
        step_seconds=step,
        time=time,
        peak_bytes=memory_estimate(memory),
        memory=memory,
        tokens_per_second=context.batch_samples * context.profile.tokens_per_sample / step.value,
        steps=context.steps,
        run_seconds=run,
        usd=usd,
        kwh=kwh,
        carbon_g=carbon,
        model_flops_per_step=flops,
        mfu=flops / (step.value * devices * peak),
        bill=paid,
    )


def time_estimate(terms: tuple[Term, ...], relative_spread: float) -> Estimate:
    """Return the sum of time terms with its interval.

    The half-width is the model's error, weighted by the terms' shares, joined in quadrature with the spread of the
    probe's repeats and sizes. The interval is symmetric in ratios: (value / (1 + r), value * (1 + r)).
    """
    total = sum(term.value for term in terms)
    if not math.isfinite(total):
        return Estimate(math.nan, math.nan, math.nan, "unknown")
    error = sum(term.value * TIME_ERROR[term.source] for term in terms if term.value) / total
    ratio = 1 + math.hypot(error, relative_spread)
    return Estimate(total, total / ratio, total * ratio, _source(terms, total))


def memory_estimate(terms: tuple[Term, ...]) -> Estimate:
    """Return the sum of memory terms with its interval."""
    total = sum(term.value for term in terms)
    return Estimate(total, total * (1 - MEMORY_ERROR), total * (1 + MEMORY_ERROR), _source(terms, total))


def _source(terms: tuple[Term, ...], total: float) -> str:
    return weakest(*(term.source for term in terms if term.value > NEGLIGIBLE * total), "measured")


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, estimate.low * factor, estimate.high * factor, estimate.source)
