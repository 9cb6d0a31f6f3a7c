"""Explain: all that the planner weighed, in lines, for `plan --explain --all`: terms, candidates, refusals, sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.plan.cost.intervals import TIME_ERROR, usual_errors
from paceline.plan.cost.memory.usable import HEADROOM
from paceline.plan.cost.rates import Rates
from paceline.plan.explain.alignment import alignment_lines
from paceline.plan.explain.choice import (
    alternative_lines,
    contest_lines,
    front_lines,
    risk_text,
    sensitivity_lines,
)
from paceline.plan.explain.headline import bill_text, expected_text, sure_text
from paceline.plan.explain.lines import wrap
from paceline.plan.explain.money import bought_text
from paceline.plan.learn.correct import shares_text
from paceline.plan.learn.task_measurement import TaskMeasurement
from paceline.plan.placement.in_words import placement_lines
from paceline.plan.planned import Planned
from paceline.plan.search.found import Candidates
from paceline.spec.forecast import Term
from paceline.spec.plan import Plan
from paceline.units import (
    format_bytes,
    format_count,
    format_durations,
    format_rate,
    format_seconds,
    format_sizes,
    plural,
)

LEARNT = 12  # runs that it learnt from that `--explain` prints
LISTED = 200  # candidates that `--explain` prints; the rest is counted
MODEL_FLOPS = "attention as its causal half, no recompute"


def explain_lines(planned: Planned) -> list[str]:  # `plan --explain --all`; screen.py has what fits a screen
    """Return all that the planner weighed, in 100 columns: the price by term, candidates, refusals, assumptions."""
    return [
        *why_lines(planned),
        "",
        *_terms("time per step", planned.forecast.time, format_seconds),
        "",
        *_terms("memory on the fullest device", planned.forecast.memory, format_bytes),
        "",
        *_copies(planned.forecast.copies),
        *total_lines(planned),
        "",
        *_intervals(planned),
        "",
        *_learnt(planned),
        "",
        *failure_lines(planned),
        "",
        *placement_lines(planned.placement),
        "",
        *contest_lines(planned),
        "",
        *alternative_lines(planned),
        *alignment_lines(planned),
        "",
        *sensitivity_lines(planned),
        "",
        *front_lines(planned),
        "",
        *_candidates(planned.search.candidates),
        "",
        *refusal_lines(planned),
        "",
        *_figures(planned),
    ]


def why_lines(planned: Planned) -> list[str]:
    lines = wrap("chosen   ", f"{planned.plan}")
    lines += wrap("because  ", planned.reason)
    for remark in planned.remarks:
        lines += wrap("note     ", remark)
    return lines


def _terms(title: str, terms: Sequence[Term], show: Callable[[float], str]) -> list[str]:
    total = sum(term.value for term in terms)
    lines = [f"{title}: {show(total)}"]
    for term in sorted(terms, key=lambda term: -term.value if math.isfinite(term.value) else -math.inf):
        share = f"{term.value / total:4.0%}" if total and math.isfinite(total) else "   ?"
        value = show(term.value) if math.isfinite(term.value) else "unknown"
        lines += wrap(f"  {share} {value:>9}  {term.name:24}  ", f"{term.formula} [{term.source}]", 44)
    return lines


def _copies(terms: Sequence[Term]) -> list[str]:
    """Return what copies in other nodes' memory take, which is beside the step; nothing where there are none."""
    if not terms:
        return []
    lines = ["copies in the memory of other nodes, beside training:"]
    for term in terms:
        value = format_bytes(term.value) if term.kind == "other" else f"{format_seconds(term.value)}/step"
        lines += wrap(f"  {value:>14}  {term.name:24}  ", f"{term.formula} [{term.source}]", 44)
    return [*lines, ""]


def _passes(planned: Planned) -> str:
    """Return how often the products of a forward pass are done in a step without recompute."""
    products = sum(block.matmul_flops for block in planned.profile.blocks)
    done = sum(block.matmul_flops * (1 + block.backward_products) for block in planned.profile.blocks)
    return f"{done / products:.3g}" if products else "3"


def total_lines(planned: Planned) -> list[str]:
    forecast = planned.forecast
    peak = planned.peak_name(planned.plan.precision)
    mfu = f"{forecast.mfu:.1%} {peak}" if math.isfinite(forecast.mfu) else f"unknown ({peak})"
    unit = planned.facts.unit
    lines = [f"the run: {forecast.steps:,} steps, {format_seconds(forecast.run_seconds.value)} of training"]
    rows = [
        ("throughput", f"{format_count(forecast.tokens_per_second)} {unit}/s"),
        ("utilisation", f"{mfu}; model FLOPs are {_passes(planned)} x forward, {MODEL_FLOPS}"),
        *((term.name, bill_text(term)) for term in forecast.bill),
        *([("buys", bought)] if (bought := bought_text(planned, 1000.0)) else []),
        ("not in it", "start-up, evaluation and checkpoints"),
    ]  # fmt: skip
    for name, text in rows:
        lines += wrap(f"  {name:12}", text)
    return lines


def _intervals(planned: Planned) -> list[str]:
    forecast, rates = planned.forecast, Rates(planned.cluster.device, planned.plan.precision)
    unmeasured = {source: TIME_ERROR[source] for source in ("published", "assumed")}
    errors = ", ".join(f"{error:.0%} for {what}" for what, error in {**usual_errors(rates), **unmeasured}.items())
    step, peak = forecast.step_seconds, forecast.peak_bytes
    how = (
        f"the model's own error by what each term is and how it is known ({errors}), weighted by the terms, joined "
        f"with what a step's mean spreads by the probe's calibration steps (±{rates.spread_of_step(step.value):.0%})"
    )
    if rates.by_shares:
        how = (
            "what tables missed that were left out of the fit, wider for what none of them had"
            f"{sure_text(planned)}; constants {rates.constants.sha256[:12]} of {rates.constants.date}"
        )
    if planned.learnt is not None:
        how = "what the runs that it learnt from leave open"
    (fast, slow), (least, most) = format_durations(step.low, step.high), format_sizes(peak.low, peak.high)
    text = (
        f"time {fast} to {slow}: {how}. "
        f"Memory {least} to {most}. "
        f"A plan fits where the high end leaves {HEADROOM:.0%} of a device's memory free."
    )
    lines = wrap("80 % intervals: ", text, 2)
    measured = planned.search.candidates.context.measured.get(planned.plan.precision)
    if measured is not None:
        lines += wrap("calibration: ", measurement_text(measured), 2)
    elif rates.calibration_ratios:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in rates.calibration_ratios)
        note = f"measured steps over the sum of their parts: {ratios}; compute terms are x {rates.factor:.2f}"
        lines += wrap("calibration: ", note, 2)
    return lines


def _learnt(planned: Planned) -> list[str]:
    """Return the runs that the forecast learnt from, newest first, each with how far it counts."""
    learnt = planned.learnt
    if learnt is None:
        because = (
            "no finished run of this machine is on record" if planned.spec.cluster.learn else "cluster.learn = false"
        )
        if not planned.cluster.host:
            because = "the cluster is not this machine"
        return [f"learnt from no run: {because}"]
    lines = [f"{learnt.name}: measured over forecast of today, and the noise that a run is given:"]
    for run, noise in zip(learnt.runs[:LEARNT], learnt.time.noise, strict=False):
        found, memory = run.observation, math.exp(run.memory_residual)
        ratios = f"time x {math.exp(run.time_residual):.2f}" + (f", memory x {memory:.2f}" if memory > 0 else "")
        same = "this task" if found.task == learnt.task else found.name
        lines += wrap("   ", f"{found.date[:16]}  {ratios}, noise {noise:.0%}: {same}, {found.plan}", 6)
    if len(learnt.runs) > LEARNT:
        lines.append(f"   and {len(learnt.runs) - LEARNT} more")
    text = f"what plans have in common counts by {shares_text()}; `paceline probe --forget` deletes all runs"
    return [*lines, *wrap("   ", text)]


def measurement_text(found: TaskMeasurement) -> str:
    """Return what `plan --measure` found, in one line."""
    blocks = ", ".join(format_seconds(seconds) for seconds in found.block_seconds)
    return (
        f"measured {found.date[:16]} at micro-batch {found.micro_batch} in {found.precision}, "
        f"{plural(found.devices, 'device')} at once: "
        + (f"{blocks} a block, " if blocks else "")
        + f"{format_seconds(found.rest_seconds)} for the rest and the loss, forward and backward; "
        f"{format_seconds(found.update_seconds)} for the update of {format_count(found.update_parameters)} parameters"
        f" (±{found.spread / 2:.0%})"
    )


def failure_lines(planned: Planned) -> list[str]:
    """Return the run under failures, term by term."""
    expected = planned.expected
    if not expected.terms:
        return wrap("under failures: ", expected_text(planned), 2)
    lines = _terms("the run under failures", expected.terms, format_seconds)
    text = f"{expected_text(planned).removeprefix('expected: ')}; {expected.because}. `paceline simulate` tells more."
    return [*lines, *wrap("  ", text)]


def _candidates(candidates: Candidates) -> list[str]:
    noun = "plan fits" if len(candidates) == 1 else "plans fit"
    head = f"  {'step':>8}  {'memory':>9}  {'tokens/s':>8}  {'micro x accumulation':>20}  {'recompute':9}  layout"
    lines = [f"{len(candidates)} {noun}, best first (within 2 % of the best, the plan with fewest surprises; risk: of"]
    lines += ["  running out of memory):", head]
    for candidate, risk in zip(candidates[:LISTED], candidates.values.risk, strict=False):
        forecast, plan = candidate.forecast, candidate.plan
        shown = str(plan.layout) + (f" {plan.class_text}" if plan.layout.state_degree > 1 else "")
        if plan.layout.pp > 1:
            shown += f" {plan.schedule}" + (f" x {plan.virtual_stages}" if plan.virtual_stages > 1 else "")
        shown += f" · {text}" if (text := risk_text(float(risk))) else ""
        lines.append(
            f"  {format_seconds(forecast.step_seconds.value):>8}  {format_bytes(forecast.peak_bytes.value):>9}"
            f"  {format_count(forecast.tokens_per_second):>8}  {f'{plan.micro_batch} x {plan.accumulation}':>20}"
            f"  {plan.recompute:9}  {shown}"
        )
    if len(candidates) > LISTED:
        lines.append(f"  and {len(candidates) - LISTED:,} more")
    return lines


def refusal_lines(planned: Planned) -> list[str]:
    """Return one line for each reason, with the first plan that it speaks of and how many others."""
    refused = planned.search.refused
    lines = [f"{len(refused):,} refused:" if refused else "none refused"]
    reasons: dict[str, list[Plan]] = {}
    for refusal in refused[:LISTED]:
        reasons.setdefault(refusal.because, []).append(refusal.plan)
    for because, plans in reasons.items():
        others = f" (and {len(plans) - 1} more)" if len(plans) > 1 else ""
        lines += wrap("   ", f"{plans[0]}{others}: {because}", 6)
    if len(refused) > LISTED:
        lines.append(f"   and {len(refused) - LISTED:,} more that need more memory")
    return lines


def _figures(planned: Planned) -> list[str]:
    """Return the machine's figures with their sources, weakest knowledge included."""
    device, cluster = planned.cluster.device, planned.cluster
    lines = [f"figures of the cluster{f', probed {cluster.date}' if cluster.date else ''}:"]
    figures = [
        ("memory", device.memory_bytes, format_bytes),
        ("memory bandwidth", device.memory_bytes_per_second, lambda value: format_rate(value, "B")),
        ("operator launch", device.launch_seconds, format_seconds),
        ("process", device.runtime_bytes, format_bytes),
    ]
    for link in cluster.links:
        figures.append((f"link, {link.level}", link.bytes_per_second, lambda value: format_rate(value, "B")))
        figures.append((f"hop, {link.level}", link.latency_seconds, format_seconds))
    for name, figure, show in figures:
        value = show(figure.value) if math.isfinite(figure.value) else "unknown"
        lines += wrap(f"  {name:18}{value:>12}  ", f"[{figure.source}] {figure.note}", 34)
    return lines
