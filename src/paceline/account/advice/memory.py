"""Advice on memory: a micro-batch that may be larger."""

from __future__ import annotations

import math

from paceline.account.advice.advice import AdviceEvidence, CostAdvice

FULLEST = 0.5  # of a device's memory in use, up to which a micro-batch twice as large fits whatever it is spent on
PER_START = 0.1  # of a step at most, that half as many passes are taken to save


def micro_batch_headroom(evidence: AdviceEvidence) -> CostAdvice | None:
    """Return that a micro-batch twice as large would fit, where a step has several passes; of GPUs alone."""
    device = evidence.start.cluster.get("device")
    whole = evidence.figure("cluster", "device", "memory_bytes", "value")
    micro, passes = evidence.figure("plan", "micro_batch"), evidence.figure("plan", "accumulation")
    peaks = [value for value in evidence.records.steps.column("peak_bytes").tolist() if not math.isnan(value)]
    if not isinstance(device, dict) or device.get("kind") != "cuda" or not whole or not peaks or not micro:
        return None
    share = max(peaks) / whole
    if share > FULLEST or (passes or 1) < 2:
        return None
    host = next((part.share for part in evidence.bound.parts if part.kind == "host"), 0.0) if evidence.bound else 0.0
    saves = min(0.5, max(PER_START / 2, host / 2))  # half of the operators are started
    text = f"{share:.0%} of a device's memory is in use, and a step has {int(passes or 1)} passes"
    because = "half as many operators are started for the same work; what their size saves besides is not known"
    return CostAdvice("micro_batch", text, f"plan.micro_batch = {int(micro) * 2}", "cost", saves, "rough", because)
