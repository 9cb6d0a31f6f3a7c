"""What a step communicates over the data axes of the mesh, and what of it computing hides.

Pipeline stages and tensor ranks each communicate their own weights; the routed experts of a group of `ep` devices are
shared out, so only devices with the same experts gather and reduce those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.plan.cost.collectives.of_weights import (
    copies_collective,
    frozen_collective,
    gather_collectives,
    gathered_in_forward,
    gradient_bytes,
    packed_collective,
    reduce_collectives,
    reductions,
)
from paceline.plan.cost.columns import Floats, Ints
from paceline.plan.cost.components import Component
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.time.axes import RING, seconds_of
from paceline.spec.cluster import SOURCES


@dataclass(frozen=True)
class DataSeconds:
    """Seconds of communication in a step before any of it is hidden, and how it is computed."""

    gather_seconds: Floats
    gather_text: Callable[[int], str]
    reduce_seconds: Floats
    apart_seconds: Floats  # of those, what copies send between nodes while shards stay inside of theirs
    reduce_text: Callable[[int], str]
    known: Ints


def data_seconds(sheet: Sheet) -> DataSeconds:
    """Return what a step communicates. The classes follow the table in run/parallel/data/sharding.py."""
    columns, rounds = sheet.columns, sheet.passes_made
    shard, copies, same = sheet.ring("fsdp"), sheet.ring("dp_replicate"), sheet.ring("expert_shard")
    compute_bytes, size, memory_rate = sheet.rates.element_bytes, gradient_bytes(sheet), sheet.rates.memory_rate
    has_shards, third = shard.size > 1, columns.zero == 3
    times = reductions(sheet)
    both = []
    for dense, experts in (gather_collectives(sheet), reduce_collectives(sheet)):
        seconds = seconds_of(shard, dense)
        if sheet.heaviest.total("expert_parameters").any():
            seconds = seconds + seconds_of(same, experts)
        both.append(seconds + 2 * (dense.buffer_bytes + experts.buffer_bytes) / memory_rate)
    gather, reduce = both
    outer = columns.common.sync.has_outer_step  # then copies meet in no step but that one
    all_reduce = 0.0 if outer else seconds_of(copies, copies_collective(sheet))

    def gather_text(i: int) -> str:
        how = f"{rounds[i]:g} micro-batches x all-gather in forward and backward" if third[i] else "one all-gather"
        words = f"{how}{'' if third[i] else ' per step'} over {shard.size[i]} ({compute_bytes} B/parameter)"
        return f"{words}{sheet.held_text(i)}, and a copy out of the buffer"

    def reduce_text(i: int) -> str:
        words = [f"{times[i]:g} x reduce-scatter over {shard.size[i]} ({size} B/parameter)"] if has_shards[i] else []
        if copies.size[i] > 1 and not outer:
            what = "shard" if columns.state_degree[i] > 1 else "gradients"
            how = "all-reduce" if columns.common.sync.is_plain else f"all-gather in {columns.common.sync.wire}"
            words.append(f"one {how} of the {what} over {copies.size[i]}")
        return " + ".join(words) + sheet.held_text(i)

    return DataSeconds(
        np.where(has_shards, gather, 0.0),
        gather_text,
        np.where(has_shards, reduce, 0.0) + all_reduce,
        np.where((shard.nodes == 1) & (copies.nodes > 1), all_reduce, 0.0),
        reduce_text,
        np.maximum(np.where(has_shards, shard.source, 0), np.where(copies.size > 1, copies.source, 0)),
    )


def network_components(
    sheet: Sheet, forward_backward_seconds: Floats, computing_seconds: Floats | None = None
) -> list[Component]:
    """Return what communication adds to a step. `computing_seconds` are those of it that start no operator.

    Processes on CPUs share their cores with gloo's threads, so nothing is hidden there. On accelerators gathering runs
    beside the pass that waits for it, reduction beside the backward pass of the micro-batches that communicate; the
    first gather and the last reduction have nothing to hide behind.
    """
    moved, columns = data_seconds(sheet), sheet.columns
    gather, reduce = moved.gather_seconds, moved.reduce_seconds
    on_cpu = sheet.rates.device.kind == "cpu"
    overlaps = sheet.context.software.overlaps and not on_cpu
    if overlaps:
        gather, reduce = _exposed(sheet, moved, forward_backward_seconds)

    def how(i: int) -> str:
        all_of_it = moved.gather_seconds[i] + moved.reduce_seconds[i]
        hidden = f"of {all_of_it:.3g} s, the rest overlaps computing (assumed)"
        return hidden if overlaps else f"not overlapped{' (CPU)' if on_cpu else ''}"

    shards, reduces = columns.state_degree > 1, columns.dp_replicate > 1
    frozen = _spread_gathering(sheet) if columns.common.frozen == "spread" else []
    outer = [_outer_step(sheet)] if columns.common.sync.has_outer_step else []
    return [
        *outer,
        *frozen,
        Component(
            "parameter gathering",
            "sync",
            gather,
            moved.known,
            lambda i: f"{moved.gather_text(i)}; {how(i)}",
            RING,
            shards,
            "reduce",
        ),
        Component(
            "gradient reduction",
            "sync",
            reduce,
            moved.known,
            lambda i: f"{moved.reduce_text(i)}; {how(i)}",
            RING,
            shards | reduces if not outer else shards,
            "reduce",
        ),
        *_unit_upkeep(sheet, forward_backward_seconds if computing_seconds is None else computing_seconds),
    ]


def _unit_upkeep(sheet: Sheet, computing_seconds: Floats) -> list[Component]:
    """Return what sharded units cost beyond their collectives, where a probe measured it: of CPUs alone.

    Hooks, copies and waits of every unit, in every micro-batch whose gradients are reduced: some of it whatever is
    computed, the rest computing that is held up while the last unit's gradients travel, in proportion to it up to what
    was probed; starts of operators aside, since what was probed is products alone. In micro-batches that keep their
    gradients it is hooks alone, but where weights are gathered anew in them: that is most of what a unit does, and is
    taken for all of it. Example: 7 units of 5 ms in 4 micro-batches of ZeRO-3 take 140 ms, of ZeRO-1, which
    reduces once, 35 ms and 3 x 7 times a hook; where units compute for 2 ms, the probe's for 4, and one that computes
    nothing adds 3 ms, each is 4 ms.
    """
    columns, part = sheet.columns, sheet.heaviest
    times = np.where(columns.zero == 3, sheet.passes_made, reductions(sheet))
    link = sheet.context.cluster.links[0]
    each = np.full(len(columns), link.unit_seconds)
    if link.work_seconds:
        busy = computing_seconds / sheet.passes_made / np.maximum(1, part.units)
        least = link.least_unit_seconds
        each = least + (each - least) * np.minimum(1.0, busy / link.work_seconds)
    shards = columns.state_degree > 1
    if not link.unit_seconds or not shards.any():
        return []

    def text(i: int) -> str:
        words = f"{times[i]:g} x {part.units[i]:.0f} units x {each[i] * 1e3:.3g} ms beyond their collectives"
        rest = (
            f", {keeps[i]:g} x {link.kept_unit_seconds * 1e3:.3g} ms each where gradients are kept" if keeps[i] else ""
        )
        return f"{words}{rest}, as probed"

    keeps = sheet.passes_made - times
    seconds = np.where(shards, part.units * (times * each + keeps * link.kept_unit_seconds), 0.0)
    known = np.full(len(columns), SOURCES.index("measured"))
    return [Component("upkeep of shards", "sync", seconds, known, text, "measured", shards, "reduce")]


def _spread_gathering(sheet: Sheet) -> list[Component]:
    """Return what gathering frozen weights adds that are spread over all data ranks."""
    shapes = sheet.context.shapes
    found = [_frozen_gathering(sheet)] if shapes["forward_only_parameters"].any() else []
    return [*found, _packed_gathering(sheet)] if shapes["packed_parameters"].any() else found


def _packed_gathering(sheet: Sheet) -> Component:
    """Return what gathering weights in four bits takes: a layer waits for its own, so nothing hides it."""
    group, moved = sheet.ring("data"), packed_collective(sheet)
    seconds = seconds_of(group, moved) + 2 * moved.buffer_bytes / sheet.rates.memory_rate

    def text(i: int) -> str:
        return (
            f"{moved.calls[i]:,.0f} all-gathers a step of {moved.buffer_bytes[i]:,.0f} B in all over {group.size[i]} "
            "data ranks, whenever a layer is unpacked; not overlapped"
        )

    some = np.asarray(group.size > 1)
    return Component("gathering of four bits", "sync", np.where(some, seconds, 0.0), group.source, text, RING, some,
                     "forward_backward")  # fmt: skip


def _frozen_gathering(sheet: Sheet) -> Component:
    """Return what gathering a spread frozen model adds: all of it on a CPU, else what its own blocks do not hide."""
    columns, part, group, moved = sheet.columns, sheet.heaviest, sheet.ring("data"), frozen_collective(sheet)
    seconds = seconds_of(group, moved) + 2 * moved.buffer_bytes / sheet.rates.memory_rate
    added = seconds
    if sheet.context.software.overlaps and sheet.rates.device.kind != "cpu":
        passes = np.where(sheet.context.shapes["forward_only_parameters"] > 0, sheet.context.shapes.repeated, 0.0)
        own = (sheet.product_seconds + sheet.moving_seconds) * sheet.factors * passes
        busy = columns.device_samples * np.einsum("rs,rs->r", part.counts, own) * sheet.context.constants.overlap
        ends = 1 / np.maximum(1, part.forward_only_blocks)
        added = seconds * ends + np.maximum(0.0, seconds * (1 - ends) - busy)

    def text(i: int) -> str:
        what = f"{part.forward_only[i]:,.0f} parameters x {sheet.rates.element_bytes} B"
        return f"{sheet.passes_made[i]:g} micro-batches x all-gather of {what} over {group.size[i]} data ranks"

    some = np.asarray(group.size > 1)
    return Component("frozen model gathering", "sync", np.where(some, added, 0.0), group.source, text, RING, some,
                     "forward_backward")  # fmt: skip


def _outer_step(sheet: Sheet) -> Component:
    """Return a step's part of the outer step, which nothing hides: what copies send."""
    columns, copies, sent = sheet.columns, sheet.ring("dp_replicate"), copies_collective(sheet)
    every = columns.common.sync.every
    seconds = seconds_of(copies, sent)

    def text(i: int) -> str:
        moved = sent.buffer_bytes[i] * every
        return f"one all-reduce of {moved:.3g} B over {copies.size[i]} copies in {every} steps, not overlapped"

    return Component("outer step", "sync", seconds, copies.source, text, RING, copies.size > 1, "optimizer")


def _exposed(sheet: Sheet, moved: DataSeconds, forward_backward_seconds: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of gathering and of reduction that computing does not hide.

    What a forward pass waits for arrives beside it, the rest and gradients beside the backward pass, recompute
    included. Example: ZeRO-1 that gathers for 4 s beside a forward pass of 3 shows 1 s of it, however long the backward
    pass is.
    """
    columns, gather, reduce = sheet.columns, moved.gather_seconds, moved.reduce_seconds
    ends, row = 1 / np.maximum(1, sheet.heaviest.units), sheet.slowest_row
    hiding = sheet.context.constants.overlap * forward_backward_seconds
    busy = sheet.busy_seconds[row]
    forward = hiding * np.where(busy > 0, sheet.forward_seconds[row] / np.where(busy > 0, busy, 1.0), 1 / 3)
    backward, once = hiding - forward, columns.accumulation
    always = (columns.state_degree > 1) & ((reductions(sheet) > 1) | (once == 1))
    exposed_reduce = reduce * ends + np.maximum(0.0, reduce * (1 - ends) - backward / np.where(always, 1, once))
    # Where both share links, the backward pass hides reduction first, and gathering takes what is left.
    left = np.maximum(0.0, backward - np.maximum(0.0, reduce - exposed_reduce - moved.apart_seconds))
    first = gather * gathered_in_forward(sheet)
    room = forward / np.where(columns.zero == 3, 1, once)
    exposed_first = first * ends + np.maximum(0.0, first * (1 - ends) - room)
    exposed_rest = (gather - first) * ends + np.maximum(0.0, (gather - first) * (1 - ends) - left)
    return exposed_first + exposed_rest, exposed_reduce
