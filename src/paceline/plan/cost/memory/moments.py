"""What a device does not hold at one time: gradients come in the backward pass as what the forward pass kept goes.

Terms of memory tell what each part takes when it is there. Their sum is the peak only where all are there at once, as
in every micro-batch but the first, which meets the gradients of the earlier ones. A step of one micro-batch has other
moments: the end of the forward pass, with no gradients; every place of the backward pass, with those of the blocks
behind it and what the blocks before it keep; its end, and the update. The largest of them is the peak. Example: 5 GB
of gradients and 16 GB of activations and buffers are 16 at most; 15 GB of gradients and 10 of these are 15 and what
the first block needs.
"""

from __future__ import annotations

import numpy as np

from paceline.plan.cost.columns import Columns, Flags, Floats
from paceline.plan.cost.components import Component
from paceline.plan.cost.memory.offload import rests_on_host
from paceline.plan.cost.model_parts import MODES, Parts, Shapes
from paceline.plan.cost.sheet import Sheet
from paceline.spec.cluster import SOURCES
from paceline.spec.optimizers import gathered_values, is_unwrapped


def held_in_turn(
    sheet: Sheet, plans: Columns, parts: Parts, gradients: Floats, passing: Floats, of_head: Floats
) -> Component:
    """Return, as bytes below zero, what gradients and the passes' own bytes never hold at one time.

    `gradients` are all of a device's, `passing` what stands in passes alone: activations, copies of weights and buffers
    (one value a row each). `of_head` are those of `passing` that the head needs more than a block.
    """
    late, spared = late_gradients(sheet, plans), np.zeros(len(plans))
    if late.any():  # of few plans of a large search
        missing = np.minimum(gradients, _missing_behind_head(sheet, plans, gradients) + of_head)
        least = np.minimum(missing, passing - _at_the_end(sheet, plans, parts))
        spared = np.where(late, np.maximum(0.0, least), 0.0)

    def text(i: int) -> str:
        return f"-{spared[i]:,.0f} B: gradients come in the backward pass, as what the forward pass kept goes"

    known = SOURCES.index("measured")
    return Component("held in turn", "activations", -spared, known, text, "largest moment of a step", spared > 0)


def late_gradients(sheet: Sheet, plans: Columns) -> Flags:
    """Return whether none of the gradients is there when a forward pass ends: of one micro-batch, on one device.

    Those of earlier micro-batches are there, and gradients that lie in buffers: of copies in buckets (run/replicas),
    and of programs with 16-bit weights. Where ranks share a model they are taken to be there too. The same would hold
    for shards, but torchtitan's published rows of 8 to 256 GPUs, which tell what the allocator reserved, and two
    processes of benchmarks/results/forecast_grid.md held as much as the sum: less was 1 to 12 % too low.
    """
    in_buckets = (plans.dp_replicate > 1) & (not plans.common.sync.has_outer_step)
    ranks_share = plans.is_sharded | (plans.tp > 1) | (plans.pp > 1)
    in_buffers = sheet.context.software.master_weights
    found: Flags = ~((plans.accumulation > 1) | in_buckets | ranks_share | in_buffers)
    return found


def _at_the_end(sheet: Sheet, plans: Columns, parts: Parts) -> Floats:
    """Return what stands beside all gradients when the backward pass ends, or in the update where that is more.

    The first block's gradient stands in the compute dtype before it is cast, once for every block that shares it, and
    the gradient of what it returns.
    """
    context, shapes, compute = sheet.context, sheet.context.shapes, sheet.rates.element_bytes
    first = shapes.profile.blocks[0]
    uses = 1 + sum(block.tied_to == first.name for block in shapes.profile.blocks)
    stream = plans.micro_batch * shapes["transient_elements"][shapes.of_block[0]]
    ends = (uses * compute if compute < 4 else 0) * first.parameters + max(4, compute) * stream
    # An update in one kernel has no values of its own; one of an operator after the other has one more of each.
    in_one = is_unwrapped(context.optimizer) or gathered_values(context.optimizer)
    update = 0 if in_one else max(4, compute)
    found: Floats = np.maximum(ends, update * parts.trained)
    return found


def _missing_behind_head(sheet: Sheet, plans: Columns, gradients: Floats) -> Floats:
    """Return the least that is missing of both where the backward pass is behind the head, of plans on one device.

    Between two blocks, gradients are missing of those before, and what those behind kept. Blocks of one shape lose as
    much one after the other, so the least is where the shape changes.
    """
    shapes = sheet.context.shapes
    kept = _kept(sheet)[sheet.rows.plan] * plans.micro_batch[:, None]
    loss = max(4, sheet.rates.element_bytes) * shapes["fixed_elements"]
    found = np.full(len(plans), np.inf)
    once = kept + loss + _copied(sheet, plans)
    for behind, share in _places(shapes):
        found = np.minimum(found, once @ behind + gradients * share)
    return found


def _places(shapes: Shapes) -> list[tuple[Floats, float]]:
    """Return where the backward pass may hold most: how many blocks are behind, of each shape, and gradients' share.

    The share is of the gradients that have not come. A traced module tells no order inside a block, nor where what is
    in no repeated block is used: those gradients are taken to be there before anything of the block is let go of.
    """
    known, sizes = shapes.profile.source == "analytic", _gradient_sizes(shapes)
    owned = sizes if known else sizes * np.array([block.recomputable for block in shapes.profile.blocks])
    in_all, count = float(np.sum(sizes)), len(sizes)
    changes = np.flatnonzero(np.diff(shapes.of_block)) + 1
    found = []
    for place in sorted({*changes, *(changes + 1), 1} & set(range(1, count + 1))):
        behind = np.bincount(shapes.of_block[place:], minlength=len(shapes.blocks)).astype(np.float64)
        left = float(np.sum(owned[: place if known else place - 1]))
        found.append((behind, left / in_all if in_all else 0.0))
    return found


def _gradient_sizes(shapes: Shapes) -> Floats:
    """Return the trained parameters of every block of the chain, shared ones where their gradient begins to stand."""
    blocks = shapes.profile.blocks
    sizes = np.array([float(block.parameters - block.frozen_parameters) for block in blocks])
    owner = {block.name: place for place, block in enumerate(blocks)}
    for place, block in enumerate(blocks):
        if block.tied_to in owner and not block.fixed_elements:  # else it stands among the buffers of the loss
            sizes[place] += sizes[owner[block.tied_to]]
            sizes[owner[block.tied_to]] = 0.0
    return sizes


def _copied(sheet: Sheet, plans: Columns) -> Floats:
    """Return the bytes of cast weights that a different block lets go of with its backward pass (plan x shape).

    Those of a block that is computed again are cast anew, one block at a time. An embedding's are needed by no backward
    pass but that of a head that shares them: they are gone with the last block's.
    """
    shapes, compute = sheet.context.shapes, sheet.rates.element_bytes
    looked_up = np.array([block.kind == "embedding" for block in shapes.blocks])
    parameters = shapes["parameters"] * ~looked_up
    parameters[shapes.of_block[-1]] += shapes["parameters"] @ looked_up
    is_cast = np.full(len(plans), compute < 4)
    if shapes["narrow_parameters"].any() or shapes["forward_only_parameters"].any():
        is_cast = np.zeros_like(is_cast)
    lasts = (shapes.repeated == 0) | plans.recomputes("none")[:, None]
    found: Floats = compute * parameters * (lasts & is_cast[:, None])
    return found


def _kept(sheet: Sheet) -> Floats:
    """Return the bytes that every different block but the head certainly keeps of a sample (plan x shape)."""
    own, shapes = sheet.kept_bytes, sheet.context.shapes
    of_mode = own[sheet.mode, np.arange(len(sheet.columns))]
    in_blocks = np.where(sheet.columns.recomputes("budget")[:, None], own.min(axis=0), of_mode)
    if rests_on_host(sheet):
        in_blocks = np.zeros_like(in_blocks)
    found: Floats = np.where(shapes.repeated > 0, in_blocks, own[MODES.index("none")] * ~shapes.is_head)
    return found
