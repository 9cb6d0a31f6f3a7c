"""Advice on devices: devices that wait for others, and devices of another kind that would do the same for less."""

from __future__ import annotations

import math

from paceline.account.advice.advice import AdviceEvidence, CostAdvice
from paceline.cluster.catalog.devices import published_price, read_catalog
from paceline.cluster.catalog.file import Accelerator
from paceline.units import format_sizes
from paceline.verdict.evaluating import KIND as EVALUATION
from paceline.verdict.verdict import COMPUTE

ROOM = 1.25  # times the peak that a smaller device must have of memory
SMALLER = 0.75  # of the own memory, that another device has at most to be called smaller


def idle_devices(evidence: AdviceEvidence) -> CostAdvice | None:
    """Return that devices wait for data, the host or each other, or evaluate, where that bounds their steps."""
    bound = evidence.bound
    if bound is None or bound.kind == COMPUTE:
        return None
    text = f"devices {'evaluate' if bound.kind == EVALUATION else 'wait'}: steps are {bound.kind}-bound"
    useful = evidence.goodput.useful_seconds / evidence.goodput.wall_seconds if evidence.goodput.wall_seconds else 1.0
    return CostAdvice("idle", text, bound.advice, "cost", bound.share * useful, "likely", "; ".join(bound.evidence))


def other_device(evidence: AdviceEvidence) -> CostAdvice | None:
    """Return the device of the catalog that would do the same work for the least money, where the peak fits on it.

    The part of a step that computes is scaled by the published peaks, the rest is taken as it is.
    """
    catalog = read_catalog()
    device = evidence.start.cluster.get("device")
    name = device.get("name") if isinstance(device, dict) else ""
    own = next((each for each in catalog.values() if name in (each.name, each.title)), None)
    price = evidence.figure("cluster", "price_usd_per_device_hour", "value")
    peaks = [value for value in evidence.records.steps.column("peak_bytes").tolist() if not math.isnan(value)]
    precision = str(evidence.start.plan.get("precision", ""))
    if own is None or not price or not peaks or precision not in own.peak_flops:
        return None
    computes = next((part.share for part in evidence.bound.parts if part.kind == COMPUTE), 1.0) if evidence.bound else 1
    best: tuple[float, Accelerator, float] | None = None
    for other in catalog.values():
        theirs = published_price(other).value
        fits = other.memory_bytes >= ROOM * max(peaks) and precision in other.peak_flops
        if other is own or not fits or math.isnan(theirs):
            continue
        times = 1 - computes + computes * own.peak_flops[precision] / other.peak_flops[precision]
        saves = 1 - times * theirs / price
        if best is None or saves > best[0]:
            best = saves, other, times
    if best is None or best[0] <= 0:
        return None
    saves, other, times = best
    smaller = "a smaller device" if other.memory_bytes < SMALLER * own.memory_bytes else "another device"
    text = f"{smaller} would do: {other.title}, for {times:.2f} times as long"
    used, there = format_sizes(max(peaks), own.memory_bytes)
    because = (
        f"at most {used} of {there} are in use; computing scaled by the"
        f" published {precision} peaks; ${published_price(other).value:g} for ${price:g} an hour"
    )
    return CostAdvice(
        "device", text, f"paceline plan SPEC --device {other.name} prices it", "usd", saves, "rough", because
    )
