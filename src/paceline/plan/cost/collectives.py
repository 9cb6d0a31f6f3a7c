"""Which collectives a step of a plan makes: over which axis, of how many bytes, in how many calls.

Pricing turns collectives into seconds, placement into bytes per link. Volumes are per device: of the stage that
computes longest for what stands inside forward and backward, of the heaviest stage for weights and gradients.

- tp: the stream is gathered before and reduced and scattered after attention and the feed-forward, in each pass
  (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2); the loss sums a few numbers a token;
- cp: keys and values are gathered in the forward pass and again in the backward pass, or sent around a ring, and their
  gradients summed up in fp32 (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2; Liu et al. 2023, arXiv:2310.01889);
  under a mask they are gathered once, and kept;
- ep: routed tokens go to their experts and back by all-to-all (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2);
- pp: every stage sends the stream on, and its gradient back (Narayanan et al. 2021, arXiv:2104.04473, section 3.2);
- fsdp: weights are gathered and gradients reduced and scattered, those of routed experts over `expert_shard`, among the
  devices that have the same ones; dp_replicate: gradients are summed over copies. ZeRO stages say how often
  (run/parallel/data/sharding.py);
- data: frozen weights that are spread over all ranks that read different samples are gathered, a teacher's once, those
  in four bits whenever they are unpacked;
- optimizers that need whole parameters gather them for the update (run/updates/one_rule.py), counted as if every
  rule of the task did: a bound from above.

Recompute repeats the forward pass's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.plan.cost.columns import Columns, Flags, Floats, Ints
from paceline.plan.cost.components import in_modes
from paceline.plan.cost.model_parts import AGAIN, Parts
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
LOSS_REDUCTIONS = 3  # over tp, per token in fp32: the largest logit, the sum of exponentials, the label's logit


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and purpose in a step, on one device of every plan: one entry a plan.

    `axis` is a group of `spec.layout.group_of`, `kind` one of the COLLECTIVES of time/ring.py, or "send".
    `buffer_bytes` are those of the whole buffers, all calls together: of 4 all-gathers that leave 1 kB on every rank,
    4 kB.
    """

    axis: str
    kind: str
    what: str  # that moves, in words
    buffer_bytes: Floats
    calls: Floats | Ints


def collectives(sheet: Sheet) -> tuple[Collective, ...]:
    """Return all collectives of a step. Those over a group of one device are listed too, and move nothing."""
    of_model = (*stream_collectives(sheet), loss_collective(sheet), *context_collectives(sheet))
    of_ranks = (expert_collective(sheet), stage_sends(sheet), copies_collective(sheet))
    of_state = (*gather_collectives(sheet), *reduce_collectives(sheet), *update_collectives(sheet))
    of_frozen = (frozen_collective(sheet), packed_collective(sheet)) if sheet.columns.common.frozen == "spread" else ()
    return (*of_model, *of_ranks, *of_state, *of_frozen)


def stream_collectives(sheet: Sheet) -> tuple[Collective, Collective]:
    """Return the gathers of the stream over tp and its reduce-scatters: of a pass half of the collectives each."""
    shapes, stream, software = sheet.context.shapes, sheet.stream_bytes, sheet.context.software
    half = shapes.collectives / 2
    sums = half - (shapes["last_flops"] > 0) if software.stops_early else half  # a last one comes after all is there
    none = np.zeros_like(half)
    # Attention's core lies between two collectives, and has none.
    if software.selective_is_attention or not software.selective_collectives:
        some_gathers, some_sums = none, none
    else:
        some_gathers, some_sums = half, none if software.selective_sums else sums
    gathered, summed = (
        sheet.over_modes(in_modes(selective, "selective") + in_modes(full, "full"), sheet.slowest_row)
        for selective, full in ((some_gathers, half), (some_sums, sums))
    )
    both = sheet.slowest.number(shapes.collectives)  # of the forward pass half, of the backward pass half
    gathers, scatters, rounds = both + gathered + second_gathers(sheet), both + summed, sheet.passes_made
    return (
        Collective("tp", "all_gather", "stream", gathers * stream, rounds * gathers),
        Collective("tp", "reduce_scatter", "stream", scatters * stream, rounds * scatters),
    )


def second_gathers(sheet: Sheet) -> Floats:
    """Return the gathers of a micro-batch's backward pass that bring inputs of products which were not kept whole.

    The gradient of a weight that is split by columns needs the whole input: before attention and before the
    feed-forward, half of the collectives of a forward pass (`sequence_parallel` in core/tensor_parallel/layers.py of
    Megatron-LM; `tp_recompute_allgather` of Nanotron). Without sequence parallelism inputs are whole on every rank.
    """
    software = sheet.context.software
    if software.keeps_gathered or not software.sequence_parallel:
        return np.zeros(len(sheet.columns))
    return sheet.slowest.number(sheet.context.shapes.collectives) / 2


def loss_collective(sheet: Sheet) -> Collective:
    """Return the sums over tp in a loss whose logits are spread, where the slowest stage computes one."""
    columns, has_head = sheet.columns, sheet.slowest.has_head
    tokens = columns.device_samples * sheet.context.profile.tokens_per_sample * sheet.fill("tokens") / columns.cp
    moved = np.where(has_head, LOSS_REDUCTIONS * 4 * tokens, 0.0)
    calls = np.where(has_head, LOSS_REDUCTIONS * sheet.passes_made, 0)
    return Collective("tp", "all_reduce", "numbers of the loss", moved, calls)


def context_collectives(sheet: Sheet) -> tuple[Collective, Collective]:
    """Return the gathers of keys and values over cp, and the reduce-scatter of their gradients."""
    columns, part, element_bytes = sheet.columns, sheet.slowest, sheet.rates.element_bytes
    keys = part.number(exchanged_keys(sheet))
    moved = columns.device_samples * keys / columns.tp * element_bytes * sheet.fill("tokens")
    calls = sheet.passes_made * part.number(sheet.context.shapes["kv_elements"] > 0)
    passes = key_exchanges(sheet)
    return (
        Collective("cp", "all_gather", "keys and values", passes * moved, passes * calls),
        Collective("cp", "reduce_scatter", "their gradients", max(4, element_bytes) / element_bytes * moved, calls),
    )


def again_exchanged(sheet: Sheet) -> Floats:
    """Return the part of the keys and values that recompute exchanges once more.

    Selective recompute that keeps attention's output does not run attention again, so it exchanges none. Example: of
    four blocks, two with full recompute and two selective, a half; and all where attention is not kept.
    """
    software, save = sheet.context.software, sheet.columns.common.recompute_save
    keeps = software.selective_attention and "attention" in save and not software.selective_is_attention
    keeps = keeps and not sheet.context.profile.masked  # what is gathered under a mask is no part of that operator
    return repeated_share(sheet, "kv_elements", ("full",) if keeps else AGAIN)


def key_exchanges(sheet: Sheet) -> Floats:
    """Return how often keys and values are exchanged: in the forward pass, in the backward pass, and in recompute.

    Under a mask all of them are kept for the backward pass, which exchanges none.
    """
    return (1 if sheet.context.profile.masked else 2) + again_exchanged(sheet)


def goes_around(sheet: Sheet) -> bool:
    """Return whether keys go from rank to rank: under a mask they are gathered, whatever the method."""
    return sheet.columns.common.cp_method == "ring" and not sheet.context.profile.masked


def exchanged_keys(sheet: Sheet) -> Floats:
    """Return the elements of keys and values of a sample that ranks of cp exchange, of every different block.

    Example: 8 heads of keys for 32 of queries are four times as much where they are repeated before.
    """
    shapes = sheet.context.shapes
    if not sheet.context.software.rings_repeated:
        return shapes["kv_elements"]
    found: Floats = shapes["kv_elements"] * np.maximum(1.0, shapes["heads"] / np.maximum(shapes["kv_heads"], 1.0))
    return found


def expert_collective(sheet: Sheet) -> Collective:
    """Return the all-to-alls of routed tokens over ep: there and back, forward and backward."""
    columns, part, software = sheet.columns, sheet.slowest, sheet.context.software
    passes = expert_passes(sheet)
    routed = part.total("routed_elements") / columns.cp
    if software.routes_parts:  # tensor ranks each send what they hold of the sequence
        routed = routed / columns.tp
    moved = columns.device_samples * routed * sheet.rates.element_bytes * sheet.fill("tokens")
    if software.sends_once_per_node:
        ring = sheet.ring("ep")  # inside of one node a token goes once to each device (DeepEP's `is_token_in_rank`)
        moved = moved * _copies_share(sheet, np.where(ring.nodes > 1, ring.nodes, ring.size))
    return Collective("ep", "all_to_all", "routed tokens", passes * moved, passes * sheet.passes_made * part.routers)


def expert_passes(sheet: Sheet) -> Floats:
    """Return how often routed tokens travel: to the experts and back, in both passes and once more in recompute.

    Selective recompute that keeps products brings their inputs to them again, and their results to the token's own
    rank, where they are weighed; none of it where attention's core alone is computed again.
    """
    software = sheet.context.software
    modes = AGAIN if software.selective_routes and not software.selective_is_attention else ("full",)
    return 4 + 2 * repeated_share(sheet, "routed_elements", modes)


def stage_sends(sheet: Sheet) -> Collective:
    """Return what a stage in the middle sends: every micro-batch's stream on, and its gradient back."""
    columns = sheet.columns
    calls = 2 * columns.accumulation * columns.virtual_stages
    return Collective("pp", "send", "stream", calls * micro_stream_bytes(sheet), calls)


def micro_stream_bytes(sheet: Sheet) -> Floats:
    """Return the bytes of one micro-batch's stream between two stages, of one device."""
    found: Floats = sheet.stream_bytes / sheet.columns.tp / sheet.columns.accumulation
    return found


def gather_collectives(sheet: Sheet) -> tuple[Collective, Collective]:
    """Return the all-gathers of weights: dense ones, and those of routed experts."""
    columns, part, rounds = sheet.columns, sheet.heaviest, sheet.passes_made
    third, size = columns.zero == 3, _weight_bytes(sheet)
    software = sheet.context.software
    dense, experts = _held(sheet)
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


def repeated_share(sheet: Sheet, field: str, modes: tuple[str, ...] = AGAIN) -> Floats:
    """Return the part of a field's sum over the slowest part that belongs to blocks of these modes of recompute."""
    again = sheet.over_modes(in_modes(sheet.context.shapes[field], *modes), sheet.slowest_row)
    whole = sheet.slowest.total(field)
    return np.divide(again, whole, out=np.zeros(len(whole)), where=whole > 0)


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


def _copies_share(sheet: Sheet, nodes: Ints) -> Floats:
    """Return how many nodes (or devices) a token's k experts lie on, for each: N (1 - (1 - 1/N)^k) / k of N nodes.

    Where a token goes to g of G groups of experts, N is the nodes that these stand on: N (1 - C(G - G/N, g) / C(G, g)).
    Example: 8 experts on 8 nodes lie on 5.3 of them, and on 3.6 where they are of 4 of 8 groups, a group to a node
    (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2).
    """
    shapes = sheet.context.shapes
    routed = shapes["routed_elements"]
    chosen = max(1.0, float(np.max(routed / np.maximum(shapes["input_elements"], 1.0))))
    limits = [block.routed_groups for block in shapes.blocks if block.routed_groups]
    open_nodes = _nodes_of_groups(nodes, *limits[0]) if limits else nodes
    share: Floats = open_nodes * (1 - (1 - 1 / open_nodes) ** chosen) / chosen
    return np.where(nodes > 1, share, 1.0)


def _nodes_of_groups(nodes: Ints, groups: int, most: int) -> Floats:
    """Return how many nodes `most` of so many groups of experts stand on, of groups dealt out evenly over nodes."""
    missed = [math.comb(max(0, groups - -(-groups // count)), most) / math.comb(groups, most) for count in nodes]
    found: Floats = np.maximum(1.0, nodes * (1 - np.array(missed)))
    return found
