"""What the model axes add to a step: collectives inside forward and backward, and what a pipeline waits.

Collectives of `tp`, `cp` and `ep` stand in the path of the computation, so nothing of them is hidden here. Volumes are
of the slowest stage, per device:

- tp: the stream is gathered before and reduced and scattered after attention and the feed-forward, in each pass
  (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2);
- cp: keys and values are gathered in the forward pass, their gradients reduced and scattered in the backward pass
  (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2);
- ep: routed tokens go to their experts and back by all-to-all (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2);
- pp: every stage sends the stream on, and its gradient back (Narayanan et al. 2021, arXiv:2104.04473, section 3.2).

Recompute repeats the forward pass's.
"""

from __future__ import annotations

from paceline.plan.cost.inputs import Context
from paceline.plan.cost.parts import Part
from paceline.plan.cost.rates import BYTES, weakest
from paceline.plan.cost.ring import hop
from paceline.plan.forecast import Term
from paceline.plan.plan import Plan

LOSS_REDUCTIONS = 3  # over tp, per token in fp32: the largest logit, the sum of exponentials, the label's logit

# The part of a pipeline's fill and drain that a schedule leaves idle. Zero-bubble (ZB-H1) fills it with gradients of
# weights: (p - 1)(F + B - W) of (p - 1)(F + B + W), a third where the three take equally long (Qi et al. 2023,
# arXiv:2401.10241, table 2).
IDLE_SHARE = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1.0, "zero-bubble": 1 / 3}


def axis_terms(context: Context, plan: Plan) -> list[Term]:
    """Return the seconds per step of communication inside forward and backward; none for the data axes."""
    part, layout = context.slowest(plan), plan.layout
    terms = []
    if layout.tp > 1:
        terms.append(_tensor(context, plan, part))
    if layout.cp > 1:
        terms.append(_context(context, plan, part))
    if layout.ep > 1 and part.routers:
        terms.append(_expert(context, plan, part))
    if layout.pp > 1:
        terms.append(_sends(context, plan))
    return terms


def repeated_share(context: Context, plan: Plan, part: Part, modes: tuple[str, ...] = ("selective", "full")) -> float:
    """Return the part of a device's repeated blocks that runs its forward pass's communication again."""
    groups = context.by_mode(plan, part)
    return sum(len(groups[mode].blocks) for mode in modes if mode in groups) / max(1, len(part.recomputable))


def _stream_bytes(context: Context, plan: Plan) -> float:
    """Return the bytes of the stream between two blocks of a device's samples of a step, whole over tp."""
    samples = context.device_samples(plan)
    return samples * context.stream_elements / plan.layout.cp * BYTES[plan.precision]


def _tensor(context: Context, plan: Plan, part: Part) -> Term:
    group = context.ring(plan, "tp")
    once, again = part.tensor_collectives
    collectives = 2 * once + round(again * repeated_share(context, plan, part))
    stream = _stream_bytes(context, plan)
    # Half of them gather and half reduce and scatter.
    kinds = ("all_gather", "reduce_scatter")
    launches = plan.accumulation * collectives / 2
    seconds = sum(group.seconds(kind, collectives / 2 * stream, launches) for kind in kinds)
    text = f"{collectives} gathers and reduce-scatters x {stream:.3g} B of stream over {group.size}"
    if part.has_head:
        tokens = context.device_samples(plan) * context.profile.tokens_per_sample / plan.layout.cp
        launches = LOSS_REDUCTIONS * plan.accumulation
        seconds += group.seconds("all_reduce", LOSS_REDUCTIONS * 4 * tokens, launches)
        text += f", and {LOSS_REDUCTIONS} numbers a token in the loss"
    return Term("tensor communication", seconds, text, group.source)


def _context(context: Context, plan: Plan, part: Part) -> Term:
    group, size = context.ring(plan, "cp"), BYTES[plan.precision]
    moved = context.device_samples(plan) * part.kv_elements / plan.layout.tp * size
    launches = plan.accumulation * part.attentions
    forward = group.seconds("all_gather", moved, launches)
    seconds = forward * (1 + repeated_share(context, plan, part)) + group.seconds("reduce_scatter", moved, launches)
    again = " (again in recompute)" if plan.recompute != "none" else ""
    text = f"gather{again} and reduce-scatter of {moved:.3g} B of keys and values over {group.size}"
    return Term("context communication", seconds, text, group.source)


def _expert(context: Context, plan: Plan, part: Part) -> Term:
    group, passes = context.ring(plan, "ep"), 4 + 2 * repeated_share(context, plan, part, ("full",))
    samples, size = context.device_samples(plan), BYTES[plan.precision]
    moved = samples * part.routed_elements / plan.layout.cp * size
    seconds = group.seconds("all_to_all", passes * moved, passes * plan.accumulation * part.routers)
    text = f"{passes:g} x {moved:.3g} B of routed tokens over {group.size}, experts evenly loaded"
    return Term("expert all-to-all", seconds, text, weakest(group.source, "assumed"))


def _sends(context: Context, plan: Plan) -> Term:
    """Return what sending the stream from stage to stage takes: not hidden, each micro-batch there and back."""
    rate, latency, source = hop(context.cluster, *plan.layout.group("pp"))
    micro = _stream_bytes(context, plan) / plan.layout.tp / plan.accumulation
    count = 2 * (plan.accumulation * plan.virtual_stages + plan.layout.pp - 1)
    text = f"{count} sends of {micro:.3g} B: {plan.accumulation} micro-batches there and back, and filling"
    return Term("pipeline sends", count * (micro / rate + latency), text, source)


def bubble_terms(context: Context, plan: Plan, compute: list[Term], inside: list[Term]) -> list[Term]:
    """Return how long the slowest stage waits while the pipeline fills and drains; nothing without a pipeline.

    Filling and draining takes one micro-batch's time in every other stage, `p - 1` of equal ones, a `v`-th of that
    with `v` chunks a rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2); `compute` and `inside` are the
    slowest stage's own terms, which the other stages are in proportion to.
    """
    if plan.layout.pp == 1:
        return []
    stages = context.stages(plan)
    own = sum(term.value for term in (*compute, *inside) if term.name != "pipeline sends")
    slowest = context.busy_seconds(context.slowest(plan), plan)
    all_work = sum(context.busy_seconds(stage.part, plan) * stage.ranks for stage in stages) / slowest
    share = IDLE_SHARE[plan.schedule]
    seconds = (all_work - 1) * own / plan.accumulation / plan.virtual_stages * share
    waits = f"{all_work - 1:.3g} micro-batches in the other stages"
    text = f"{waits} of {plan.accumulation}" + (f" / {plan.virtual_stages} chunks" if plan.virtual_stages > 1 else "")
    text += f" x {share:.2f} idle" if share < 1 else ""
    source = max(compute, key=lambda term: term.value).source
    return [Term("pipeline bubble", seconds, f"{text}, {plan.schedule}", source)]
