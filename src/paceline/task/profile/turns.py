"""The profile of a step of several objectives: the FLOPs of all passes add up, kept activations do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.spec.profile import BlockProfile, ModelProfile

COMPUTED = ("matmul_flops", "routed_flops", "attention_flops", "moved_elements")
KEPT = (
    "saved_elements", "saved_fp32_elements", "selective_elements", "input_elements", "transient_elements",
    "kv_elements", "attention_out_elements", "fixed_elements",
)  # fmt: skip
NOTE = (
    "of {turns} objectives in turn: computing is that of all passes, memory that of the largest, and what ranks send "
    "that of one pass"
)


def together(profiles: Sequence[ModelProfile], every: Sequence[int]) -> ModelProfile:
    """Return the profile of a step in which each objective has its turn every so many steps.

    All are of one model, so they have the same blocks. What is closed to one objective is closed to the step.
    """
    first = profiles[0]
    blocks = tuple(_block(parts, every) for parts in zip(*(profile.blocks for profile in profiles), strict=True))
    closed = {axis: why for profile in profiles for axis, why in (profile.closed_axes or {}).items()}
    notes = dict.fromkeys([*(profile.note for profile in profiles if profile.note), NOTE.format(turns=len(profiles))])
    source = next((profile.source for profile in profiles if profile.source == "estimated"), first.source)
    drawing, grouped = (
        tuple(dict.fromkeys(name for profile in profiles for name in getattr(profile, field)))
        for field in ("drawing", "grouped")
    )
    return dataclasses.replace(
        first, blocks=blocks, closed_axes=closed, note="; ".join(notes), source=source, drawing=drawing, grouped=grouped
    )


def _block(parts: Sequence[BlockProfile], every: Sequence[int]) -> BlockProfile:
    """Return one block: sums per step of what is computed, and the most that one pass keeps."""
    summed = {n: sum(getattr(p, n) / often for p, often in zip(parts, every, strict=True)) for n in COMPUTED}
    kept = {name: max(getattr(part, name) for part in parts) for name in KEPT}
    busiest = max(parts, key=lambda part: part.matmul_flops)
    return dataclasses.replace(
        parts[0],
        **summed,
        **kept,
        operators=round(sum(part.operators / often for part, often in zip(parts, every, strict=True))),
        matmul_width=busiest.matmul_width,
        open_axes=tuple(axis for axis in parts[0].open_axes if all(axis in part.open_axes for part in parts)),
    )
