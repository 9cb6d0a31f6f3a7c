"""Collectives inside forward and backward passes: over tp, cp, ep and between pipeline stages."""

from __future__ import annotations

import math

import numpy as np

from paceline.plan.cost.collectives.collective import Collective
from paceline.plan.cost.columns import Floats, Ints
from paceline.plan.cost.components import in_modes
from paceline.plan.cost.model_parts import AGAIN
from paceline.plan.cost.sheet import Sheet

LOSS_REDUCTIONS = 3  # over tp, per token in fp32: the largest logit, the sum of exponentials, the label's logit


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
    """Return the all-to-alls of routed tokens over ep: there and back, forward and backward.

    Slots travel whether they hold a row or not. Example: 1.5 times the bytes with `expert_slots` of 1.5, where experts
    are evenly loaded.
    """
    columns, part, software = sheet.columns, sheet.slowest, sheet.context.software
    passes = expert_passes(sheet)
    routed = part.total("routed_elements") / columns.cp
    if software.routes_parts:  # tensor ranks each send what they hold of the sequence
        routed = routed / columns.tp
    moved = columns.device_samples * routed * sheet.rates.element_bytes * sheet.fill("tokens")
    if software.sends_once_per_node:
        ring = sheet.ring("ep")  # inside of one node a token goes once to each device (DeepEP's `is_token_in_rank`)
        moved = moved * _copies_share(sheet, np.where(ring.nodes > 1, ring.nodes, ring.size))
    moved = moved * slots_per_row(sheet)
    return Collective("ep", "all_to_all", "routed tokens", passes * moved, passes * sheet.passes_made * part.routers)


def slots_per_row(sheet: Sheet) -> float:
    """Return how many slots travel for each routed row, of evenly loaded experts; 1 where rows travel exactly."""
    return max(1.0, sheet.columns.common.expert_slots)


def expert_waits(sheet: Sheet) -> Floats:
    """Return how often in a step the host waits for an exact exchange: once a layer and pass that routes tokens.

    Where blocks are computed again the host waits there too. Example: 42 waits in 3 layers and 7 micro-batches that are
    computed again.
    """
    return sheet.passes_made * sheet.slowest.routers * (expert_passes(sheet) - 2) / 2


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


def repeated_share(sheet: Sheet, field: str, modes: tuple[str, ...] = AGAIN) -> Floats:
    """Return the part of a field's sum over the slowest part that belongs to blocks of these modes of recompute."""
    again = sheet.over_modes(in_modes(sheet.context.shapes[field], *modes), sheet.slowest_row)
    whole = sheet.slowest.total(field)
    return np.divide(again, whole, out=np.zeros(len(whole)), where=whole > 0)


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
