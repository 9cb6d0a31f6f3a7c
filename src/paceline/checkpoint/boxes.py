"""Rectangular parts of tensors: where two meet, and whether some cover another exactly once."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence

from paceline.checkpoint.untrusted import Refused

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes of a part of a tensor


def overlap(one: Box, two: Box) -> Box | None:
    """Return what two boxes share, or None where that has no elements."""
    if one == two:  # as most are: a part is loaded where it was saved
        return None if 0 in one[1] else one
    pairs = list(zip(*one, *two, strict=True))
    offsets = tuple(max(start, other) for start, _, other, _ in pairs)
    ends = (min(start + size, other + length) for start, size, other, length in pairs)
    sizes = tuple(end - at for at, end in zip(offsets, ends, strict=True))
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def check_cover(name: str, whole: Box, boxes: Sequence[Box]) -> None:
    """Raise Refused unless the boxes, which lie in `whole`, cover it exactly once: volumes add up, no two overlap.

    A sweep along the longest dimension, so that shards along one dimension cost n log n.
    """
    if list(boxes) == [whole]:
        return
    sizes = whole[1]
    if sum(math.prod(box[1]) for box in boxes) != math.prod(sizes):
        raise Refused(f"{name}: its chunks do not add up to the tensor")
    if not sizes:
        return
    along = max(range(len(sizes)), key=lambda dimension: sizes[dimension])
    open_ends: list[tuple[int, int]] = []
    filled = [index for index, box in enumerate(boxes) if math.prod(box[1])]
    for index in sorted(filled, key=lambda index: boxes[index][0][along]):
        offsets, lengths = boxes[index]
        del open_ends[: bisect_right(open_ends, (offsets[along], len(boxes)))]
        if any(overlap(boxes[index], boxes[other]) for _, other in open_ends):
            raise Refused(f"{name}: two chunks overlap")
        insort(open_ends, (offsets[along] + lengths[along], index))
