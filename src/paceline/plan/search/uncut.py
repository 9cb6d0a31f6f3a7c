"""A device by itself keeps its batch whole unless a cut gains what a forecast can tell, and what a proof takes.

A plan of one device that accumulates is a layout of its own: what it computes is only the batch's gradient if the loss
is a sum over rows, and of a model or an objective that is not ours this is proven before the first step. So between
two plans of one device that differ in the micro-batch, the one that makes a step of one pass is the simpler one. It is
taken unless cutting the batch gains more than

- a tie, and one standard deviation of what the figures leave open between the two: a cause of error that has the same
  share of both cancels,
- and, over the whole run, what the proof takes, where there is one to be made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from paceline.plan.cost.columns import Columns, Ints
from paceline.plan.cost.components import cause_seconds
from paceline.plan.cost.intervals import time_spread
from paceline.plan.cost.pricing import time_components
from paceline.plan.cost.sheet import PricedTask, Sheet
from paceline.plan.cost.time.learnt import host_shares
from paceline.plan.search.values import SAFE, TIE_RATIO, Values, goal_values
from paceline.units import format_durations, format_seconds

# Until one device's cut batch was held against the whole one: a process that imports torch, builds the model and goes
# over a batch in pieces (benchmarks/first_hour.py, classify, one core of an Intel Xeon: 7.6 s to the first step with
# it on 2026-11-27, 4.0 s without).
PROOF_SECONDS = 4.0


def in_one_piece(
    context: PricedTask, fits: Columns, values: Values, weights: Mapping[str, float], order: Ints
) -> tuple[Ints, str]:
    """Return the places of plans, best first, with the best that leaves a batch whole before one that gains too little.

    Also why, "" where nothing changed. Runs on several devices are proven anyhow, and stay in their order; so do plans
    of a batch that in one piece has a chance of running out of memory.
    """
    best = int(order[0])
    timed = 1.0 - weights.get("memory", 0.0)  # memory is counted, not timed
    if context.cluster.devices > 1 or fits.accumulation[best] == 1 or not timed > 0:
        return order, ""
    scores = goal_values(values, weights)
    alike = (fits.recompute == fits.recompute[best]) & (fits.budget == fits.budget[best])
    whole = np.flatnonzero((fits.accumulation == 1) & alike & (values.risk <= SAFE) & np.isfinite(scores))
    if not len(whole):
        return order, ""
    simple = int(whole[np.argmin(scores[whole])])
    seconds = values.time[[best, simple]]
    found = np.array([simple, *order[order != simple]])
    if not np.isfinite(seconds).all():
        return found, "the batch in one piece, as the time of a step is unknown"
    gain = math.log(scores[simple] / scores[best])
    told_apart = max(math.log(TIE_RATIO), timed * _left_open(context, fits.take([best, simple])))
    proof = 0.0 if context.profile.summed else timed * PROOF_SECONDS / (context.steps * float(seconds[1]))
    if gain > max(told_apart, proof):
        return order, ""
    cut, kept = format_durations(*seconds)
    pieces = f"{fits.micro_batch[best]} x {fits.accumulation[best]}"
    because = f"the batch in one piece: {pieces} would take {cut} against {kept}"
    if gain <= told_apart:
        return found, f"{because}, which forecasts cannot tell apart"
    return found, f"{because}, less in {context.steps:,} steps than the {format_seconds(PROOF_SECONDS)} of its proof"


def _left_open(context: PricedTask, pair: Columns) -> float:
    """Return the standard deviation of the log of one plan's time over another's that their figures leave open.

    A cause of error moves the ratio of two times by the difference of its shares of them. Example: launches are 8 % of
    one plan and 16 % of the other, products 92 and 84 %, figures are 37 % off: 0.37 x sqrt(0.08^2 + 0.08^2) = 0.042.
    Runs of this task may leave less open.
    """
    sheet = Sheet(dataclasses.replace(context, learnt=None), pair)
    terms = time_components(sheet)
    seconds = cause_seconds((term.name, term.kind, term.values) for term in terms)
    shares, spreads = seconds / seconds.sum(axis=1, keepdims=True), time_spread(sheet, terms)
    by_figures = float(np.max(spreads) * np.linalg.norm(shares[0] - shares[1]))
    if context.learnt is None:
        return by_figures
    return min(by_figures, context.learnt.left_open(sheet.columns, spreads, host_shares(sheet, terms)))
