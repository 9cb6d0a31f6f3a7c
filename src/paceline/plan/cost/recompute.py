"""What a block keeps under each mode of activation checkpointing, what it costs, and which mode a budget gives it.

A budget is a part of the bytes that all repeated blocks of a device keep without recompute. Which mode each block gets
is a knapsack with one choice per block: the least time to compute again for bytes within the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.cost.parts import Counts, count
from paceline.plan.cost.rates import ATTENTION_PASSES, BYTES, Rates
from paceline.plan.plan import Plan
from paceline.task.profile import BlockProfile

GATHERED_INPUTS = 2  # of a block's products, kept whole over tp for their gradients: attention's and the feed-forward's
BUDGETS = (0.75, 0.5, 0.25)  # tried where the budget is the planner's choice


@dataclass(frozen=True)
class Choice:
    """A mode for one block: the bytes that it keeps of a sample, and the seconds that it computes again for one."""

    mode: str
    kept_bytes: float
    seconds: float


def unrecomputed_bytes(block: BlockProfile, plan: Plan) -> float:
    """Return the bytes that a block keeps of one sample for its backward pass, without recompute, on one device."""
    size, tp, cp = BYTES[plan.precision], plan.layout.tp, plan.layout.cp
    inputs = GATHERED_INPUTS * block.input_elements if block.recomputable else 0.0
    split = max(0.0, block.saved_elements - inputs - block.kv_elements)
    kept = split / (tp * cp) + inputs / cp + block.kv_elements / tp if tp * cp > 1 else block.saved_elements
    return size * kept + max(4, size) * block.saved_fp32_elements / (tp * cp)


def kept_bytes(block: BlockProfile, plan: Plan, mode: str) -> float:
    """Return the bytes that a block keeps of one sample for its backward pass under a mode, on one device."""
    if mode == "none":
        return unrecomputed_bytes(block, plan)
    elements = block.input_elements
    if mode == "selective":
        attention = block.attention_out_elements
        elements += attention if "attention" in plan.recompute_save else 0.0
        products = block.selective_elements - attention - block.input_elements
        elements += products if "products" in plan.recompute_save else 0.0
    return BYTES[plan.precision] * elements / (plan.layout.tp * plan.layout.cp)


def again_seconds(again: Counts, plan: Plan, mode: str, rates: Rates, sequence: int) -> float:
    """Return the seconds in which blocks of these counts compute again for one sample under a mode, on one device.

    Before the calibration factor, and before `cp` divides it. Operators that move memory always run again; products
    and attention where their outputs were not kept.
    """
    if mode == "none":
        return 0.0
    tp = plan.layout.tp
    seconds = rates.moving_seconds(again) / tp
    if mode == "full" or "products" not in plan.recompute_save:
        seconds += rates.product_seconds(again, tp)
    if mode == "full" or "attention" not in plan.recompute_save:
        seconds += rates.attention_seconds(again, sequence) / ATTENTION_PASSES / tp
    return seconds


def block_modes(blocks: Sequence[BlockProfile], plan: Plan, rates: Rates, sequence: int) -> tuple[str, ...]:
    """Return the mode of each of the repeated blocks of one device, in order, within the plan's budget.

    Activations that rest in host memory leave out `selective`: what that keeps is out of reach of the transfer.
    """
    if plan.recompute != "budget":
        return (plan.recompute,) * len(blocks)
    modes = ("none", "full") if plan.offloads_activations else ("none", "selective", "full")
    seen: dict[BlockProfile, tuple[Choice, ...]] = {}
    for block in blocks:
        if block not in seen:
            seen[block] = tuple(
                Choice(mode, kept_bytes(block, plan, mode), again_seconds(count([block]), plan, mode, rates, sequence))
                for mode in modes
            )
    options = [seen[block] for block in blocks]
    return fill_budget(options, plan.recompute_budget * sum(choices[0].kept_bytes for choices in options))


def fill_budget(options: Sequence[Sequence[Choice]], budget_bytes: float) -> tuple[str, ...]:
    """Return one mode per block that saves as much time as fits into the budget; the smallest ones where nothing fits.

    Greedy along each block's convex hull, most seconds saved per byte first, earlier blocks first among equals: within
    one step of the best (Sinha and Zoltners 1979, Operations Research 27(3), on the multiple-choice knapsack).
    """
    hulls = [_hull(choices) for choices in options]
    held = sum(hull[0].kept_bytes for hull in hulls)
    level = [0] * len(hulls)
    steps = [
        ((low.seconds - high.seconds) / (high.kept_bytes - low.kept_bytes), index, to)
        for index, hull in enumerate(hulls)
        for to, (low, high) in enumerate(itertools.pairwise(hull), start=1)
    ]
    # Rounding in a sum of bytes must not turn away what fits exactly.
    limit = budget_bytes * (1 + 1e-9)
    for _, index, to in sorted(steps, key=lambda step: (-step[0], step[2], step[1])):
        more = hulls[index][to].kept_bytes - hulls[index][level[index]].kept_bytes
        if level[index] == to - 1 and held + more <= limit:
            held, level[index] = held + more, to
    return tuple(hull[at].mode for hull, at in zip(hulls, level, strict=True))


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices that some trade of bytes for seconds favours, from the fewest bytes to the fewest seconds."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.kept_bytes, choice.seconds)):
        if hull and choice.seconds >= hull[-1].seconds:
            continue  # more bytes for nothing
        while hull and choice.kept_bytes == hull[-1].kept_bytes:
            hull.pop()
        while len(hull) > 1 and _rate(hull[-2], hull[-1]) <= _rate(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _rate(low: Choice, high: Choice) -> float:
    return (low.seconds - high.seconds) / (high.kept_bytes - low.kept_bytes)
