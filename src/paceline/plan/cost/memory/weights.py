"""Weights, gradients and optimizer state at the peak of a step, and copies of weights beside them."""

from __future__ import annotations

import numpy as np

from paceline.plan.cost.columns import Floats
from paceline.plan.cost.components import MEASURED, Component, in_modes
from paceline.plan.cost.memory.held_at_peak import HeldAtPeak
from paceline.plan.cost.model_parts import largest_of
from paceline.plan.cost.time.compute import updated_bytes
from paceline.spec.adapt.adapter import NF4_BYTES, NF4_VALUE_BYTES


def packed_weights(peak: HeldAtPeak) -> list[Component]:
    """Return frozen weights in four bits, with the one layer that is unpacked, and gathered, at a time."""
    packed = peak.parts.total("packed_parameters")
    if not np.any(packed):
        return []
    largest = largest_of(peak.parts.counts, peak.parts.shapes["unpacked_elements"])
    unpacked = 8 + peak.compute  # two fp32 values on the way, and the one that is computed with

    is_spread = peak.plans.common.frozen == "spread"
    ranks = peak.plans.data_degree if is_spread else np.ones(len(peak.plans), dtype=np.int64)
    layer = unpacked + NF4_VALUE_BYTES * (ranks > 1)
    scales = NF4_BYTES - NF4_VALUE_BYTES

    def text(i: int) -> str:
        each = f"{NF4_BYTES:.4f} B"
        if ranks[i] > 1:
            each = f"({NF4_VALUE_BYTES} B / {ranks[i]} data ranks + {scales:.4f} B)"
        return f"{each} x {packed[i]:,.0f} frozen weights + {layer[i]:g} B x {largest[i]:,.0f} unpacked"

    values = (NF4_VALUE_BYTES / ranks + scales) * packed + layer * largest
    return [Component("weights in four bits", "weights", values, MEASURED, text, "QLoRA (Dettmers et al. 2023)")]


def state_of(peak: HeldAtPeak, values: float, masters: bool) -> tuple[float, str]:
    """Return an optimizer's values for a weight, and fp32 masters, as weights' sizes; and the bytes in words."""
    size, of_moment = updated_bytes(peak.sheet)
    if size == of_moment:
        return values + masters, f"{values + masters} values x {size} B"
    both = values * of_moment / size + masters
    return both, f"({values} values x {of_moment} B{f' + {size} B' if masters else ''})"


def copies_in_step(peak: HeldAtPeak, state: Floats) -> list[Component]:
    """Return what keeping copies in step holds beside the weights, each as large as these: nothing by default."""
    sync = peak.plans.common.sync
    held = 1 + bool(sync.momentum) if sync.has_outer_step else int(sync.wire != "full")
    of_what = "left out of gradients" if sync.wire != "full" else "weights that copies share"
    of_what += ", and the outer momentum" if sync.momentum else ""
    some = peak.plans.dp_replicate > 1

    def text(i: int) -> str:
        return f"{held} x {peak.size} B x parameters{peak.over(i)}: {of_what}"

    kept = Component("copies in step", "optimizer", np.where(some, held * state, 0.0), MEASURED, text, "counted", some)
    return [kept] if held else []


def held_gradients(peak: HeldAtPeak) -> Component:
    plans, shards = peak.plans, peak.plans.held_degree
    software = peak.sheet.context.software
    size = max(software.gradient_bytes, peak.size if peak.compute > 4 else 0)
    # ZeRO-1, and ZeRO-3 where a plan says so, add up whole gradients over micro-batches; with a single one they are
    # scattered as they come, where there is no buffer beside 16-bit weights that holds all of them whatever comes.
    once = plans.reduces_once | ((plans.zero == 2) & software.reduces_once) | software.sums_whole
    whole = (shards == 1) | (once & ((plans.accumulation > 1) | software.master_weights))
    both = whole & (shards > 1) & (not software.master_weights)
    held = size * np.where(both, 1 + 1 / shards, np.where(whole, 1.0, 1 / shards))
    beside = whole & software.sums_after_backward & (peak.compute < size)
    held = held + np.where(beside, peak.compute, 0)

    def text(i: int) -> str:
        words = f"{size} B x {peak.trained_text(i)}{peak.here(i)}"
        words += "" if whole[i] else f" / dp_shard {shards[i]}"
        words += f", and {peak.compute} B of each before it is added" if beside[i] else ""
        return words + (", whole until the last micro-batch, and this device's shard" if both[i] else "")

    # Buffers of such programs are of what has gradients, of experts the own ones alone.
    parameters = peak.local_trained if software.master_weights else peak.trained
    values, law = parameters * held, "ZeRO (Rajbhandari et al. 2020)"
    return Component("gradients", "gradients", values, MEASURED, text, law)


def weight_copies(peak: HeldAtPeak) -> Component:
    """Return weights in the compute dtype beside the fp32 ones: gathered, or cast and saved for backward."""
    size, plans, parts, flying = peak.compute, peak.plans, peak.parts, peak.flying
    root, largest = peak.root / plans.tp, peak.largest_block / plans.tp
    if peak.sheet.context.software.gathers_weights:  # one in use and the next on its way
        root, largest = np.zeros(len(plans)), parts.largest_weight(plans.ep) / plans.tp
    narrow = parts.total("narrow_parameters") / plans.tp  # they rest as they are computed with, and are not cast
    no_recompute = plans.recomputes("none")
    # Blocks that a budget spares recompute keep theirs for every micro-batch in flight.
    spared = np.zeros(len(plans))
    if peak.sheet.mixed is not None:
        spared = peak.sheet.over_modes(in_modes(parts.shapes["parameters"], "none")) / plans.tp
    own = peak.parameters - narrow - peak.spread
    one_unit = np.minimum(flying * own, np.minimum(own, root + largest) + flying * spared)
    narrower = size < (peak.sheet.context.software.weight_bytes or 4)
    cast = np.where(no_recompute, flying * own, one_unit) if narrower else np.zeros(len(plans))
    gathered = peak.local_parameters
    third = plans.zero == 3
    alone = np.where(peak.spread > 0, parts.forward_only_gathered, 0.0)
    at_once = root + 2 * largest
    live = peak.sheet.context.software.live_parameters
    if live:
        at_once = np.maximum(live, parts.largest_weight(plans.ep) / plans.tp)
    sharded = np.where(third, np.minimum(gathered, at_once), gathered - peak.spread + alone)
    if peak.sheet.context.software.master_weights:  # they rest in the compute dtype
        cast, sharded = np.zeros(len(plans)), np.where(third & (plans.state_degree > 1), sharded, 0.0)

    def text(i: int) -> str:
        if plans.is_sharded[i]:
            units = f"{at_once[i]:,.0f} live parameters" if live else "(root + 2 largest blocks)"
            what = units if third[i] else "parameters"
            return f"{size} B x {what}{peak.here(i)}, gathered{'' if third[i] else ' for the step'}"
        if alone[i]:
            return f"{size} B x {alone[i]:,.0f} frozen parameters gathered at once, and the others cast"
        if not values[i]:
            return "none: computes on the weights themselves"
        if no_recompute[i]:
            times = f"{flying[i]:g} micro-batches in flight x " if flying[i] > 1 else ""
            return f"{times}{size} B x parameters{peak.here(i)}, cast"
        blocks = " + blocks without recompute" if spared[i] else ""
        return f"{size} B x (root + largest block{blocks}){peak.here(i)}, cast again"

    values = size * np.where(plans.is_sharded, sharded, cast + alone)
    return Component("weight copies", "buffers", values, MEASURED, text, "FSDP2's gathered and cast weights")
