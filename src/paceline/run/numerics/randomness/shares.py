"""Which sample each element of a random tensor belongs to, and which element of the sample's whole slice it is.

A rank has some samples of the global batch; of each it may have a part along the sequence (`cp`, and `tp` between
layers) or of the features or heads (`tp` inside of a layer). The numbers of an element depend on its sample and its
place in the slice that one device would have, so ranks that hold the same element draw the same, and others other ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.run.numerics.randomness.hashing import APART, NOBODY, folded, owners_of, stride_of
from paceline.run.parallel.context.zigzag import places_of


@dataclass(frozen=True)
class RankPart:
    """Which part of every sample this rank has: places on the context and the tensor axis."""

    cp_rank: int = 0
    cp: int = 1
    tp_rank: int = 0
    tp: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether the rank has whole samples."""
        return self.cp == 1 and self.tp == 1

    def along(self, local: int, whole: int, tokens: bool) -> Tensor | None:
        """Return which of `whole` places along one dimension this rank's `local` ones are, int64; None if none fit.

        Only along `tokens` do ranks of the context axis have different ones.
        """
        if local == whole:
            return torch.arange(whole)
        if self.cp > 1 and tokens:
            shared = places_of(self.cp_rank, self.cp, whole)
            if local == len(shared):
                return shared
            if self.tp > 1 and local * self.tp == len(shared):  # a part of the rank's part, between layers
                return shared[self.tp_rank * local : (self.tp_rank + 1) * local]
        each = -(-whole // self.tp)  # as torch.chunk cuts a weight
        first = min(self.tp_rank * each, whole)
        if self.tp > 1 and local == min(each, whole - first):
            return torch.arange(first, first + local)
        return None


@dataclass(frozen=True)
class SampleRows:
    """The samples of a micro-batch: positions in the stream, int64 [rows], and the step that they are of."""

    positions: np.ndarray
    step: int
    length: int | None = None  # of a whole sample along its second dimension, where it has one
    owners: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "owners", owners_of(self.positions))

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class Pattern:
    """How a random tensor of a program is laid out on one device, per sample.

    `shape` is that of `rows` samples; dimension `dim` counts them, a multiple of `rows` long. Where `dim` is None all
    samples share the tensor. `length` is that of the samples that the program was looked at with. What a sample has of
    the dimension lies side by side, or `apart`, in steps of `rows`: [a, b, a, b], as where a batch is put together with
    itself, or time comes first.
    """

    shape: tuple[int, ...]
    rows: int
    dim: int | None
    length: int | None = None
    apart: bool = False

    def inner(self) -> tuple[int, ...]:
        """Return the whole shape of one sample's slice."""
        return _inner(self.shape, self.rows, self.dim)


@dataclass(frozen=True)
class Share:
    """How a local tensor falls into slices, one for each owner: [owners, places] and back."""

    dim: int | None
    inner: tuple[int, ...]  # of the local slice
    places: Tensor | None  # int32, of the local slice in the whole one; None where it is the whole one
    apart: bool = False  # whether what a slice has of the dimension lies in steps of the number of slices

    @property
    def in_order(self) -> bool:
        """Whether slices follow each other in memory: nobody's, or samples first."""
        return not self.dim and not self.apart

    def owners(self, rows: SampleRows) -> np.ndarray:
        """Return the owners of the slices."""
        return NOBODY if self.dim is None else rows.owners

    def restored(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        """Return values [owners, places] in the shape of the local tensor."""
        if self.in_order:
            return flat.view(shape)
        assert self.dim is not None
        return flat.view(-1, *self.inner).movedim(0, self.dim + self.apart).reshape(shape)


def share_of(shape: tuple[int, ...], rows: SampleRows, patterns: Sequence[Pattern], part: RankPart) -> Share | None:
    """Return how a local tensor of this shape is shared by samples, by patterns that it may be an instance of.

    None where no pattern fits, or where several do that say different things.
    """
    found = [_instance(shape, len(rows), p, p.inner(), part, p.length) for p in patterns]
    if not any(found):  # samples may be of another length than in the pattern
        found = [_of_another_length(shape, rows, p, part) for p in patterns]
    fitting = [share for share in found if share is not None]
    return fitting[0] if fitting and all(_same(share, fitting[0]) for share in fitting[1:]) else None


def guessed(shape: tuple[int, ...], rows: int) -> Share | None:
    """Return how a tensor of a program that could not be looked at is shared; None where it is anybody's guess."""
    if not shape:
        return Share(None, (), None)
    if shape[0] == rows:
        return Share(0, shape[1:], None)
    if math.prod(shape) == 1:
        return Share(None, shape, None)
    if len(shape) > 1 and shape[1] == rows:
        return Share(1, _inner(shape, rows, 1), None)
    if len(shape) > 1 and shape[0] % rows == 0:
        return Share(0, _inner(shape, rows, 0), None)
    return None


def _inner(shape: tuple[int, ...], rows: int, dim: int | None) -> tuple[int, ...]:
    """Return the shape of a slice: the samples' dimension taken out, or what each has of it left in its place."""
    if dim is None:
        return shape
    each = shape[dim] // rows
    return (*shape[:dim], *((each,) if each != 1 else ()), *shape[dim + 1 :])


def _instance(
    shape: tuple[int, ...], rows: int, pattern: Pattern, whole: tuple[int, ...], part: RankPart, tokens: int | None
) -> Share | None:
    """Return how a tensor is shared if its slices are the rank's part of slices of the shape `whole`, else None.

    A sample has so many `tokens`.
    """
    dim = pattern.dim
    if len(shape) != len(pattern.shape) or (dim is not None and shape[dim] % rows):
        return None
    local, apart = _inner(shape, rows, dim), pattern.apart
    if local == whole:
        return Share(dim, local, None, apart)
    if part.is_whole or len(local) != len(whole):
        return None
    of_tokens = [at for at, length in enumerate(whole) if length == tokens]
    found = (_places(local, whole, at, part) for at in [*of_tokens, None])
    places = next((each for each in found if each is not None), None)
    return None if places is None else Share(dim, local, folded(places), apart)


def _places(local: tuple[int, ...], whole: tuple[int, ...], tokens: int | None, part: RankPart) -> Tensor | None:
    """Return the places of a local slice in the whole one, whose dimension `tokens` counts tokens; None if none fit."""
    places = torch.zeros(1, dtype=torch.int64)
    for at, (mine, length) in enumerate(zip(local, whole, strict=True)):
        along = part.along(mine, length, tokens=at == tokens)
        if along is None:
            return None
        step = stride_of(length) if at > len(whole) - APART else length
        places = (places.unsqueeze(-1) * step + along).flatten()
    return places


def _of_another_length(shape: tuple[int, ...], rows: SampleRows, pattern: Pattern, part: RankPart) -> Share | None:
    if part.is_whole:  # what the rank has of a sample is all there is
        fits = pattern.dim is not None and len(shape) == len(pattern.shape) and shape[pattern.dim] % len(rows) == 0
        if not fits:
            return None
        inner = _inner(shape, len(rows), pattern.dim)
        return Share(pattern.dim, inner, None, pattern.apart and len(inner) == len(shape))
    if rows.length is None or pattern.length is None:
        return None
    whole = tuple(rows.length if length == pattern.length else length for length in pattern.inner())
    return _instance(shape, len(rows), pattern, whole, part, rows.length)


def _same(one: Share, other: Share) -> bool:
    """Return whether two shares of one local tensor say the same. Slices along one dimension are alike in any case."""
    if (one.dim, one.apart) != (other.dim, other.apart) or (one.places is None) != (other.places is None):
        return False
    return one.places is None or other.places is None or torch.equal(one.places, other.places)
