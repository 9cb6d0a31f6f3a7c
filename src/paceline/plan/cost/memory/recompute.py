"""What a block keeps under each mode of activation checkpointing, and which mode a memory budget gives each block.

A budget is a part of the bytes that all repeated blocks of a device keep without recompute. Which mode each block gets
is a knapsack with one choice per block: the least time to compute again for bytes within the budget. Blocks of one
shape are counted, not listed; of those the earlier ones get the modes that keep more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.cost.columns import Columns, Floats, Ints
from paceline.plan.cost.model_parts import MODES, Shapes
from paceline.plan.cost.software import Software
from paceline.spec.plan import RECOMPUTE

GATHERED_INPUTS = 2  # of a block's products, kept whole over tp for their gradients: attention's and the feed-forward's
WHOLE_INPUTS = 5  # what each tensor rank keeps whole without sequence parallelism: 10 s b h bytes of a layer (eq. 2)
# Of what is sent to experts, kept whole over tp where tensor ranks have a part of every expert: their inputs' rows and
# their results, which are weighed.
ROUTED_ROWS = 2
UNFUSED_LOGITS = 3  # of a loss in separate kernels: logits, exponentials and probabilities, each in fp32
# Of a Llama layer of 20 hidden widths: silu(gate) of 4 and rotated queries and keys of 2 besides.
UNFUSED_SAVED = 1.3
ROUNDING = 1e-9  # in a sum of bytes must not turn away what fits exactly
# The mode of all repeated blocks, for every way to recompute but a budget.
MODE_OF = np.array([MODES.index(way) if way in MODES else 0 for way in RECOMPUTE])


def kept_bytes(columns: Columns, shapes: Shapes, software: Software, size: int, narrow: float) -> Floats:
    """Return the bytes that every different block keeps of a sample for backward (mode x plan x shape).

    On one device of each plan; `size` are the bytes of a value in the compute dtype, `narrow` those of an operand of
    a product that is kept as it was cast to fewer bits.
    """
    inputs = shapes["input_elements"]
    selective = shapes["selective_elements"]
    attention = shapes["attention_out_elements"]
    if not software.selective_attention:  # of what a block adds to the stream nothing is kept twice
        selective = selective - attention - np.where(attention > 0, inputs, 0.0)
    elif "attention" not in columns.common.recompute_save:
        selective = selective - attention
    if "products" not in columns.common.recompute_save:
        selective = selective - (shapes["selective_elements"] - attention - inputs)
    elif partitions(columns, software):
        selective = selective - np.where(shapes["last_flops"] > 0, inputs, 0.0)  # as wide as what it is added to
    spread, cp = (columns.tp * columns.cp)[:, None], columns.cp[:, None]
    whole = [np.zeros(len(inputs))] * 2
    if not software.sequence_parallel:  # what tensor ranks do not share stands whole on each
        whole = [np.minimum(selective, WHOLE_INPUTS * inputs), inputs]
    rest = [
        size * (alone / cp + (elements - alone) / spread)
        for elements, alone in zip((selective, inputs), whole, strict=True)
    ]
    saved = _saved(columns, shapes, software, size)
    if columns.common.expert_slots > 1:
        empty = size * _empty_slots(columns, shapes) / spread
        saved, rest[0] = saved + empty, rest[0] + empty
    if narrow < size:
        spared = _spared(shapes, size, narrow) / spread
        saved = saved - spared
        if software.selective_is_attention:  # which keeps all else
            rest[0] = rest[0] - spared
    return np.stack([saved, *rest])


def _empty_slots(columns: Columns, shapes: Shapes) -> Floats:
    """Return the elements of a sample that slots without a row have in every different block (plan x shape).

    Experts' inputs and results, and what lies between them: as many as of rows, for each slot beyond those. Example: of
    1,000 tokens with 2 experts of width 40 of 3 matrices each, 32 wide, and 1.5 slots for a row, 500 x (2 x 64 + 240).
    """
    hidden = shapes["input_elements"] / shapes.profile.tokens_per_sample
    inner = np.divide(shapes["routed_flops"], 2 * hidden, out=np.zeros(len(hidden)), where=hidden > 0)
    rows = ROUTED_ROWS * shapes["routed_elements"] + inner
    return np.where(columns.ep > 1, columns.common.expert_slots - 1, 0.0)[:, None] * rows


def _spared(shapes: Shapes, size: int, narrow: float) -> Floats:
    """Return the bytes that a sample's operands of products take less in fewer bits, of every different block.

    What reads the two norms and the last product's input are kept for their products alone; attention's output is kept
    for attention, and once more for its product. Example: of hidden width h and feed-forward f, in 8 bits 2 h + f
    bytes a token less and h more. Experts' inputs are left as they are.
    """
    stream = shapes["input_elements"]
    sequence = max(1, shapes.profile.tokens_per_sample)
    width = np.maximum(1.0, stream / sequence)
    last = shapes["last_flops"] / (2 * width)  # seq x f of 2 x seq x f x h
    found: Floats = ((size - narrow) * (2 * stream + last) - narrow * stream) * shapes.repeated
    return found


def partitions(columns: Columns, software: Software) -> bool:
    """Return whether selective recompute keeps all products, and a compiler decides what stands beside them."""
    kept = columns.common.recompute_save
    return software.partitions and columns.common.compile and "products" in kept and "attention" in kept


def _saved(columns: Columns, shapes: Shapes, software: Software, size: int) -> Floats:
    """Return the bytes that every different block keeps of a sample without recompute (plan x shape)."""
    tp, cp = columns.tp[:, None], columns.cp[:, None]
    whole = WHOLE_INPUTS
    if software.sequence_parallel:
        whole = GATHERED_INPUTS if software.keeps_gathered else 0
    inputs = whole * shapes["input_elements"] * shapes.repeated
    # Keys of other ranks are exchanged again in the backward pass, unless a mask says which of all a query sees.
    keys = shapes["kv_elements"] * shapes.profile.masked
    wide, saved = shapes["saved_fp32_elements"], shapes["saved_elements"]
    if software.logit_share:
        wide = wide * np.where(shapes.is_head, software.logit_share, 1.0)
    elif not software.fused:
        wide = wide * np.where(shapes.is_head, UNFUSED_LOGITS, 1.0)
    if not software.fused:
        saved = saved * np.where(shapes.repeated > 0, UNFUSED_SAVED, 1.0)
    if software.routes_whole:
        rows = ROUTED_ROWS * shapes["routed_elements"] * shapes.repeated
        inputs = inputs + np.minimum(rows, np.maximum(0.0, saved - inputs - keys))
    split = np.maximum(0.0, saved - inputs - keys)
    kept = np.where(tp * cp > 1, split / (tp * cp) + inputs / cp + keys / tp, saved)
    found: Floats = size * kept + max(4, size) * wide / (tp * cp)
    return found


@dataclass(frozen=True)
class Hulls:
    """Of every kind of block, the modes that some trade of bytes for seconds favours, fewest bytes first.

    Three places at most: `order` are the modes by bytes (place x row x shape), `number` is how many steps lead on from
    the first; a step to the last place starts at the first one where the middle is left out. `gain` (step x row x
    shape) are the seconds that a step saves for each byte, falling from step to step, `more` the bytes that it takes.
    """

    order: Ints
    has_middle: np.ndarray
    gain: Floats
    more: Floats


def _hulls(kept: Floats, seconds: Floats) -> Hulls:
    order = np.lexsort((seconds, kept), axis=0)
    (least, middle, most), (slow, medium, quick) = (np.take_along_axis(values, order, 0) for values in (kept, seconds))

    def rate(bytes_from: Floats, seconds_from: Floats, bytes_to: Floats, seconds_to: Floats) -> Floats:
        more = bytes_to - bytes_from
        return np.divide(seconds_from - seconds_to, more, out=np.full(more.shape, np.inf), where=more > 0)

    has_last = quick < np.minimum(slow, medium)  # else more bytes for nothing
    to_middle, on = rate(least, slow, middle, medium), rate(middle, medium, most, quick)
    has_middle = (medium < slow) & ~(has_last & (to_middle <= on))
    first = np.where(has_middle, to_middle, np.where(has_last, rate(least, slow, most, quick), -np.inf))
    second = np.where(has_middle & has_last, on, -np.inf)
    more = np.stack([np.where(has_middle, middle, most) - least, most - middle])
    return Hulls(order, has_middle, np.stack([first, second]), more)


def fill_budget(numbers: Floats, kept: Floats, seconds: Floats, budget_bytes: Floats) -> Floats:
    """Return how many blocks get each mode, so that as much time is saved as fits into the budget (mode x row x shape).

    `numbers` (row x shape) says how many blocks of each kind there are; `kept` and `seconds` (mode x row x shape) what
    one of them keeps and computes again in each mode. Where nothing fits, all get the mode that keeps least.

    Greedy along each block's convex hull, most seconds saved per byte first: within one step of the best (Sinha and
    Zoltners 1979, Operations Research 27(3), on the multiple-choice knapsack).
    """
    hulls = _hulls(kept, seconds)
    rows, shapes = numbers.shape
    held = np.sum(numbers * np.take_along_axis(kept, hulls.order, 0)[0], axis=1)
    gain, more = (np.concatenate(list(values), axis=1) for values in (hulls.gain, hulls.more))
    taken, every = np.zeros((rows, 2 * shapes)), np.arange(rows)
    for place in np.argsort(-gain, axis=1, kind="stable").T:
        before = np.where(place < shapes, numbers[every, place % shapes], taken[every, place - shapes])
        room = np.maximum(0.0, budget_bytes * (1 + ROUNDING) - held)
        size = more[every, place]
        fitting = np.floor(np.divide(room, size, out=np.zeros(rows), where=size > 0))
        taken[every, place] = np.where(gain[every, place] > 0, np.minimum(before, fitting), 0.0)
        held = held + taken[every, place] * size
    first, second = taken[:, :shapes], taken[:, shapes:]
    in_middle = np.where(hulls.has_middle, first - second, 0.0)
    in_order = np.stack([numbers - first, in_middle, first - in_middle])
    found = np.zeros(kept.shape)
    np.put_along_axis(found, hulls.order, in_order, axis=0)
    return found


def modes_in_order(shapes: Sequence[int], counts: Floats) -> list[str]:
    """Return the mode of each block of one device from how many of every shape have it (mode x shape).

    `shapes` are the blocks' own, in order; of one shape the earlier ones get the modes that keep more.
    """
    left = counts.copy()
    found = []
    for shape in shapes:
        mode = int(np.argmax(left[:, shape] > 0))
        left[mode, shape] -= 1
        found.append(MODES[mode])
    return found
