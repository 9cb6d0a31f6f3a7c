"""A spec on groups of different devices in words: every way to use them all, or the best one."""

from __future__ import annotations

import math

from paceline.plan.explain.headline import bill_text, sure_percent
from paceline.plan.explain.lines import wrap
from paceline.plan.placement.grouped import Grouped
from paceline.plan.placement.uneven import Uneven
from paceline.units import format_bytes, format_seconds


def grouped_lines(found: Grouped, explain: bool = False) -> list[str]:
    """Return the best way in words, every way and remark where `explain` asks for it; at most 100 columns."""
    counts = " + ".join(f"{group.cluster.devices} x {group.cluster.device.name}" for group in found.groups)
    lines = wrap("task     ", f"{found.profile.name} on {found.facts.description} · {found.steps:,} steps")
    lines += wrap("cluster  ", counts)
    if found.joint is not None:
        step, peak = found.joint.forecast.step_seconds, found.joint.forecast.peak_bytes
        price = f"{_seconds(step.value)}/step{sure_percent(step)}, {format_bytes(peak.value)}/device"
        lines += wrap("trains   ", f"one layout over all groups: {found.joint.plan} · {price}")
    for way in found.ways if explain else found.ways[:1]:
        lines += _way_lines(way)
    if not explain:
        others = [way.strategy for way in found.ways[1:]]
        return [*lines, *([f"other    {', '.join(others)}: --explain"] if others else [])]
    for because in found.refused:
        lines += wrap("refused  ", because)
    for remark in dict.fromkeys((*(found.joint.remarks if found.joint else ()), *found.remarks)):
        lines += wrap("note     ", remark)
    return lines


def _way_lines(way: Uneven) -> list[str]:
    step = way.step_seconds
    took = f"{_seconds(step.value)}/step{sure_percent(step)} · {_seconds(way.run_seconds.value)}"
    lines = wrap("plan     ", f"{way.strategy} (priced only): {took}")
    for part in way.parts:
        share = f"{part.samples} samples" if way.strategy == "replicas" else f"{part.blocks} blocks"
        own = f"{_seconds(part.forecast.step_seconds.value)}, {format_bytes(part.forecast.peak_bytes.value)}/device"
        lines += wrap(f"  {part.group:12} ", f"{share} · {part.plan} · {own}")
    lines += wrap("  joining      ", f"{_seconds(way.joining_seconds)}: {way.joining_text}")
    for term in way.bill:
        lines += wrap(f"  {term.name:12} ", bill_text(term))
    return lines


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else "unknown time"
