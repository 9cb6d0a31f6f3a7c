"""What the model axes add to a step: collectives inside forward and backward, and what a pipeline waits.

Collectives of `tp`, `cp` and `ep` stand in the path of the computation, so nothing of them is hidden here. Volumes are
of the slowest stage, per device:

- tp: the stream is gathered before and reduced and scattered after attention and the feed-forward, in each pass
  (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2);
- cp: keys and values are gathered in the forward pass and again in the backward pass, or sent around a ring, and their
  gradients summed up in fp32 (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2; Liu et al. 2023, arXiv:2310.01889);
- ep: routed tokens go to their experts and back by all-to-all (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2);
- pp: every stage sends the stream on, and its gradient back (Narayanan et al. 2021, arXiv:2104.04473, section 3.2).

Recompute repeats the forward pass's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.plan.cost.columns import Floats, Ints
from paceline.plan.cost.components import Column, in_modes, total, without
from paceline.plan.cost.inputs import Sheet
from paceline.plan.cost.parts import AGAIN
from paceline.plan.cost.time.ring import hop
from paceline.spec.cluster import SOURCES
from paceline.spec.plan import SCHEDULES

LOSS_REDUCTIONS = 3  # over tp, per token in fp32: the largest logit, the sum of exponentials, the label's logit

# The part of a pipeline's fill and drain that a schedule leaves idle. Zero-bubble (ZB-H1) fills it with gradients of
# weights: (p - 1)(F + B - W) of (p - 1)(F + B + W), a third where the three take equally long (Qi et al. 2023,
# arXiv:2401.10241, table 2).
IDLE_SHARE = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1.0, "zero-bubble": 1 / 3}
RING = "ring collective (Patarasu & Yuan 2009)"


def axis_columns(sheet: Sheet) -> list[Column]:
    """Return the seconds per step of communication inside forward and backward, one column for each model axis."""
    columns = sheet.columns
    found = []
    if (columns.tp > 1).any():
        found.append(_tensor(sheet))
    if (columns.cp > 1).any():
        found.append(_context(sheet))
    if (columns.ep > 1).any():
        found.append(_expert(sheet))
    if (columns.pp > 1).any():
        found.append(_sends(sheet))
    return found


def _repeated_share(sheet: Sheet, field: str, modes: tuple[str, ...] = AGAIN) -> Floats:
    """Return the part of a field's sum over the slowest part that belongs to blocks of these modes of recompute."""
    again = sheet.over_modes(in_modes(sheet.context.shapes[field], *modes), sheet.slowest_row)
    whole = sheet.slowest.total(field)
    return np.divide(again, whole, out=np.zeros(len(whole)), where=whole > 0)


def _tensor(sheet: Sheet) -> Column:
    columns, part, group, stream = sheet.columns, sheet.slowest, sheet.ring("tp"), sheet.stream_bytes
    shapes = sheet.context.shapes
    again = sheet.over_modes(in_modes(shapes.collectives, *AGAIN), sheet.slowest_row)
    collectives = 2 * part.number(shapes.collectives) + again
    launches = columns.accumulation * collectives / 2
    # Half of them gather and half reduce and scatter.
    seconds = sum(group.seconds(kind, collectives / 2 * stream, launches) for kind in ("all_gather", "reduce_scatter"))
    if sheet.context.software.hides_tensor:  # of as many pieces as ranks, all but one run beside a product
        seconds = seconds / columns.tp
    tokens = columns.device_samples * sheet.context.profile.tokens_per_sample / columns.cp
    loss = group.seconds("all_reduce", LOSS_REDUCTIONS * 4 * tokens, LOSS_REDUCTIONS * columns.accumulation)
    seconds = seconds + np.where(part.has_head, loss, 0.0)

    def text(i: int) -> str:
        words = f"{collectives[i]:.0f} gathers and reduce-scatters x {stream[i]:.3g} B of stream over {columns.tp[i]}"
        return words + (f", and {LOSS_REDUCTIONS} numbers a token in the loss" if part.has_head[i] else "")

    return Column("tensor communication", "collectives", seconds, group.source, text, RING, columns.tp > 1, "reduce")


def _context(sheet: Sheet) -> Column:
    columns, part, group = sheet.columns, sheet.slowest, sheet.ring("cp")
    moved = columns.device_samples * part.total("kv_elements") / columns.tp * sheet.rates.element_bytes
    launches = columns.accumulation * part.number(sheet.context.shapes["kv_elements"] > 0)
    again = _repeated_share(sheet, "kv_elements")
    wide = max(4, sheet.rates.element_bytes) / sheet.rates.element_bytes
    seconds = group.seconds("all_gather", moved, launches) * (2 + again)
    seconds = seconds + group.seconds("reduce_scatter", wide * moved, launches)
    software, around = sheet.context.software, columns.common.cp_method == "ring"
    if software.hides_context or sheet.rates.device.kind != "cpu":
        attention = np.einsum("rs,rs->r", part.counts, sheet.attention_seconds)
        # A ring's next keys come while these are used; what is gathered comes while a rank attends to its own.
        beside = 1.0 if software.hides_context or around else 1 / columns.cp
        seconds = np.maximum(0.0, seconds - columns.device_samples / columns.cp * attention * beside)

    def text(i: int) -> str:
        recompute = ", again in recompute" if again[i] > 0 else ""
        how = "sent around" if around else "gathered"
        return f"{moved[i]:.3g} B of keys and values {how} twice{recompute}, gradients summed, over {columns.cp[i]}"

    return Column("context communication", "collectives", seconds, group.source, text, RING, columns.cp > 1, "reduce")


def _expert(sheet: Sheet) -> Column:
    columns, part, group = sheet.columns, sheet.slowest, sheet.ring("ep")
    passes = 4 + 2 * _repeated_share(sheet, "routed_elements", ("full",))
    routed = part.total("routed_elements") / columns.cp
    if sheet.context.software.routes_parts:  # tensor ranks each send what they hold of the sequence
        routed = routed / columns.tp
    moved = columns.device_samples * routed * sheet.rates.element_bytes
    if sheet.context.software.sends_once_per_node:
        moved = moved * _copies_share(sheet, group.nodes)
    seconds = group.seconds("all_to_all", passes * moved, passes * columns.accumulation * part.routers)
    return Column(
        "expert all-to-all",
        "collectives",
        seconds,
        np.maximum(group.source, SOURCES.index("assumed")),
        lambda i: f"{passes[i]:g} x {moved[i]:.3g} B of routed tokens over {columns.ep[i]}, experts evenly loaded",
        "direct all-to-all",
        (columns.ep > 1) & (part.routers > 0),
        "reduce",
    )


def _copies_share(sheet: Sheet, nodes: Ints) -> Floats:
    """Return how many nodes a token's k experts lie on, for each expert: N (1 - (1 - 1/N)^k) / k of N nodes."""
    shapes = sheet.context.shapes
    routed = shapes["routed_elements"]
    chosen = max(1.0, float(np.max(routed / np.maximum(shapes["input_elements"], 1.0))))
    share: Floats = nodes * (1 - (1 - 1 / nodes) ** chosen) / chosen
    return np.where(nodes > 1, share, 1.0)


def _sends(sheet: Sheet) -> Column:
    """Return what sending the stream from stage to stage takes: not hidden, each micro-batch there and back."""
    columns, context = sheet.columns, sheet.context
    rate, latency, known = hop(context.cluster, context.constants, *columns.group("pp"))
    micro = sheet.stream_bytes / columns.tp / columns.accumulation
    count = 2 * (columns.accumulation * columns.virtual_stages + columns.pp - 1)
    if context.software.hides_sends:
        count = np.where(columns.virtual_stages > 1, 2 * (columns.pp - 1), count)
    seconds = np.where(columns.pp > 1, count * (micro / rate + latency), 0.0)
    return Column(
        "pipeline sends",
        "sends",
        seconds,
        known,
        lambda i: (
            f"{count[i]} sends of {micro[i]:.3g} B: {columns.accumulation[i]} micro-batches there and back, and filling"
        ),
        "point to point (Narayanan et al. 2021)",
        columns.pp > 1,
        "reduce",
    )


def bubble_columns(sheet: Sheet, compute: Sequence[Column], inside: Sequence[Column]) -> list[Column]:
    """Return how long the slowest stage waits while the pipeline fills and drains; nothing without a pipeline.

    Filling and draining takes one micro-batch's time in every other stage, `p - 1` of equal ones, a `v`-th of that
    with `v` chunks a rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), less what 1F1B lets it do meanwhile;
    `compute` and `inside` are the slowest stage's own terms, which the other stages are in proportion to.
    """
    columns = sheet.columns
    if not (columns.pp > 1).any():
        return []
    own = total(without((*compute, *inside), "sends"))
    others = other_work(sheet)
    share = idle_share(sheet)
    seconds = others * own / columns.accumulation / columns.virtual_stages * share
    turns = sheet.rates.device.core_share
    if turns < 1:  # cores that a waiting rank leaves are the others', who compute the faster
        seconds = np.maximum(0.0, turns * (own + seconds) - own)
    weights = np.stack([column.values for column in compute])
    known = np.stack([np.broadcast_to(column.known, len(columns)) for column in compute])
    source = np.take_along_axis(known, np.argmax(weights, axis=0)[None, :], axis=0)[0]

    def text(i: int) -> str:
        words = f"{others[i]:.3g} micro-batches of waiting for the other stages, of {columns.accumulation[i]}"
        words += f" / {columns.virtual_stages[i]} chunks" if columns.virtual_stages[i] > 1 else ""
        words += f" x {share[i]:.2f} idle" if share[i] < 1 else ""
        words += f", less what ranks that share cores fill (each has {turns:.2g})" if turns < 1 else ""
        return f"{words}, {SCHEDULES[columns.schedule[i]]}"

    law = "fill and drain (Narayanan et al. 2021; zero-bubble: Qi et al. 2023)"
    return [Column("pipeline bubble", "bubble", seconds, source, text, law, columns.pp > 1, "reduce")]


def other_work(sheet: Sheet) -> Floats:
    """Return how long the slowest rank waits for others in filling and draining, in its own time of a micro-batch.

    The slowest rank waits for the ranks before it twice: at the start and at the end. A micro-batch sent on comes back
    when all ranks behind have computed it. Meanwhile, under 1F1B, the slowest rank runs a forward pass for each rank
    behind at the start, and a backward pass for each at the end: 4 equal stages wait for 3 micro-batches, uneven fewer.
    """
    columns, busy, slowest = sheet.columns, sheet.busy_seconds, sheet.slowest_row
    own, forward = busy[slowest], sheet.forward_seconds[slowest]
    ahead = sheet.rows.before(busy, slowest)
    behind = sheet.rows.sum(busy) - own - ahead
    ranks = columns.pp - 1 - sheet.rows.first[slowest]
    meanwhile = np.maximum(0.0, behind - ranks * forward) + np.maximum(0.0, behind - ranks * (own - forward))
    idle = ahead + np.where(columns.scheduled("1f1b", "zero-bubble"), meanwhile, behind)
    return np.where(columns.pp > 1, idle / own, 0.0)


def idle_share(sheet: Sheet) -> Floats:
    """Return the part of fill and drain that every plan's schedule leaves idle."""
    shares: Floats = np.array([IDLE_SHARE[name] for name in SCHEDULES])[sheet.columns.schedule]
    return shares
