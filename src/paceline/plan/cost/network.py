"""What a step communicates over the data axes of the mesh, and what of it computing hides.

Pipeline stages and tensor ranks each communicate their own weights; the routed experts of a group of `ep` devices are
shared out, so only devices with the same experts gather and reduce those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.plan.cost.compute import held_text, state_bytes
from paceline.plan.cost.inputs import Context
from paceline.plan.cost.rates import BYTES, weakest
from paceline.plan.forecast import Term
from paceline.plan.plan import Plan

BUCKET_BYTES = 25 * 2**20  # gradients of plain copies are reduced in buckets of this size


@dataclass(frozen=True)
class Traffic:
    """Seconds of communication in a step before any of it is hidden, and how it is computed."""

    gather_seconds: float
    gather_text: str
    reduce_seconds: float
    reduce_text: str
    source: str


def traffic(context: Context, plan: Plan) -> Traffic:
    """Return what a step communicates. The classes follow the table in run/parallel/data.py."""
    layout, part, rounds = plan.layout, context.heaviest(plan), plan.accumulation
    shard, copies = (context.ring(plan, axis) for axis in ("fsdp", "dp_replicate"))
    experts = part.expert_parameters / layout.tp / layout.ep
    dense, root = (part.parameters - part.expert_parameters) / layout.tp, part.root_parameters / layout.tp
    memory_rate = context.rates(plan.precision).memory_rate
    gather_seconds, gather_text, reduce_parts, reduce_seconds = 0.0, "", [], 0.0
    if shard.size > 1:
        compute_bytes, size = BYTES[plan.precision], state_bytes(plan)
        # The root unit stays gathered from forward to backward.
        passes = 2 * rounds if plan.zero == 3 else 1
        gathered = passes * dense - (rounds * root if plan.zero == 3 else 0.0)
        launches = rounds * (2 * part.units - 1) if plan.zero == 3 else part.units
        gather_seconds = shard.seconds("all_gather", gathered * compute_bytes, launches)
        times = rounds if plan.zero >= 2 else 1
        reduce_seconds = shard.seconds("reduce_scatter", times * dense * size, times * part.units)
        if experts:
            same = context.ring(plan, "expert_shard")
            gather_seconds += same.seconds("all_gather", passes * experts * compute_bytes, passes * part.routers)
            reduce_seconds += same.seconds("reduce_scatter", times * experts * size, times * part.routers)
        gather_seconds += 2 * (gathered + passes * experts) * compute_bytes / memory_rate
        reduce_seconds += 2 * times * (dense + experts) * size / memory_rate
        how = f"{rounds} micro-batches x all-gather in forward and backward" if plan.zero == 3 else "one all-gather"
        gather_text = f"{how}{' per step' if plan.zero < 3 else ''} over {shard.size} ({compute_bytes} B/parameter)"
        gather_text += f"{held_text(plan)}, and a copy out of the buffer"
        reduce_parts.append(f"{times} x reduce-scatter over {shard.size} ({size} B/parameter)")
    if copies.size > 1:
        total = part.parameters / layout.tp * state_bytes(plan) / layout.state_degree
        launches = part.units if layout.is_sharded else math.ceil(total / BUCKET_BYTES)
        reduce_seconds += copies.seconds("all_reduce", total, launches)
        what = "shard" if layout.state_degree > 1 else "gradients"
        reduce_parts.append(f"one all-reduce of the {what} over {copies.size}")
    return Traffic(
        gather_seconds,
        gather_text,
        reduce_seconds,
        " + ".join(reduce_parts) + (held_text(plan) if reduce_parts else ""),
        weakest(*(group.source for group in (shard, copies) if group.size > 1), "measured"),
    )


def network_terms(context: Context, plan: Plan, forward_backward_seconds: float) -> list[Term]:
    """Return what communication adds to a step.

    Processes on CPUs share their cores with gloo's threads, so nothing is hidden there. On accelerators gathering runs
    beside the whole of forward and backward, reduction beside the backward pass (two thirds) of the micro-batches that
    communicate; the first gather and the last reduction have nothing to hide behind.
    """
    if plan.layout.devices == 1:
        return []
    moved = traffic(context, plan)
    gather, reduce, how = moved.gather_seconds, moved.reduce_seconds, "not overlapped (CPU)"
    if context.cluster.device.kind != "cpu":
        ends = 1 / max(1, context.heaviest(plan).units)
        reduces_always = plan.layout.state_degree > 1 and plan.zero >= 2
        window = 2 / 3 * forward_backward_seconds / (1 if reduces_always else plan.accumulation)
        gather_window = forward_backward_seconds / (1 if plan.zero == 3 else plan.accumulation)
        # Both share the links: the backward pass hides reduction first, and gathering takes what is left.
        exposed_reduce = reduce * ends + max(0.0, reduce * (1 - ends) - window)
        left = max(0.0, gather_window - (reduce - exposed_reduce))
        exposed_gather = gather * ends + max(0.0, gather * (1 - ends) - left)
        how = f"of {gather + reduce:.3g} s, the rest overlaps computing (assumed)"
        gather, reduce = exposed_gather, exposed_reduce
    terms = []
    if moved.gather_text:
        terms.append(Term("parameter gathering", gather, f"{moved.gather_text}; {how}", moved.source))
    if moved.reduce_text:
        terms.append(Term("gradient reduction", reduce, f"{moved.reduce_text}; {how}", moved.source))
    return terms
