"""Which rank writes which part: each once, bytes as even as can be. Worked out on one rank from what all hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from paceline.checkpoint.boxes import Box, check_cover
from paceline.checkpoint.index import TensorKind
from paceline.checkpoint.snapshot import Part
from paceline.errors import StorageError

PartAt = tuple[str, Box]


def spread(of_ranks: Sequence[Sequence[Part]]) -> dict[PartAt, int]:
    """Return the rank that writes the part at each place: of those that hold it, the one with the fewest bytes so far.

    Parts without elements are left out, unless the tensor has none at all. Raises StorageError where ranks disagree
    about a tensor's shape or dtype, and where their parts do not make a tensor whole.
    """
    holders: dict[PartAt, list[int]] = defaultdict(list)
    sizes: dict[PartAt, int] = {}
    for rank, parts in enumerate(of_ranks):
        for part in parts:
            if part.bytes or 0 in part.shape:
                holders[part.name, part.box].append(rank)
                sizes[part.name, part.box] = part.bytes
    load_bytes = [0] * len(of_ranks)
    writers: dict[PartAt, int] = {}
    # Parts that one rank alone holds come first: they are no choice, and the choices then even them out.
    for place in sorted(holders, key=lambda place: (len(holders[place]) > 1, -sizes[place])):
        rank = min(holders[place], key=lambda rank: (load_bytes[rank], rank))
        writers[place] = rank
        load_bytes[rank] += sizes[place]
    _check_whole(of_ranks, writers)
    return writers


def kinds_of(of_ranks: Sequence[Sequence[Part]]) -> dict[str, TensorKind]:
    """Return what the tensors are, with the ranks that hold something of each and without fingerprints."""
    first: dict[str, Part] = {}
    holding: dict[str, range] = {}
    for rank, parts in enumerate(of_ranks):
        for part in parts:
            first.setdefault(part.name, part)
            holding[part.name] = range(holding.get(part.name, range(rank, rank)).start, rank + 1)
    return {name: TensorKind(part.dtype, part.shape, "", holding[name]) for name, part in first.items()}


def _check_whole(of_ranks: Sequence[Sequence[Part]], writers: Mapping[PartAt, int]) -> None:
    """Raise StorageError where ranks disagree about a tensor, or hold less or more of one than the whole."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, parts in enumerate(of_ranks):
        for part in parts:
            kind = (part.dtype, part.shape)
            if kinds.setdefault(part.name, kind) != kind:
                raise StorageError(
                    f"ranks disagree about '{part.name}'",
                    f"rank {rank} has {_text(kind)}, a lower rank has {_text(kinds[part.name])}",
                    "give tensors that differ between ranks different names, or make them DTensors",
                )
    boxes: dict[str, list[Box]] = {name: [] for name in kinds}
    for name, box in writers:
        boxes[name].append(box)
    for name, (_, shape) in kinds.items():
        try:
            check_cover(name, ((0,) * len(shape), shape), boxes[name])
        except ValueError as error:
            raise StorageError(
                f"'{name}' cannot be saved", str(error), "save it from every rank that holds a part"
            ) from error


def _text(kind: tuple[str, tuple[int, ...]]) -> str:
    return f"{kind[0]}{list(kind[1])}"
