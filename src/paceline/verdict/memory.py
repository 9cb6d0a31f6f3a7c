"""Whether steps are long because few samples fit into a pass: every pass reads all weights and starts all kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.units import format_seconds
from paceline.verdict.bound_part import BoundPart, share_of
from paceline.verdict.promised import best_change
from paceline.verdict.steps_seen import StepsSeen
from paceline.verdict.straggler import others

KIND = "memory"


def memory_part(seen: StepsSeen, outlook: Mapping[str, Any]) -> BoundPart | None:
    """Return the part of a step that a larger micro-batch would save; None where the planner knows of none.

    What the passes take is measured. Which part of that goes by the number of passes and not by the samples is the
    planner's price of both: a run sees one micro-batch alone.
    """
    best = best_change(outlook, KIND)
    passes = seen.spreads.get("computing") or seen.spreads.get("forward_backward")
    if best is None or passes is None or not outlook["pass_seconds"] > 0:
        return None
    saved = max(0.0, 1 - best["pass_seconds"] / outlook["pass_seconds"])
    usual = others(passes, seen.ranks) if seen.ranks > 1 else passes.most
    evidence = [f"passes take {format_seconds(usual)} of a step; by forecast {1 - saved:.0%} of it with {best['text']}"]
    fitting = best_change(outlook, KIND, fits=True)
    if fitting is best:
        evidence.append("which fits the memory")
        advice = f"{best['text']}; plan.micro_batch = 'auto' tries sizes before the run begins"
    else:
        evidence.append("which the memory does not hold")
        first = f"{fitting['text']}, and " if fitting is not None else ""
        advice = (
            f"{first}less memory for the rest, so that more samples fit: plan.recompute, plan.zero, plan.offload,"
            " plan.precision = 'bf16', or shards over more devices"
        )
    return BoundPart(KIND, share_of(saved * usual, seen.whole_seconds), tuple(evidence), advice)
