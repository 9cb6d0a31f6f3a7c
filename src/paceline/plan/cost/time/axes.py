"""What the model axes add to a step: collectives inside forward and backward, and what a pipeline waits.

Collectives of `tp`, `cp` and `ep` stand in the path of the computation, so nothing of them is hidden here. Which ones
they are, and of how many bytes, is in plan/cost/collectives/.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.plan.cost.collectives.collective import Collective
from paceline.plan.cost.collectives.within_passes import (
    LOSS_REDUCTIONS,
    again_exchanged,
    context_collectives,
    expert_collective,
    expert_passes,
    expert_waits,
    goes_around,
    key_exchanges,
    loss_collective,
    micro_stream_bytes,
    second_gathers,
    stage_sends,
    stream_collectives,
)
from paceline.plan.cost.columns import Floats
from paceline.plan.cost.components import Component, total, without
from paceline.plan.cost.rates import ATTENTION_PASSES
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.time.ring import Rings, hop
from paceline.spec.cluster import SOURCES
from paceline.spec.plan import SCHEDULES

# The part of a pipeline's fill and drain that a schedule leaves idle. Zero-bubble (ZB-H1) fills it with gradients of
# weights: (p - 1)(F + B - W) of (p - 1)(F + B + W), a third where the three take equally long (Qi et al. 2023,
# arXiv:2401.10241, table 2).
IDLE_SHARE = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1.0, "zero-bubble": 1 / 3}
# Of 132 multiprocessors of an H100 the 20 that DeepEP sends with (`Buffer.num_sms` of its README).
SENDING_UNITS = 20 / 132
RING = "ring collective (Patarasu & Yuan 2009)"
BACKWARD_ATTENTION = 1 - 1 / ATTENTION_PASSES  # the part of fused attention that is its backward pass


def axis_components(sheet: Sheet) -> list[Component]:
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


def seconds_of(group: Rings, collective: Collective) -> Floats:
    """Return the seconds per step of a collective on its group's links."""
    return group.seconds(collective.kind, collective.buffer_bytes, collective.calls)


def beyond_seconds(sheet: Sheet, *moved: Collective) -> Floats:
    """Return what collectives between layers cost beyond their own seconds, where a probe measured it: on CPUs alone.

    Example: 44 gathers and reduce-scatters of 0.8 ms take 35 ms; over a group of one device there are none.
    """
    found = np.zeros(len(sheet.columns))
    for each in moved:
        found = found + np.where(sheet.ring(each.axis).size > 1, each.calls, 0.0)
    return found * sheet.context.cluster.links[0].move_seconds


def _tensor(sheet: Sheet) -> Component:
    columns, part, group, stream = sheet.columns, sheet.slowest, sheet.ring("tp"), sheet.stream_bytes
    gather, scatter = stream_collectives(sheet)
    seconds = seconds_of(group, gather) + seconds_of(group, scatter) - _beside_gradients(sheet, gather, scatter)
    if sheet.context.software.hides_tensor:  # of as many pieces as ranks, all but one run beside a product
        seconds = seconds / columns.tp
    seconds = seconds + seconds_of(group, loss_collective(sheet)) + beyond_seconds(sheet, gather, scatter)
    several = (gather.calls + scatter.calls) / sheet.passes_made

    def text(i: int) -> str:
        words = f"{several[i]:.0f} gathers and reduce-scatters x {stream[i]:.3g} B of stream over {columns.tp[i]}"
        return words + (f", and {LOSS_REDUCTIONS} numbers a token in the loss" if part.has_head[i] else "")

    return Component("tensor communication", "collectives", seconds, group.source, text, RING, columns.tp > 1, "reduce")


def _beside_gradients(sheet: Sheet, gather: Collective, scatter: Collective) -> Floats:
    """Return the seconds per step of collectives of a backward pass that its products hide.

    A second gather of an input comes while the input's gradient is made, which does not need it; that gradient is then
    summed up over the ranks while the weight's is made. On a CPU nothing runs beside another.
    """
    columns, software = sheet.columns, sheet.context.software
    calls = sheet.passes_made * second_gathers(sheet)
    found = np.zeros(len(columns))
    if sheet.rates.device.kind == "cpu":
        return found
    products = np.einsum("rs,rs->r", sheet.slowest.counts, sheet.product_seconds * sheet.factors)
    room = sheet.context.constants.overlap * columns.device_samples / columns.cp * products
    for hides, collective in ((software.hides_second_gather, gather), (software.hides_input_sums, scatter)):
        if hides:
            share = calls / np.maximum(collective.calls, 1)
            found = found + np.minimum(share * seconds_of(sheet.ring("tp"), collective), room)
    return found


def _context(sheet: Sheet) -> Component:
    columns, part, group = sheet.columns, sheet.slowest, sheet.ring("cp")
    gather, scatter = context_collectives(sheet)
    seconds = seconds_of(group, gather) + seconds_of(group, scatter) + beyond_seconds(sheet, gather, scatter)
    again, masked = again_exchanged(sheet), sheet.context.profile.masked
    moved = gather.buffer_bytes / key_exchanges(sheet)
    software, around = sheet.context.software, goes_around(sheet)
    # Under a mask attention waits for all keys, its rank's own among them.
    if (software.hides_context or sheet.rates.device.kind != "cpu") and not masked:
        attention = columns.device_samples / columns.cp * np.einsum("rs,rs->r", part.counts, sheet.attention_seconds)
        # A ring's next keys come while these are used; what is gathered comes while a rank attends to its own. The sum
        # of all gradients at the end has nothing to come beside.
        if software.hides_context or around:
            hidden = np.minimum(seconds, attention)
        else:
            hidden = np.minimum(seconds_of(group, gather), attention / columns.cp)
        if software.rings_repeated:
            hidden = hidden + _around(sheet, scatter, attention)
        seconds = seconds - hidden

    def text(i: int) -> str:
        recompute = ", again in recompute" if again[i] > 0 else ""
        how = f"{'sent around' if around else 'gathered'} {'once' if masked else 'twice'}"
        return f"{moved[i]:.3g} B of keys and values {how}{recompute}, gradients summed, over {columns.cp[i]}"

    return Component(
        "context communication", "collectives", seconds, group.source, text, RING, columns.cp > 1, "reduce"
    )


def _around(sheet: Sheet, gradients: Collective, attention: Floats) -> Floats:
    """Return the seconds of gradients of keys that go around while the next keys' attention runs backward.

    The last of them is waited for. Example: of 4 s over 4 ranks beside attention of 14 s, forward and backward, 10 s of
    that backward, 3 s; beside 0.7 s 0.375 s, three quarters of its backward pass.
    """
    of_others = 1 - 1 / sheet.columns.cp
    found: Floats = of_others * np.minimum(seconds_of(sheet.ring("cp"), gradients), BACKWARD_ATTENTION * attention)
    return found


def _expert(sheet: Sheet) -> Component:
    columns, group, routed = sheet.columns, sheet.ring("ep"), expert_collective(sheet)
    passes = expert_passes(sheet)
    moved = routed.buffer_bytes / passes
    seconds = seconds_of(group, routed)
    if sheet.context.software.captured:
        seconds = np.where((columns.virtual_stages > 1) | (columns.pp == 1), _beside_others(sheet, seconds), seconds)
    elif sheet.context.software.hides_experts:
        seconds = np.where((columns.virtual_stages > 1) & (group.nodes > 1), _beside_others(sheet, seconds), seconds)
    slots, waits = columns.common.expert_slots, expert_waits(sheet)

    def text(i: int) -> str:
        told = f"{passes[i]:g} x {moved[i]:.3g} B of routed tokens over {columns.ep[i]}, experts evenly loaded"
        return f"{told}, {slots:g} slots for a row: the host waits {waits[i]:.0f} times less" if slots else told

    return Component(
        "expert all-to-all",
        "collectives",
        seconds,
        np.maximum(group.source, SOURCES.index("assumed")),
        text,
        "direct all-to-all",
        (columns.ep > 1) & (sheet.slowest.routers > 0),
        "reduce",
    )


def _beside_others(sheet: Sheet, seconds: Floats) -> Floats:
    """Return what a step waits for tokens that travel while its devices compute another micro-batch.

    Nothing hides them while the pipeline fills and drains, or in the first micro-batch without one. Those that are
    hidden hold up computing by the multiprocessors that send them. Example: of 10 s beside 20 s of computing, 64
    micro-batches in 8 stages of 4 chunks, with an overlap of 0.8: 0.27 s of filling, and 0.15 of the other 9.73 s.
    """
    columns, overlap = sheet.columns, sheet.context.constants.overlap
    alone = np.maximum(columns.pp - 1, 1)
    filling = seconds * np.minimum(1.0, alone / columns.accumulation / columns.virtual_stages)
    room = overlap * columns.device_samples * sheet.busy_seconds[sheet.slowest_row]
    hidden = np.minimum(seconds - filling, room)
    found: Floats = seconds - hidden + SENDING_UNITS * hidden
    return found


def _sends(sheet: Sheet) -> Component:
    """Return what sending the stream from stage to stage takes: not hidden, each micro-batch there and back."""
    columns, context = sheet.columns, sheet.context
    rate, latency, known = hop(context.cluster, context.constants, *columns.group("pp"))
    micro, filling = micro_stream_bytes(sheet), 2 * (columns.pp - 1)
    count = stage_sends(sheet).calls + filling
    if context.software.hides_sends:
        count = np.where(columns.virtual_stages > 1, filling, count)
    seconds = np.where(columns.pp > 1, count * (micro / rate + latency), 0.0)
    return Component(
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


def bubble_components(sheet: Sheet, compute: Sequence[Component], inside: Sequence[Component]) -> list[Component]:
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
    return [Component("pipeline bubble", "bubble", seconds, source, text, law, columns.pp > 1, "reduce")]


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
