"""Buffers of collectives at the peak of a step, and what no tensor fills."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.plan.cost.collectives.within_passes import exchanged_keys, goes_around, slots_per_row
from paceline.plan.cost.columns import Flags, Floats
from paceline.plan.cost.components import ASSUMED, MEASURED, Component, total, without
from paceline.plan.cost.memory.flat_gradients import keeps_narrow
from paceline.plan.cost.memory.held_at_peak import HeldAtPeak
from paceline.plan.cost.model_parts import largest_of
from paceline.spec.cluster import SOURCES

# What a CPU's allocator keeps beyond what is in use, as a part of activations and transients: eight runs of small
# decoders on one machine missed 16 to 20 % of large sums and more of small ones.
CPU_ALLOCATOR_SHARE = 0.20


def exchanged_key_bytes(peak: HeldAtPeak) -> Floats:
    """Return the bytes of what ranks of cp exchange in one layer: keys and values, and their gradients in fp32.

    Gathered ones stand whole beside those in use, which are those of all other ranks at most; what goes around is
    there twice, sent and received. Example: of 1 GB of keys in bf16 over 4 ranks, 1 + 0.75 and 2 GB of gradients;
    around a ring 2 x (0.25 + 0.5).
    """
    sheet, plans, software = peak.sheet, peak.plans, peak.sheet.context.software
    elements = largest_of(peak.parts.counts, exchanged_keys(sheet))
    keys, wide = plans.micro_batch * elements / plans.tp, max(4, peak.compute)
    part = 2 * keys / plans.cp
    gathered = peak.compute * keys
    if software.hides_context or goes_around(sheet):
        found = (peak.compute + wide) * part
    elif software.rings_repeated:
        found = gathered + wide * part
    else:
        found = gathered * (2 - 1 / plans.cp) + wide * keys
    return np.where(plans.cp > 1, found, 0.0)


def communication_buffers(peak: HeldAtPeak) -> Component:
    """Return buffers that collectives read and write besides what they produce."""
    size, compute, plans, parts = peak.size, peak.compute, peak.plans, peak.parts
    software = peak.sheet.context.software
    copies = ~plans.is_sharded & (plans.dp_replicate > 1)
    largest = np.maximum(peak.root, peak.largest_block) / plans.tp
    trained = np.minimum(largest, peak.trained)  # what is frozen has no gradient
    units = 2 * size * trained + compute * largest
    if software.gathers_weights:  # a gradient that is reduced beside the next one's product
        units = 2 * compute * parts.largest_weight(plans.ep) / plans.tp
    bucket = size * peak.trained
    bucket = bucket if software.copies_to_buckets else np.minimum(plans.common.bucket_bytes, bucket)
    held = np.where(plans.is_sharded, units, np.where(copies, bucket, 0.0))
    stream = plans.micro_batch * compute * peak.sheet.context.stream_elements / plans.cp
    held = held + np.where(plans.tp > 1, 2 * stream, 0.0)
    routed = largest_of(parts.counts, parts.shapes["routed_elements"])
    spread = (plans.ep > 1) & (routed > 0)
    keys = exchanged_key_bytes(peak)
    held = held + keys
    held = held + np.where(spread, 2 * plans.micro_batch * compute * routed * slots_per_row(peak.sheet) / plans.cp, 0.0)
    # torch.distributed.pipelining sets one aside for each micro-batch and stage, in both directions
    received = plans.accumulation * plans.virtual_stages
    if software.master_weights:  # gradients and weights lie where they are reduced and gathered
        held, received = held - np.where(plans.is_sharded, units, 0.0), np.ones_like(received)
    reduced = (plans.state_degree > 1) & software.fills_bucket & (compute == 2) | keeps_narrow(peak.sheet)
    held = held + np.where(reduced, compute * software.reduce_bucket, 0.0)
    held = held + np.where(plans.pp > 1, 2 * received * stream / plans.tp, 0.0)
    some = plans.is_sharded | copies | (plans.tp > 1) | spread | (plans.pp > 1) | reduced
    some = some | (keys > 0)

    def text(i: int) -> str:
        unit = f"({size} + {size} + {compute}) B x largest unit{peak.here(i)}: gradients in and out"
        if trained[i] < largest[i]:
            unit = f"2 x {size} B x {trained[i]:,.0f} trained parameters, and {compute} B x largest unit"
        parts_of_it: list[tuple[Flags, str]] = [
            (plans.is_sharded, unit),
            (copies, "all gradients in buckets" if software.copies_to_buckets else "one bucket"),
            (plans.tp > 1, "the stream gathered and before it is scattered"),
            (keys > 0, f"{keys[i]:,.0f} B of a layer's keys and values from other ranks, and of their gradients"),
            (spread, "a block's routed tokens, sent and received"),
            (plans.pp > 1, f"2 x {received[i]} received streams"),
            (reduced, "the buffer that gradients are reduced in"),
        ]
        return "; ".join(words for there, words in parts_of_it if there[i]) or "none: one device"

    known = np.where(some, ASSUMED, MEASURED)
    return Component("communication buffers", "buffers", held, known, text, "counted")


def beside_tensors(
    peak: HeldAtPeak, held: Sequence[Component], short_lived: Sequence[Component], apart: Floats
) -> list[Component]:
    """Return what no tensor fills: the allocator's free blocks, and what the process holds before any tensor.

    A caching allocator holds on to blocks that no tensor fills: the more buffers of different sizes come and go,
    the more. A CPU's does so for all that comes and goes. `apart` are bytes that got blocks of their own, though as
    many were free: those were smaller ones.
    """
    context = peak.sheet.context
    on_cpu, runtime = context.cluster.device.kind == "cpu", context.cluster.device.runtime_bytes
    doublings = np.log2(peak.plans.tp) + np.log2(peak.plans.pp)
    kept = context.constants.allocator_share * doublings
    kept = np.full(len(peak.plans), CPU_ALLOCATOR_SHARE) if on_cpu else kept
    of_what = "activations and transients" if on_cpu else "all but the optimizer's state, by tp and pp"
    loose = kept * total(short_lived if on_cpu else without(held, "optimizer")) + apart
    # Before it asks for more than there is, it gives back what it keeps (memory/usable.py).
    room = np.maximum(0.0, context.cluster.device.memory_bytes.value - runtime.value - total(held))
    unused = loose if on_cpu else np.fmin(loose, np.where(room > 0, room, np.inf))

    def kept_text(i: int) -> str:
        words = f"{kept[i]:.0%} of {of_what}"
        words += f", and {apart[i]:,.0f} B that are free while others are asked for" if apart[i] else ""
        return words + (", as far as the device has room" if unused[i] == room[i] else "")

    return [
        Component("allocator buffers", "cache", unused, ASSUMED, kept_text, "caching allocator"),
        Component(
            "runtime",
            "runtime",
            np.full(len(peak.plans), runtime.value),
            SOURCES.index(runtime.source),
            lambda i: runtime.note or "process before any tensor",
            "process before any tensor",
        ),
    ]
