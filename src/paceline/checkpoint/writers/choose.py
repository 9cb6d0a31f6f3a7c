"""Which rank writes which part, worked out by the ranks that hold it: none is told of all parts.

Parts that the same ranks hold make a class, and the ranks of a class come to the same choice for all its parts: the
largest first, each to the rank with the fewest bytes of the class so far. Whether what is written covers every tensor
exactly once is seen in one sum for each tensor.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.index import TensorKind
from paceline.checkpoint.snapshot import Part
from paceline.checkpoint.writers.talk import KEY_BYTES, WORD, Holders, Talk, add_up, collect

_ONE_WRITER = 2**40  # in a sum of writers' numbers, above all numbers of ranks


@dataclass(frozen=True)
class WriterChoice:
    """What becomes of a rank's parts, in their order, and of all tensors as far as this rank knows: rank 0 knows all.

    `torn` are tensors of which ranks disagree about shape or dtype.
    """

    writers: list[int]  # the rank that writes the part, -1 for one that is not written at all
    shares: list[int]  # of the balance of copies, see SavePlan.fingerprints
    kinds: dict[str, TensorKind]
    torn: tuple[str, ...] = ()


def choose_writers(parts: Sequence[Part], rank: int, size: int) -> Talk[WriterChoice]:
    """Talk until each rank knows who writes its parts, and rank 0 what tensors there are. Every rank takes part.

    Parts without elements are not written, unless the tensor has none at all.
    """
    own = {part.name: [part.dtype, list(part.shape), rank, rank, False] for part in parts}
    table = yield from collect(own, rank, size, _merged)
    keys = [_key(part) if part.bytes or 0 in part.shape else b"" for part in parts]
    held = {key: part.bytes for key, part in zip(keys, parts, strict=True) if key}
    holders = yield from add_up(dict.fromkeys(held, number_of(rank)), rank, size)
    own_share = {key for of_class in _classes(holders) for key in _own_share(of_class, held, holders)}
    said = {key: _ONE_WRITER + rank if key in own_share else 0 for key in held}
    told = yield from add_up(said, rank, size)
    writers = [told[key].total % _ONE_WRITER if key else -1 for key in keys]
    shares = [
        number_of(rank) - (holders[key].total if key in own_share else 0) if key else 0 for key in keys
    ]  # fmt: skip
    kinds = {name: TensorKind(dtype, tuple(shape), "", range(first, last + 1))
             for name, (dtype, shape, first, last, _) in table.items()}  # fmt: skip
    return WriterChoice(writers, [share % WORD for share in shares], kinds, tuple(n for n, e in table.items() if e[4]))


def cover_of(box: Box) -> int:
    """Return the weight of a part of a tensor, modulo 2^64: those of parts that cover another once add up to its own.

    Parts that do not add up to it only by chance. The weight of a range is the difference of two pseudo-random numbers
    of its ends, that of a box the product over its dimensions.
    """
    return (
        math.prod(
            _mixed(at + size + (dimension << 48)) - _mixed(at + (dimension << 48))
            for dimension, (at, size) in enumerate(zip(*box, strict=True))
        )
        % WORD
    )


def number_of(rank: int) -> int:
    """Return an odd number of a rank's own: sums of those of different ranks differ, and no copy's error cancels."""
    return _mixed(rank + 1) | 1


def _key(part: Part) -> bytes:
    said = repr((part.name, part.dtype, part.shape, part.offsets, part.sizes))
    return hashlib.blake2b(said.encode(), digest_size=KEY_BYTES).digest()


def _merged(lower: list[Any], higher: list[Any]) -> list[Any]:
    torn = lower[4] or higher[4] or lower[:2] != higher[:2]
    return [*lower[:2], min(lower[2], higher[2]), max(lower[3], higher[3]), torn]


def _classes(holders: Mapping[bytes, Holders]) -> list[list[bytes]]:
    """Return the keys that the same ranks hold together: they agree in the number of ranks and the sum of theirs."""
    classes: defaultdict[tuple[int, int], list[bytes]] = defaultdict(list)
    for key, together in holders.items():
        classes[together.ranks, together.total].append(key)
    return list(classes.values())


def _own_share(keys: Sequence[bytes], held: Mapping[bytes, int], holders: Mapping[bytes, Holders]) -> list[bytes]:
    """Return those of the keys of a class which this rank writes. All ranks of the class share them out alike."""
    first = holders[min(keys)]
    loads = [(0, place) for place in range(min(first.ranks, len(keys)))]  # more ranks than keys get none
    mine = []
    for key in sorted(keys, key=lambda key: (-held[key], key)):
        load, place = loads[0]
        heapq.heapreplace(loads, (load + held[key], place))
        mine += [key] if place == first.place else []
    return mine


def _mixed(number: int) -> int:
    """Return a number after splitmix64 (Steele et al. 2014), whose bits look random."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 % WORD
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % WORD
    return mixed ^ (mixed >> 31)
