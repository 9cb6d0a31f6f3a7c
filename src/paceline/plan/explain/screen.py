"""What was weighed, on one screen: the largest terms, the nearest other plans, and what would change the choice.

`explain.py` has all of it, with formulas, for `plan --explain --all`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.plan.explain.alignment import alignment_lines
from paceline.plan.explain.choice import alternative_lines, sensitivity_lines, sure_lines, tried_gain
from paceline.plan.explain.difference import difference
from paceline.plan.explain.headline import energy_text, expected_text
from paceline.plan.explain.lines import WIDTH
from paceline.plan.explain.money import bought_text, money_text
from paceline.plan.planned import Planned
from paceline.spec.forecast import Term
from paceline.units import format_bytes, format_count, format_durations, format_seconds, format_sizes

LINES = 50  # of a screen that all of it fits, the headline included
NOTES, TERMS, PLANS, REASONS = 2, 4, 3, 2  # of each that are shown
LOOKED_AT = 64  # refusals among which different reasons are looked for


def screen_lines(planned: Planned) -> list[str]:
    """Return what was weighed, in 100 columns and, with the headline, LINES lines at most."""
    forecast = planned.forecast
    return [
        *_some([f"note     {remark}" for remark in planned.remarks], NOTES),
        clipped(f"because  {planned.reason}"),
        *_terms("time per step", forecast.time, format_seconds),
        *_terms("memory on the fullest device", forecast.memory, format_bytes),
        *_run(planned),
        *(clipped(line) for line in alignment_lines(planned)),
        *sure_lines(planned),
        *_tried(planned),
        *_some(_joined(alternative_lines(planned)), PLANS + 1),
        *_some(_joined(sensitivity_lines(planned)), REASONS + 1),
        *_plans(planned),
        *_refusals(planned),
        "--all adds formulas and sources, commands to try, every plan that fits, the front, placement, the machine",
    ]


def clipped(line: str) -> str:
    """Return a line of at most WIDTH columns; what is cut off is told by an ellipsis."""
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def _some(lines: Sequence[str], count: int) -> list[str]:
    more = [f"   and {len(lines) - count} more"] if len(lines) > count else []
    return [*(clipped(line) for line in lines[:count]), *more]


def _joined(lines: Sequence[str]) -> list[str]:
    """Return lines of which each that goes on from the one before is joined with it."""
    found: list[str] = []
    for line in lines:
        if line.startswith(" " * 6) and found:
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
    return found


def _terms(title: str, terms: Sequence[Term], show: Callable[[float], str]) -> list[str]:
    """Return the largest terms of a sum, and what the others make together."""
    total = math.fsum(term.value for term in terms)
    if not math.isfinite(total):
        return [f"{title}: unknown"]
    largest = sorted(terms, key=lambda term: -abs(term.value))
    shown = [(term.name, term.value, f" [{term.source}]") for term in largest[:TERMS]]
    if rest := largest[TERMS:]:
        shown.append((f"{len(rest)} others", math.fsum(term.value for term in rest), ""))
    lines = [f"{title}: {show(total)}"]
    return lines + [f"  {value / (total or 1):4.0%} {show(value):>9}  {name}{known}" for name, value, known in shown]


def _run(planned: Planned) -> list[str]:
    """Return what the run takes, in a few lines."""
    forecast, unit = planned.forecast, planned.facts.unit
    step, peak = forecast.step_seconds, forecast.peak_bytes
    mfu = f" · utilisation {forecast.mfu:.1%}" if math.isfinite(forecast.mfu) else ""
    bought = f" · {text}" if (text := bought_text(planned, 1000.0)) else ""
    return [
        f"the run: {forecast.steps:,} steps, {format_seconds(forecast.run_seconds.value)} of training · "
        f"{format_count(forecast.tokens_per_second)} {unit}/s{mfu}",
        f"  {money_text(forecast.usd.value)} · {energy_text(forecast.kwh.value)}{bought}",
        "  80 % intervals: a step {} to {}, memory {} to {}".format(
            *format_durations(step.low, step.high), *format_sizes(peak.low, peak.high)
        ),
        clipped(f"  under failures: {expected_text(planned).removeprefix('expected: ')}"),
    ]


def _tried(planned: Planned) -> list[str]:
    """Return the plans that are worth a try, by what differs from the chosen one."""
    contest = planned.contest
    if not contest.is_open:
        return []
    others = [f"  {difference(planned.plan, contender.plan)}" for contender in contest.contenders[1:]]
    return [clipped(f"  {tried_gain(planned)}; beside the chosen one:"), *map(clipped, others)]


def _plans(planned: Planned) -> list[str]:
    candidates = planned.search.candidates
    lines = [f"{len(candidates):,} that fit, the best first:"]
    for each in candidates[:PLANS]:
        step, peak = each.forecast.step_seconds.value, each.forecast.peak_bytes.value
        lines.append(clipped(f"  {format_seconds(step):>8}  {format_bytes(peak):>9}  {each.plan}"))
    return lines


def _refusals(planned: Planned) -> list[str]:
    """Return the first reasons for which plans were refused, each with one plan."""
    refused = planned.search.refused
    if not len(refused):
        return ["none refused"]
    reasons = dict[str, str]()
    for refusal in refused[:LOOKED_AT]:
        reasons.setdefault(refusal.because, str(refusal.plan))
    shown = [clipped(f"  {plan}: {because}") for because, plan in list(reasons.items())[:REASONS]]
    return [f"{len(refused):,} refused, such as:", *shown]
