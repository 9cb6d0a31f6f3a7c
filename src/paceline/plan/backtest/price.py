"""The one place where backtests meet the planner's pricing: cases in, forecasts out."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.cluster.catalog import published_watts, read_catalog
from paceline.cluster.cluster import Cluster
from paceline.plan.backtest.rows import Case
from paceline.plan.cost import compute, memory, rates, ring, total
from paceline.plan.cost.inputs import Context
from paceline.plan.cost.rates import BYTES
from paceline.plan.cost.ring import hop
from paceline.plan.forecast import Estimate, Forecast
from paceline.plan.layout import Layout
from paceline.plan.plan import Plan
from paceline.plan.search import memory_refusal
from paceline.task.profile import ModelProfile

WIDTHS_95_OVER_80 = 1.9600 / 1.2816  # of the normal distribution's intervals
# Terms of memory that are outside of what a table's figure counts.
OUTSIDE = {"allocated": ("runtime", "allocator buffers"), "reserved": ("runtime",), "device": ()}
# Terms of a step's time that are no part of a layer's forward and backward pass.
BESIDE_LAYERS = ("optimizer", "fixed step overhead", "casts and gradient sums", "operator launches",
                 "parameter gathering", "gradient reduction")  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A forecast value with its 80 % and its 95 % interval."""

    value: float
    low_80: float
    high_80: float
    low_95: float
    high_95: float


@dataclass(frozen=True)
class Priced:
    """What a case is forecast to take, of the plan that the planner would choose among those the row may have run."""

    plan: Plan
    step_seconds: Interval
    memory_bytes: float  # of the kind that the row measured
    fits: bool
    terms: dict[str, float]  # seconds per step


def constants_sha256() -> str:
    """Return the hash of the constants that forecasts of published devices rest on."""
    named = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (rates, ring, compute, memory, total)
        for name in dir(module)
        if name.isupper()
    }
    shares = {name: entry.sustained_share for name, entry in read_catalog().items()}
    text = json.dumps({"constants": named, "sustained_share": shares}, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def price_cases(cases: Sequence[Case]) -> list[Priced | str]:
    """Return the forecast of every case, or the reason for which there is none."""
    contexts: dict[tuple[int, int, int], Context] = {}

    def priced(case: Case) -> Priced | str:
        key = (id(case.profile), id(case.cluster), case.batch_samples)
        if key not in contexts:
            contexts[key] = Context(case.profile, case.cluster, case.batch_samples, 1)
        return _price_case(contexts[key], case)

    return [priced(case) for case in cases]


def _price_case(context: Context, case: Case) -> Priced | str:
    precision = case.plans[0].precision
    if precision not in BYTES or precision not in context.cluster.device.matmul_flops:
        return f"no rate of {precision} products of {context.cluster.device.name}"
    found = [(total.price(context, plan), plan) for plan in case.plans]
    if not all(math.isfinite(forecast.step_seconds.value) for forecast, _ in found):
        return "a rate of the cluster is unknown"
    fitting = [pair for pair in found if _fits(pair[0], case.cluster)]
    forecast, plan = (
        min(fitting, key=lambda pair: pair[0].step_seconds.value)
        if fitting
        else min(found, key=lambda pair: pair[0].peak_bytes.value)
    )
    counted = sum(term.value for term in forecast.memory if term.name not in OUTSIDE[case.memory_kind])
    terms = {term.name: term.value for term in forecast.time}
    return Priced(plan, _interval(forecast.step_seconds), counted, bool(fitting), terms)


def _fits(forecast: Forecast, cluster: Cluster) -> bool:
    return not memory_refusal(forecast.memory, cluster)


def _interval(estimate: Estimate) -> Interval:
    """Return the estimate with a 95 % interval, the 80 % one widened as a normal distribution's of the logarithm."""
    wider = (estimate.high / estimate.value) ** WIDTHS_95_OVER_80
    return Interval(estimate.value, estimate.low, estimate.high, estimate.value / wider, estimate.value * wider)


def layer_seconds(profile: ModelProfile, cluster: Cluster, plan: Plan) -> float:
    """Return the seconds of forward and backward of the profile's one layer on one micro-batch, recompute included."""
    forecast = total.price(Context(profile, cluster, plan.batch_samples, 1), plan)
    return sum(term.value for term in forecast.time if term.name not in BESIDE_LAYERS)


def collective_seconds(cluster: Cluster, collective: str, size: int, total_bytes: float) -> float:
    """Return the seconds of one collective (all_reduce, all_gather, reduce_scatter, all_to_all, send) over `size`."""
    if collective == "send":
        rate, latency, _ = hop(cluster, size, 1)
        return total_bytes / rate + latency
    return ring.ring(cluster, size, 1).seconds(collective, total_bytes, 1)


def watts_per_device(accelerator: str) -> float:
    """Return the watts that a device of a catalog name and its share of the node draw in training."""
    return published_watts(read_catalog()[accelerator]).value


def plan_of_layer(tp: int, micro_batch: int, recompute: str, precision: str) -> Plan:
    """Return the plan of one layer over `tp` devices on one micro-batch."""
    base = Plan(layout=Layout(tp=tp), micro_batch=micro_batch, batch_samples=micro_batch)
    return replace(base, recompute=recompute, precision=precision)
