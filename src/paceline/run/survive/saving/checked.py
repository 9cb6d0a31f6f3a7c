"""What a file of a rank's part of the state says, which is never trusted: anything that cannot be is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from paceline.checkpoint.fingerprint import PlaceWeights, part_sum
from paceline.checkpoint.index import MAX_DIMENSIONS
from paceline.checkpoint.shards import DTYPES
from paceline.checkpoint.snapshot import Part
from paceline.checkpoint.untrusted import Refused, count, numbers, table, typed


@dataclass(frozen=True)
class ToldPart:
    """A part of a tensor, and the shape in which its values lie in the file."""

    part: Part
    held: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Return the length of the values."""
        return math.prod(self.held) * DTYPES[self.part.dtype][1]


def checked(told: Any, values_bytes: int) -> tuple[int, list[ToldPart], dict[str, object]]:
    """Return the step, the parts and the caller's JSON of a file with so many bytes of values. Raises Refused."""
    step, extra = count(table(told), "step"), typed(told, "extra", dict)
    parts = [_part(each) for each in typed(told, "parts", list)]
    if len({told_part.part for told_part in parts}) != len(parts):
        raise Refused("a part is there twice")
    size = sum(told_part.bytes for told_part in parts)
    if size != values_bytes:
        raise Refused(f"its parts have {size} bytes of values, and there are {values_bytes}")
    return step, parts, extra


def check_values(told: ToldPart, value: torch.Tensor, weights: PlaceWeights) -> None:
    """Raise Refused where values are not those of which the fingerprint was taken, before they were kept."""
    part = told.part
    if part.fingerprint is None or not value.numel():
        return
    try:
        is_same = part_sum(value, part.offsets, weights) == part.fingerprint
    except (RuntimeError, ValueError, OverflowError):  # it can lie nowhere there
        is_same = False
    if not is_same:
        raise Refused(f"{part.name!r} has another fingerprint than the values that were kept")


def _part(each: Any) -> ToldPart:
    name, dtype = typed(each, "name", str), typed(each, "dtype", str)
    if dtype not in DTYPES:
        raise Refused(f"{name!r} has the dtype {dtype!r}")
    lists = {key: numbers(typed(each, key, list), key) for key in ("shape", "offsets", "sizes", "held")}
    shape, offsets, sizes = lists["shape"], lists["offsets"], lists["sizes"]
    if max(map(len, lists.values())) > MAX_DIMENSIONS or not len(shape) == len(offsets) == len(sizes):
        raise Refused(f"{name!r} has other dimensions than its part")
    if math.prod(lists["held"]) != math.prod(sizes):
        raise Refused(f"a part of {name!r} has other values than its size says")
    if any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise Refused(f"a part of {name!r} lies outside of it")
    known = each.get("fingerprint")
    if known is not None and (isinstance(known, bool) or not isinstance(known, int) or not 0 <= known < 2**64):
        raise Refused(f"{name!r} has no fingerprint that could be one")
    return ToldPart(Part(name, dtype, shape, offsets, sizes, known), lists["held"])
