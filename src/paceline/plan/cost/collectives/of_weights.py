"""Collectives of weights and gradients: over shards and copies, of frozen weights, and for the update."""

from __future__ import annotations

import numpy as np

from paceline.plan.cost.collectives.collective import Collective
from paceline.plan.cost.collectives.within_passes import repeated_share
from paceline.plan.cost.columns import Columns, Flags, Floats
from paceline.plan.cost.model_parts import Parts
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.time.compute import state_bytes
from paceline.plan.cost.time.unpack import unpackings
from paceline.spec.adapt.adapter import NF4_VALUE_BYTES
from paceline.spec.optimizers import gathered_values

BUCKET_RANKS = 40  # from so many ranks on, a bucket grows with them
FP8_BYTES = 1
# Recipes of fp8 whose scales are of parts of a weight: it is gathered in bf16, as a shard holds parts of other parts.
SCALED_WITHIN = ("rowwise", "blockwise")
ROUNDED_BYTES = 2  # of a gradient's value in bf16


def gather_collectives(sheet: Sheet) -> tuple[Collective, Collective]:
    """Return the all-gathers of weights: dense ones, and those of routed experts."""
    columns, part, rounds = sheet.columns, sheet.heaviest, sheet.passes_made
    third, size = columns.zero == 3, _weight_bytes(sheet)
    software = sheet.context.software
    dense, experts = _held(sheet)
    if software.master_weights:  # what is frozen is not updated: ZeRO-3 alone has to gather it
        updated = _held(sheet, trained=True)
        dense, experts = np.where(third, dense, updated[0]), np.where(third, experts, updated[1])
    again = _gathered_to_recompute(sheet)
    passes = np.where(third, (2 + again) * rounds, 1)
    # The root unit stays gathered from forward to backward.
    spread = columns.common.frozen == "spread"
    root = part.root_parameters - (part.forward_only_root if spread else 0.0)
    gathered = passes * dense - np.where(third, rounds * root / columns.tp, 0.0)
    blocks = part.forward_only - part.forward_only_root  # that only go forward are gathered once
    gathered = gathered - (0.0 if spread else np.where(third, rounds * blocks / columns.tp, 0.0))
    together = np.minimum(columns.state_degree, tensors(part)) if software.broadcasts_shards else _units(sheet)
    units = 2 * (part.units - part.forward_only_blocks) - 1 + (0 if spread else part.forward_only_blocks)
    if software.live_parameters:  # a matrix at a time
        units = (2 + again) * tensors(part)
    calls = np.where(third, rounds * units, together)
    return (
        Collective("fsdp", "all_gather", "weights", gathered * size, calls),
        Collective("expert_shard", "all_gather", "experts' weights", passes * experts * size, passes * part.routers),
    )


def gathered_in_forward(sheet: Sheet) -> Floats:
    """Return what part of the gathered bytes of weights forward passes wait for: all of them but in ZeRO-3."""
    whole = sum(found.buffer_bytes for found in gather_collectives(sheet))
    once = sheet.passes_made * sum(_held(sheet)) * _weight_bytes(sheet)
    part: Floats = np.where(sheet.columns.zero == 3, once / np.maximum(whole, 1.0), 1.0)
    return part


def _weight_bytes(sheet: Sheet) -> int:
    """Return the bytes in which a weight's value is gathered."""
    software = sheet.context.software
    narrow = software.gathers_fp8 and software.recipe not in SCALED_WITHIN
    return FP8_BYTES if sheet.columns.precision == "fp8" and narrow else sheet.rates.element_bytes


def _gathered_to_recompute(sheet: Sheet) -> Floats:
    """Return what part of the weights is gathered a third time, for what is computed again, where a program does so.

    Of a block as many weights as may be live stand from its second forward pass to its backward pass. Example: of 1.8e9
    with 1e9 live ones, four ninths are gathered again.
    """
    software, part = sheet.context.software, sheet.heaviest
    if not software.gathers_to_recompute:
        return np.zeros(len(sheet.columns))
    block = np.maximum(part.largest_block(sheet.columns.ep) / sheet.columns.tp, 1.0)
    gone: Floats = 1 - np.minimum(1.0, software.live_parameters / block)
    return repeated_share(sheet, "parameters", ("full",)) * gone


def frozen_collective(sheet: Sheet) -> Collective:
    """Return the all-gathers of a frozen model that is spread over all data ranks: once for every micro-batch."""
    columns, part = sheet.columns, sheet.heaviest
    rounds = sheet.passes_made * (columns.common.frozen == "spread")
    units = part.forward_only_blocks + (part.forward_only_root > 0)
    return Collective("data", "all_gather", "frozen weights", rounds * part.forward_only * sheet.rates.element_bytes,
                      rounds * units)  # fmt: skip


def packed_collective(sheet: Sheet) -> Collective:
    """Return the all-gathers of weights in four bits that are spread over all data ranks: whenever they are unpacked.

    Of a layer its values alone, half a byte each: scales are whole everywhere (run/parallel/data/packed_weights.py).
    """
    shapes, rounds = sheet.context.shapes, sheet.passes_made
    moved = NF4_VALUE_BYTES * unpackings(sheet, shapes["packed_parameters"])
    return Collective("data", "all_gather", "weights in four bits", rounds * moved,
                      rounds * unpackings(sheet, shapes["packed_layers"]))  # fmt: skip


def reduce_collectives(sheet: Sheet) -> tuple[Collective, Collective]:
    """Return the reduce-scatters of gradients: of dense weights, and of routed experts."""
    part, size = sheet.heaviest, gradient_bytes(sheet)
    dense, experts = _held(sheet, trained=True)
    times = reductions(sheet)
    return (
        Collective("fsdp", "reduce_scatter", "gradients", times * dense * size, times * _units(sheet)),
        Collective(
            "expert_shard", "reduce_scatter", "experts' gradients", times * experts * size, times * part.routers
        ),
    )


def reductions(sheet: Sheet) -> Floats:
    """Return how often gradients are reduced over shards in a step: in every micro-batch of ZeRO-2 and 3, else once.

    A plan of ZeRO-3 that holds whole gradients reduces them once, and so do programs that keep ZeRO-2's gradients whole
    until the last micro-batch, or those of ZeRO-3 too.
    """
    columns = sheet.columns
    software = sheet.context.software
    each = (columns.zero >= (3 if software.reduces_once else 2)) & ~columns.reduces_once
    if software.sums_whole:
        each = np.zeros_like(each)
    found: Floats = np.where(each, sheet.passes_made, 1.0)
    return found


def copies_collective(sheet: Sheet) -> Collective:
    """Return what goes over copies in a step: gradients of shards by unit, those of plain copies in buckets.

    Of an outer step, in buckets too, it is the part of one step, and in bf16 copies gather each other's gradients.
    """
    columns, part, common = sheet.columns, sheet.heaviest, sheet.columns.common
    whole = part.trained / columns.tp * gradient_bytes(sheet) / columns.state_degree
    buckets = np.ceil(whole / common.bucket_bytes)
    if common.sync.has_outer_step:
        every = common.sync.every
        return Collective("dp_replicate", "all_reduce", "changes of weights", whole / every, buckets / every)
    if common.sync.wire == "bf16":
        gathered = columns.dp_replicate * whole * ROUNDED_BYTES / gradient_bytes(sheet)
        return Collective("dp_replicate", "all_gather", "rounded gradients", gathered, buckets)
    calls = np.where(columns.is_sharded, part.units, buckets)
    return Collective("dp_replicate", "all_reduce", "gradients", whole, calls)


def gradient_bytes(sheet: Sheet) -> int:
    """Return the bytes in which a gradient's values are summed over the data axes."""
    wide = state_bytes(sheet.columns.precision) if sheet.rates.element_bytes > 4 else 0
    return max(sheet.context.software.reduce_bytes, wide)


def update_collectives(sheet: Sheet) -> tuple[Collective, Collective]:
    """Return the all-gathers for the update, over shards and over tp; of most optimizers they move nothing."""
    part, optimizer = sheet.heaviest, sheet.context.optimizer
    shards, tensor = gathered_bytes(sheet.columns, part.trained, optimizer)
    calls = np.ceil(gathered_values(optimizer)) * tensors(part)
    return (
        Collective("fsdp", "all_gather", "parameters for the update", shards, calls),
        Collective("tp", "all_gather", "parameters for the update", tensor, calls),
    )


def gathers(columns: Columns, optimizer: str) -> Flags:
    """Return which plans gather parameters for the update."""
    return (columns.state_degree * columns.tp > 1) & (gathered_values(optimizer) > 0)


def gathered_bytes(columns: Columns, parameters: Floats, optimizer: str) -> tuple[Floats, Floats]:
    """Return the bytes that the all-gathers of a step make, over the shards and over `tp`; the inner axis comes first.

    An all-gather of N bytes over n ranks leaves N on each, and brings it (n - 1) / n of them.
    """
    whole = gathered_values(optimizer) * state_bytes(columns.precision) * parameters
    return np.where(columns.state_degree > 1, whole, 0.0), np.where(columns.tp > 1, whole / columns.state_degree, 0.0)


def tensors(part: Parts) -> Floats:
    """Return about how many tensors the parts have: a block's parameters over the size of one of its matrices."""
    shapes = part.shapes
    matrix = np.where(shapes["matmul_flops"] > 0, np.maximum(shapes["matmul_width"], 1.0) ** 2, np.inf)
    routed = np.where(shapes["routed_flops"] > 0, shapes["expert_parameters"], 0.0)
    several = (shapes["parameters"] - routed) / matrix + routed / np.maximum(shapes["routed_width"], 1.0) ** 2
    return part.number((shapes["parameters"] > 0) * np.maximum(1.0, np.round(several)))


def _held(sheet: Sheet, *, trained: bool = False) -> tuple[Floats, Floats]:
    """Return the parameters of a device of the heaviest stage, those of routed experts apart, before sharding.

    With `trained` those alone that have gradients; experts have where the dense parameters leave room for theirs.
    """
    columns, part = sheet.columns, sheet.heaviest
    apart = part.forward_only if columns.common.frozen == "spread" else 0.0
    experts, held = part.total("expert_parameters"), part.trained if trained else part.parameters - apart
    experts = np.where(held >= experts, experts, 0.0)
    return (held - experts) / columns.tp, experts / columns.tp / columns.ep


def _units(sheet: Sheet) -> Floats:
    """Return how many collectives the weights or gradients of a device take: one for each unit, or for each bucket.

    Buckets of Megatron-LM's grow with the ranks, so that a ring's latency stays small beside what it moves.
    """
    least, columns, part = sheet.context.software.bucket_parameters, sheet.columns, sheet.heaviest
    if not least:
        return np.asarray(part.units, dtype=np.float64)
    bucket = np.maximum(least, least / BUCKET_RANKS * columns.state_degree)
    found: Floats = np.where(columns.zero == 3, part.units, np.ceil(part.parameters / columns.tp / bucket))
    return found
