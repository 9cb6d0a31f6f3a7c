"""Smaller: plans that need less memory than a given plan, and what each gives up for that. Imports no torch.

A run carries them along, so that a rank whose memory is exhausted can say which change would fit, at once and without
planning anything.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from paceline.plan.cost.components import terms_of, total
from paceline.plan.cost.memory.usable import needed_terms
from paceline.plan.cost.pricing import held_components, memory_of, time_components
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.feasible.refusals import refusal
from paceline.spec.forecast import Term
from paceline.spec.layout import accumulation_for, largest_part
from paceline.spec.plan import RECOMPUTE, Plan
from paceline.spec.survive.smaller import SmallerPlan

TRIED_RECOMPUTE = ("selective", "full")  # beside the plan's own
OFFLOADED = {"none": "optimizer", "activations": "all"}  # what a plan becomes whose optimizer rests on the host
MOST = 16  # plans that a run carries along


def smaller_plans(context: PricedTask, plan: Plan) -> tuple[SmallerPlan, ...]:
    """Return plans of the same layout that need less memory, the smallest change first.

    A change of one option is smaller than one of two; among those that change as many, the one that takes less time
    is. What needs no less memory than a smaller change is left out.
    """
    changes = [each for each in _changes(context, plan) if refusal(each, context.profile) is None]
    found: list[tuple[int, float, SmallerPlan]] = []
    for offload in dict.fromkeys(each.offload for each in changes):  # what plans of one sheet have in common
        alike = [each for each in changes if each.offload == offload]
        sheet = context.sheet(*alike)
        seconds, memory = total(time_components(sheet)), held_components(sheet)
        for at, changed in enumerate(alike):
            text, taken = _text(plan, changed), float(seconds[at])
            held = held_by_kind(needed_terms(context.cluster, terms_of(memory, at)))
            shape = (changed.micro_batch, changed.accumulation, changed.recompute, changed.offload)
            found.append((text.count("="), taken, SmallerPlan(text, *shape, held, taken)))
    found.sort(key=lambda each: (each[0], each[1] if math.isfinite(each[1]) else math.inf, -each[2].bytes))
    least = sum(held_by_kind(needed_terms(context.cluster, memory_of(context, plan))).values())
    kept: list[SmallerPlan] = []
    for _, _, each in found:
        if each.bytes < least:
            kept.append(each)
            least = each.bytes
    return tuple(kept[:MOST])


def held_by_kind(terms: list[Term]) -> dict[str, float]:
    """Return the bytes of terms of memory by their kind."""
    found: dict[str, float] = {}
    for term in terms:
        found[term.kind] = found.get(term.kind, 0.0) + term.value
    return found


def _changes(context: PricedTask, plan: Plan) -> Iterator[Plan]:
    """Yield plans that differ in micro-batch, recompute and what rests on the host, each in the direction of less."""
    sizes, size = [plan.micro_batch], plan.micro_batch
    while size > 1 and "accumulation" not in (context.profile.closed_axes or {}):
        size //= 2
        sizes.append(size)
    modes = [plan.recompute]
    if context.recomputable and plan.recompute != "budget":
        modes += [mode for mode in TRIED_RECOMPUTE if RECOMPUTE.index(mode) > RECOMPUTE.index(plan.recompute)]
    offloads = [plan.offload]
    if context.cluster.device.kind != "cpu" and plan.offload in OFFLOADED:
        offloads.append(OFFLOADED[plan.offload])
    degree = plan.layout.data_degree
    for micro_batch, recompute, offload in itertools.product(sizes, modes, offloads):
        micro_batch = min(micro_batch, largest_part(plan.batch_samples, degree, plan.rows))
        accumulation = accumulation_for(plan.batch_samples, degree, micro_batch, plan.rows)
        changed = dataclasses.replace(
            plan, micro_batch=micro_batch, accumulation=accumulation, recompute=recompute, offload=offload
        )
        if changed != plan:
            yield changed


def _text(plan: Plan, changed: Plan) -> str:
    """Return what a plan changes, as options of a spec."""
    changes = []
    if changed.micro_batch != plan.micro_batch:
        changes.append(f"plan.micro_batch = {changed.micro_batch}")
    if changed.recompute != plan.recompute:
        changes.append(f'plan.recompute = "{changed.recompute}"')
    if changed.offload != plan.offload:
        changes.append(f'plan.offload = "{changed.offload}"')
    return " and ".join(changes)
