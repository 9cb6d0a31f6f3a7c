"""What stands from forward to backward at the peak of a step, and what is short-lived there."""

from __future__ import annotations

import numpy as np

from paceline.plan.cost.columns import Flags, Floats
from paceline.plan.cost.components import MEASURED, Component
from paceline.plan.cost.memory.held_at_peak import HeldAtPeak
from paceline.plan.cost.memory.offload import MOVING_BLOCKS, rests_on_host
from paceline.plan.cost.memory.recompute import partitions
from paceline.plan.cost.model_parts import largest_of


def activations(peak: HeldAtPeak) -> tuple[Component, Component, Floats, Floats]:
    """Return what stands from forward to backward, what is short-lived, and the bytes that are free by then.

    And, of the first two, the bytes that the head needs more than a block does.

    The head's own is used before any block is computed again, so where one is, the larger of the two moments
    counts. Blocks have been passed before the head, though, and what they needed is free in other sizes than the
    head asks for. Example: 3 GB of logits and as much for their gradients, or a block of 4 GB and 0.5 of its
    gradients: 6 GB, and 3.5 or 4 that the allocator keeps: 4, where 3 + 4 + 3 are what it has asked for in all.
    """
    sheet, shapes, rows, size = peak.sheet, peak.sheet.context.shapes, peak.sheet.rows, peak.compute
    own = sheet.kept_bytes
    saved, part, _ = own
    on_host = rests_on_host(sheet)
    outside = saved * (1 - shapes.repeated)
    once = np.einsum("rs,rs->r", peak.parts.counts, (outside * shapes.is_head)[rows.plan])
    kept = np.einsum("rs,rs->r", peak.parts.counts, (outside * ~shapes.is_head)[rows.plan])
    # What the head keeps of a micro-batch is used at once, unless all go forward first.
    others = once * np.where(peak.plans.scheduled("gpipe"), peak.flying - 1, 0.0)
    resting = sheet.over_modes(own)
    kept, offloaded = (kept, resting) if on_host else (kept + resting, np.zeros_like(kept))
    # What is computed again stands there for one block at a time, and so does what is on its way from the host.
    fused = partitions(peak.plans, sheet.context.software)
    again = np.stack([np.zeros_like(saved), saved - part if not fused else np.zeros_like(saved), saved])
    again = again + MOVING_BLOCKS * own if on_host else again
    working = sheet.most_over_modes(again)
    # The last blocks' are on their way while the head computes.
    moving = sheet.most_over_modes(MOVING_BLOCKS * own) if on_host else np.zeros_like(working)
    in_head, in_block = short_lived(peak, shapes.is_head), short_lived(peak, ~shapes.is_head)
    if fused:  # gradients of values between products are no wider than these
        in_block = np.where(peak.plans.recomputes("selective"), in_block * size / max(4, size), in_block)
    micro = peak.plans.micro_batch
    is_block = micro * (others + working) + in_block > micro * (once + others + moving) + in_head
    apart = working > moving
    beside = others + np.where(apart & is_block, working, once + moving)
    short = np.where(apart, np.where(is_block, in_block, in_head), np.maximum(in_head, in_block))
    free = micro * (others + once + working - beside) + np.maximum(in_head, in_block) - short
    of_head = micro * (beside - others - working) + short - in_block

    def text(i: int) -> str:
        plan = peak.plans.plan(i)
        words = f"{plan.micro_batch} samples x saved values ({size} B, fp32 where kept so)"
        if plan.layout.tp * plan.layout.cp > 1:
            words += f" over cp {plan.layout.cp} x tp {plan.layout.tp}"
            words += ", gathered ones whole" if plan.layout.tp > 1 or sheet.context.profile.masked else ""
        if peak.flying[i] != 1:
            words += f", {peak.flying[i]:.3g} micro-batches in flight"
        if plan.recompute != "none":
            most = "one block's all" if is_block[i] else "the head's"
            words += f", {plan.recompute} recompute: kept ones and {most}"
        if offloaded[i]:
            in_all = plan.micro_batch * peak.flying[i] * offloaded[i]
            words += f"; {in_all:.3g} B in host memory, two blocks' on their way"
        return words

    values = micro * (peak.flying * kept + beside)
    law = "Korthikanti et al. 2022, section 4"
    words = "largest short-lived buffers of a block (loss, products)"
    return (
        Component("activations", "activations", values, MEASURED, text, law),
        Component("transients", "activations", short, MEASURED, lambda i: words, "counted"),
        free,
        of_head,
    )


def short_lived(peak: HeldAtPeak, of: Flags) -> Floats:
    """Return the bytes of the largest short-lived buffers among some of the different blocks."""
    plans, shapes, rows = peak.sheet.columns, peak.sheet.context.shapes, peak.sheet.rows
    grown = (plans.micro_batch / plans.cp)[:, None] * shapes["transient_elements"]
    caps = shapes["transient_cap_elements"]
    elements = np.where(caps > 0, np.minimum(grown, caps), grown) / plans.tp[:, None]
    share = peak.sheet.context.software.logit_share or 1.0
    elements = elements * np.where(shapes.is_head, share, 1.0) * of
    found: Floats = max(4, peak.compute) * largest_of(peak.parts.counts, elements[rows.plan])
    return found


def loss_buffers(peak: HeldAtPeak) -> Component:
    wide, tp = max(4, peak.compute), peak.plans.tp
    fixed = peak.parts.total("fixed_elements")

    def text(i: int) -> str:
        over = f" / tp {tp[i]}" if tp[i] > 1 else ""
        return f"{wide} B x gradients of the loss, from forward to backward{over}"

    return Component("loss buffers", "buffers", wide * fixed / tp, MEASURED, text, "counted", fixed > 0)
