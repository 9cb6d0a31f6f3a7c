"""Random words as a pure function of (call, owner, place): any part of a random tensor can be made by itself.

The owner is a sample, or nobody in particular; the place is where an element stands in the owner's slice of a tensor.
Call and owner are mixed to 64 bits by the finaliser of splitmix64 (Steele et al. 2014, doi:10.1145/2660193.2660195),
and a place to 32 bits under these by multiplications and shifts in the manner of MurmurHash3: eleven passes of
integer arithmetic that a vector unit does, about a third of the time of torch's own Bernoulli numbers on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

NOBODY = np.zeros(1, dtype=np.uint64)  # the owner of what all samples of a step share

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Odd factors of splitmix64 and MurmurHash3, as signed numbers: int32 arithmetic wraps around.
_FIRST, _SECOND, _THIRD = 0x9E3779B1 - 2**32, 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
# An element's place is made of its numbers along the dimensions of a slice, and not of their sizes: a sample that is
# filled up to another length, of no more than 2^20, draws the same where it was before. The last dimensions count
# apart, those before as one.
STRIDE_BITS, APART = 20, 3
CPU_WORDS = 1 << 16  # worked on at a time, so that they stay in the cache
DEVICE_WORDS = 1 << 26


def mixed(values: np.ndarray) -> np.ndarray:
    """Return uint64 values in which every bit depends on every bit of `values`; a one-to-one map."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def owners_of(positions: np.ndarray) -> np.ndarray:
    """Return the owners that samples at these positions of the stream are, uint64 [rows]."""
    return mixed((positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def fill(
    out: Tensor,
    call: int,
    owners: np.ndarray,
    places: Tensor | None,
    lanes: int,
    finish: Callable[..., object],
    inner: Sequence[int] = (),
) -> None:
    """Fill `out` [owners, places], chunk by chunk, with what `finish(chunk, *words)` makes of int32 random words.

    `places` are int32 [places], by default those of a slice of the shape `inner`, from its first element to its last;
    `lanes` is how many independent words an element needs.
    """
    count, width = out.shape
    most = CPU_WORDS if out.device.type == "cpu" else DEVICE_WORDS
    wide = max(1, min(width, most))
    high = max(1, most // wide)
    keys = [_keys(call, owners, lane, out.device) for lane in range(lanes)]
    for left in range(0, width, wide):
        right = min(left + wide, width)
        here = places[left:right] if places is not None else places_between(left, right, inner, out.device)
        for top in range(0, count, high):
            rows = slice(top, top + high)
            finish(out[rows, left:right], *(_words(here, first[rows], second[rows]) for first, second in keys))


def _keys(call: int, owners: np.ndarray, lane: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two int32 keys [owners, 1] for every owner."""
    both = mixed(owners ^ mixed(np.array([call + 1], dtype=np.uint64) * _GOLDEN + np.uint64(lane)))
    halves = torch.from_numpy(both.view(np.int32).reshape(-1, 2)).to(device)
    return halves[:, :1], halves[:, 1:]


def places_between(first: int, end: int, inner: Sequence[int], device: torch.device) -> Tensor:
    """Return the places of the elements from number `first` to before `end` of a slice, int32."""
    if len(inner) < 2 and end <= 2**31:
        return torch.arange(first, end, dtype=torch.int32, device=device)
    places = left = torch.arange(first, end, dtype=torch.int64, device=device)
    factor = 1
    for size in reversed(inner[1:][1 - APART :]):
        left = left.div(size, rounding_mode="floor")
        places.add_(left, alpha=factor * (stride_of(size) - size))
        factor *= stride_of(size)
    return folded(places)


def stride_of(size: int) -> int:
    """Return how far apart the places of neighbours are, of which each has a dimension of this size below it."""
    return 1 << max(STRIDE_BITS, (size - 1).bit_length())


def folded(places: Tensor) -> Tensor:
    """Return int64 places as int32: below 2^32 one to one, above with the upper half mixed in."""
    return (places ^ ((places >> 32) * 0x5BD1E995)).bitwise_and_(0xFFFFFFFF).to(torch.int32)


def _words(places: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return a random word for every place under every pair of keys, int32 [keys, places].

    torch shifts signed numbers with their sign, hence the masks. The last step of the usual finalisers, which only
    improves the lowest bits, is left out: what is made of a word uses its upper bits.
    """
    words = torch.bitwise_xor(places, first).mul_(_FIRST)
    shifted = torch.bitwise_right_shift(words, 16)
    words.bitwise_xor_(shifted.bitwise_and_(0xFFFF)).add_(second).mul_(_SECOND)
    torch.bitwise_right_shift(words, 15, out=shifted)
    return words.bitwise_xor_(shifted.bitwise_and_(0x1FFFF)).mul_(_THIRD)
