"""The headline of a run: task, cluster, plan and price, in the lines that every run prints before it begins."""

from __future__ import annotations

import math
import os
from pathlib import Path

from paceline.cluster.catalog.devices import spot_remarks
from paceline.cluster.catalog.file import load_catalog
from paceline.cluster.here.cores import threads_not_heeded
from paceline.cluster.here.determinism import deterministic_price
from paceline.cluster.store import probe_command
from paceline.plan.cost.rates import Rates
from paceline.plan.cost.software import PACELINE
from paceline.plan.cost.unknown import time_widths
from paceline.plan.explain.choice import tried_text
from paceline.plan.explain.lines import wrap
from paceline.plan.explain.money import expected_usd, finish_lines, limit_lines, money_text, price_lines
from paceline.plan.planned import Planned
from paceline.spec.arguments import has_checkpoint, run_directory
from paceline.spec.forecast import BillTerm, Estimate
from paceline.spec.model_folder import THEIRS, folder_of
from paceline.spec.steps.growth import course_of
from paceline.spec.steps.selection import LOSS
from paceline.spec.task import ModelSpec
from paceline.units import (
    format_bytes,
    format_carbon,
    format_count,
    format_energy,
    format_rate,
    format_seconds,
)

INDENT = " " * 9
NOTABLE_GOODPUT = 0.995  # failures that cost less stand in `--explain` only


def headline_lines(planned: Planned) -> list[str]:
    """Return the block that every run opens with: task, cluster, plan and price."""
    others = f"best of {len(planned.search.candidates):,} that fit, {len(planned.search.refused):,} refused"
    others += f"{tried_text(planned.contest)}: --explain"
    device = planned.cluster.device.kind
    return [
        f"task     {task_text(planned)}",
        *([f"{INDENT}{trained}"] if (trained := trained_text(planned)) else []),
        *model_lines(planned),
        *(line for shown in planned.facts.shown for line in wrap("data     ", shown)),
        f"cluster  {cluster_text(planned)}",
        f"plan     {planned.plan}",
        f"{INDENT}{price_text(planned)}   ({others})",
        *([f"{INDENT}{expected_text(planned)}"] if _expects_otherwise(planned) else []),
        *(f"{INDENT}{line}" for line in (*finish_lines(planned), *limit_lines(planned), *price_lines(planned))),
        *([f"{INDENT}deterministic kernels: {deterministic_price(device)}"] if planned.spec.run.deterministic else []),
    ]


def model_lines(planned: Planned) -> list[str]:
    """Return what is built for a model's folder, and what it starts from; nothing of other models, nor of a resume."""
    if has_checkpoint(run_directory(planned.spec)):  # which holds the weights
        return []
    model = planned.spec.task.model
    if not isinstance(model, ModelSpec) or not (folder_of(model.name) or model.starts_from):
        return []
    from paceline.task.models.huggingface.start import start_lines  # with all that is known of folders' layouts

    texts = start_lines(model, planned.spec.task.data)
    heads = ["model    ", *[INDENT] * len(texts)]
    return [line for head, text in zip(heads, texts, strict=False) for line in wrap(head, text)]


def without_effect_lines(planned: Planned) -> list[str]:
    """Return what of the model, the batch, a price or the environment has no effect, without what `--explain` notes
    beside it.
    """
    cluster, there = planned.spec.cluster, planned.cluster
    here = bool(there.host) and there.device.kind == "cpu"
    remarks = [
        *planned.spec.remarks,
        *planned.profile.remarks,
        *spot_remarks(cluster, there, load_catalog(cluster.catalog)),
        *filter(None, [threads_not_heeded(there.device.threads, os.environ)] if here else []),
    ]
    return [line for remark in remarks for line in wrap("note     ", remark)]


def task_text(planned: Planned) -> str:
    """Return the task in one line: model, data, batch, length and seed."""
    task, facts = planned.spec.task, planned.facts
    name = planned.profile.name
    if isinstance(task.model, ModelSpec) and ":" not in task.model.name:
        name = _as_typed(task.model.name)
    read = f"{planned.batch_samples * facts.items_per_sample:,} {facts.unit}/step"
    if task.batch_rows == "by_length":
        read = f"{task.global_batch.value:,.0f} tokens/step at most"
    steps = f"{planned.steps:,} step" + ("" if planned.steps == 1 else "s")
    batch = f"{read}{_growth_text(planned)}{_selection_text(planned)}"
    return f"{name} on {facts.description} · {batch} · {steps} · seed {task.seed}"


def _as_typed(name: str) -> str:
    """Return a model's name with the path of a folder as it is from here, where that is below the current folder."""
    folder = folder_of(name)
    if folder is None or not folder.is_absolute() or not folder.is_relative_to(Path.cwd()):
        return name
    return f"{THEIRS if name.startswith(THEIRS) else ''}./{folder.relative_to(Path.cwd())}"


def _expects_otherwise(planned: Planned) -> bool:
    """Return whether failures take much, or so much that limits are held against another price than the plan's."""
    if planned.expected.goodput < NOTABLE_GOODPUT:
        return True
    price, alone = money_text(expected_usd(planned)), money_text(planned.forecast.usd.value)
    return price != alone and bool(limit_lines(planned))


def trained_text(planned: Planned) -> str:
    """Return what of the model is trained, and what is beside it; "" where all of it is."""
    profile, adapter = planned.profile, planned.spec.task.adapter
    packed = profile.packed_parameters  # no part of `parameters`
    every = profile.parameters + packed
    if profile.trained_parameters == every:
        return ""
    share = profile.trained_parameters / every
    what = f"{format_count(profile.trained_parameters)} of {format_count(every)} parameters ({share:.2%})"
    how = "" if adapter.is_none else f" · {adapter.kind} of rank {adapter.rank}, alpha {adapter.alpha:g}"
    narrow = sum(block.narrow_parameters for block in profile.blocks)
    rests = f", {format_count(narrow)} of them in {adapter.base_dtype}" if narrow else ""
    rests += f", {format_count(packed)} of them in four bits ({adapter.base_dtype})" if packed else ""
    return f"trains {what}{how}; the rest is frozen{rests}: no gradients, no optimizer state"


def _growth_text(planned: Planned) -> str:
    """Return how far the batch grows, in items, and by what; "" where it does not."""
    growth, facts = planned.spec.task.growth, planned.facts
    if not growth.grows:
        return ""
    if growth.by == "noise":
        unit, value = (growth.largest.unit, growth.largest.value) if growth.largest else ("samples", math.nan)
        return f", growing to {value * (1 if unit == 'tokens' else facts.items_per_sample):,.0f} by the noise scale"
    course = course_of(growth, planned.batch_samples, facts.items_per_sample)
    largest = max(samples for _, samples in course.stretches(steps=planned.steps))
    return f", growing to {largest * facts.items_per_sample:,} by a schedule"


def _selection_text(planned: Planned) -> str:
    """Return among how many items a step chooses, and how; "" where it trains on all that it reads."""
    selection, facts = planned.spec.task.selection, planned.facts
    if not selection.selects:
        return ""
    read = selection.candidates_of(planned.batch_samples) * facts.items_per_sample
    how = "drawn by loss" if selection.by == LOSS else "of the largest loss"
    return f", {how} among {read:,}"


def cluster_text(planned: Planned) -> str:
    """Return the cluster in one line: devices, rates, links, and how they are known."""
    cluster, precision = planned.cluster, planned.plan.precision
    device = cluster.device
    kind = device.kind if cluster.host else device.name
    parts = [f"{'this machine: ' if cluster.host else ''}{cluster.devices} x {kind}"]
    rates = [rate for _, rate in device.matmul_flops.get(precision, ())]
    parts.append(f"{_rate(max(rates, default=math.nan), 'FLOP')} {precision}")
    parts.append(f"{_rate(device.memory_bytes_per_second.value, 'B')} memory")
    if cluster.devices > 1:
        link = cluster.link(cluster.devices)
        between = "ranks" if device.kind == "cpu" else "devices" if link.level == "node" else "nodes, per device"
        latency = format_seconds(link.latency_seconds.value)
        parts.append(f"{_rate(link.bytes_per_second.value, 'B')}, {latency} between {between}")
    command = probe_command(device.kind, cluster.devices_per_node)
    known = {"measured": "probed", "published": "published figures", "assumed": f"assumed: `{command}` measures it"}
    how = known.get(device.rate_source(precision), "unknown figures")
    if cluster.date and device.matmul_source == "published":
        how = "products by published figures, else probed"
    return f"{' · '.join(parts)} ({how})"


def price_text(planned: Planned) -> str:
    """Return the forecast in one line: step time with its interval, memory, run time, energy and money."""
    forecast = planned.forecast
    step = forecast.step_seconds
    return " · ".join([
        f"{format_seconds(step.value)}/step{sure_percent(step)}{sure_text(planned)}",
        f"{format_bytes(forecast.peak_bytes.value)}/device",
        format_seconds(forecast.run_seconds.value),
        energy_text(forecast.kwh.value),
        money_text(forecast.usd.value),
    ])  # fmt: skip


def expected_text(planned: Planned) -> str:
    """Return in one line what failures make of the run: its time with its interval, goodput, interruptions."""
    expected = planned.expected
    if not math.isfinite(expected.goodput):
        return f"unknown: {expected.because}; set cluster.reliability.mtbf_hours_per_device"
    if math.isinf(expected.wall_seconds.value):
        return "expected: the run never ends: failures leave it no time to train (goodput 0.0%)"
    return (
        f"expected: {format_seconds(expected.wall_seconds.value)}{sure_percent(expected.wall_seconds)}"
        f" · goodput {expected.goodput:.1%} · {format_count(expected.interruptions)} interruptions"
        + (f" · {money_text(expected.usd)}" if math.isfinite(expected.usd) else "")
    )


def bill_text(term: BillTerm) -> str:
    """Return money, energy or carbon in one line: the value, both intervals, the formula and its source."""
    if not math.isfinite(term.value):
        return f"unknown: {term.formula}"
    values = (term.value, term.low, term.high, term.low95, term.high95)
    show = {"USD": money_text, "kWh": energy_text}
    value, low, high, low95, high95 = format_carbon(*values) if term.unit == "g" else map(show[term.unit], values)
    return f"{value} (80 %: {low} to {high}; 95 %: {low95} to {high95}); {term.formula} [{term.source}]"


def carbon_text(grams: float) -> str:
    """Return an amount of carbon; "carbon unknown" where it is."""
    if not math.isfinite(grams):
        return "carbon unknown"
    return format_carbon(grams)[0]


def energy_text(kwh: float) -> str:
    """Return an amount of energy; "energy unknown" where it is."""
    return format_energy(kwh)[0] if math.isfinite(kwh) else "energy unknown"


def sure_text(planned: Planned) -> str:
    """Return what of a published device's forecast was measured, and what never; nothing of others."""
    cluster, precision = planned.cluster, planned.plan.precision
    rates = Rates(cluster.device, precision)
    if not rates.by_shares or planned.learnt is not None:
        return ""
    device = cluster.device
    experts = any(block.experts for block in planned.profile.shapes)
    widths = time_widths(
        rates.constants, device.name, precision, PACELINE.name, cluster.devices, device.assumed_rates, experts=experts
    )
    because = widths.because
    return f" ({because})" if because else ""


def sure_percent(estimate: Estimate) -> str:
    """Return an estimate's 80 % interval in words, such as ±16% or -20/+50%; nothing where it is unknown.

    Where an interval is as wide to either side as a factor, it is told by its upper end.
    """
    if not math.isfinite(estimate.value) or not estimate.value:
        return ""
    up, down = estimate.high / estimate.value, estimate.value / estimate.low
    if math.isclose(up, down, rel_tol=0.005):
        return f" ±{(up - 1) * 100:.0f}%"
    return f" -{(1 - 1 / down) * 100:.0f}/+{(up - 1) * 100:.0f}%"


def _rate(per_second: float, unit: str) -> str:
    return format_rate(per_second, unit) if math.isfinite(per_second) else f"unknown {unit}/s"
