"""Fingerprints of tensors: one number for the values of a whole tensor, whatever the layout that holds them.

The fingerprint of a tensor is the sum, modulo 2^64, over all its words of (the word's bits) x (a pseudo-random odd
weight of its place in the whole tensor). A part of a tensor gives its part of the sum, so shards of any shape add up to
the same number, and no rank needs to see another's values. The weight of a place is the product of one weight for each
of its coordinates: a part of n words costs one multiplication and one addition for each of them.

Any other value, and almost any values in other places, make another sum. It is no digest against an adversary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.files.past_caches import Rooms
from paceline.checkpoint.files.threads import Hands, at_once
from paceline.task.models.held import is_spread

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # bytes of an element -> words it is read as
WORDS_HERE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int32}  # the same in the host's memory
PIECE_WORDS = 2**18  # read at a time, so that the 64-bit products stay in the cache
TASK_WORDS = 2**20  # that a thread reads before it takes the next
FEW_WORDS = 2**16  # of a part that is not handed to a thread: that would cost more than it spares
FEW_WORDS_AT_ONCE = 2**14  # whose products are as soon in new memory
ROW_WORDS = 2**12  # of a row of several dimensions: the longer it is, the more weights are made for fewer rows
SHORT_ROW_WORDS = 64
FIRST_VALUES = 64
MOST_PLACES = 4096

# Where parts lie, by what decides that alone: shape, placements, the mesh's shape and this rank's place in it. torch
# works it out anew whenever it is asked, a save and a load ask for each tensor, and many tensors are alike.
_PLACES: dict[tuple[Any, ...], list[Box]] = {}
PartSums = dict[str, dict[Box, int]]
HeldPart = tuple[torch.Tensor, list[Box]]  # what a rank holds of a tensor, and where that lies in the whole
WordArray = npt.NDArray[Any]


def parts_held(tensors: Mapping[str, torch.Tensor]) -> PartSums:
    """Return the sums of the parts that this rank holds, by tensor and place."""
    held = [(name, place, local) for name, tensor in tensors.items() for place, local in parts_here(tensor)]
    sums = part_sums([(local, place[0]) for _, place, local in held])
    return sums_by_name(tensors, [(name, place) for name, place, _ in held], sums)


def sums_by_name(names: Iterable[str], places: Iterable[tuple[str, Box]], sums: Iterable[int]) -> PartSums:
    """Return sums by tensor and place; of some of the names this rank may hold nothing."""
    found: PartSums = {name: {} for name in names}
    for (name, place), value in zip(places, sums, strict=True):
        found[name][place] = value
    return found


def whole_fingerprints(of_ranks: Iterable[PartSums], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the fingerprint of every tensor that the parts of all ranks make whole, as 16 hexadecimal digits.

    A part that several ranks hold counts once. The fingerprint is empty where copies of a part differ: no value is then
    the tensor's own. A tensor is left out where its parts overlap or leave a gap.
    """
    merged: dict[str, dict[Box, int]] = {}
    torn: set[str] = set()
    for held in of_ranks:
        for name, parts in held.items():
            known = merged.setdefault(name, {})
            for place, value in parts.items():
                if known.setdefault(place, value) != value:
                    torn.add(name)
    return {
        name: "" if name in torn else f"{sum(parts.values()) % 2**64:016x}"
        for name, parts in merged.items()
        if sum(math.prod(sizes) for _, sizes in parts) == math.prod(shapes[name])
    }


def local_part(tensor: torch.Tensor) -> HeldPart:
    """Return what this rank holds of a tensor and where that lies in the whole: nowhere for a rank not in its mesh.

    It is the memory of the tensor itself, of which no gradient is known.
    """
    if not is_spread(tensor):
        return tensor.detach(), [((0,) * tensor.dim(), tuple(tensor.shape))]
    with torch.no_grad():
        local = tensor.to_local().detach()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return local, []
    if type(local) is not torch.Tensor:  # which may lie in several places
        return local, _places(tensor)
    of_layout = tuple(tensor.shape), tensor.placements, tuple(tensor.device_mesh.shape), tuple(coordinate)
    if (places := _PLACES.get(of_layout)) is None:
        if len(_PLACES) >= MOST_PLACES:
            _PLACES.clear()
        places = _PLACES[of_layout] = _places(tensor)
    return local, [*places]


def _places(tensor: DTensor) -> list[Box]:
    """Return where a rank's part lies, by the hook by which torch.distributed.checkpoint itself asks a tensor."""
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.__create_chunk_list__()]


def within(local: torch.Tensor, place: Box, box: Box) -> torch.Tensor:
    """Return the part of `local` (which lies at `place`) that lies at `box`, as a view."""
    if box == place and local.shape == box[1]:
        return local
    for dimension, (at, length) in enumerate(zip(*box, strict=True)):
        local = local.narrow(dimension, at - place[0][dimension], length)
    return local


def parts_here(tensor: torch.Tensor) -> Iterable[tuple[Box, torch.Tensor]]:
    """Yield the place and the values of this rank's part of a tensor, if it holds any."""
    local, places = local_part(tensor)
    return [(place, local) for place in places if math.prod(place[1])]


def part_sums(parts: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> list[int]:
    """Return the sum of each part, given with its offsets. Several threads share out what lies in the host's memory.

    They are threads of Python's, which sleep when they are done: those that torch computes with wait for each other
    turning, and on a busy machine take the core from the one that is waited for.
    """
    weights = PlaceWeights()
    many = sum(local.numel() for local, _ in parts if local.device.type == "cpu") > TASK_WORDS
    with Hands(at_once() if many else 0, "fingerprint") as hands:
        pending = [_begun(hands if many else None, local, offsets, weights) for local, offsets in parts]
        return [_total(sums) for sums in pending]


class SumOfPart:
    """The sum of a part that lies in the host's memory in one piece, taken of its bytes as they come, by any thread."""

    def __init__(self, local: torch.Tensor, content: WordArray, offsets: Sequence[int], weights: PlaceWeights) -> None:
        """`content` has the bytes of `local` as they lie in memory."""
        size = local.element_size()
        self._words = content.view(WORDS_HERE[size // 2 if local.is_complex() else size])
        self._length = self._words.itemsize
        self._row, self._outer = weights.of((*local.shape, size // self._length), offsets)
        self._rooms = weights.rooms
        self._sums: list[int] = []
        self._taken: list[int] = []

    @property
    def row_bytes(self) -> int:
        """Return the length of a row: bytes that come in whole rows are taken at once."""
        return self._row.size * self._length

    def add(self, begin: int, end: int) -> None:
        """Take some bytes of the part, each once; those that begin or end within a word are not taken."""
        first, last = begin // self._length, end // self._length
        if (first * self._length, last * self._length) != (begin, end):
            return
        width, total = self._row.size, 0
        while first < last:
            row, at = divmod(first, width)
            rows = (last - first) // width if not at else 0
            until = first + rows * width if rows else min(last, first + width - at)
            words = self._words[first:until].reshape(max(1, rows), -1)
            total += _sum_here(
                words, self._row[at : at + words.shape[1]], self._outer[row : row + len(words)], self._rooms
            )
            first = until
        self._sums.append(total)
        self._taken.append(end - begin)

    def whole(self) -> int | None:
        """Return the sum of the part; None where not all of it was taken."""
        return sum(self._sums) % 2**64 if sum(self._taken) == self._words.nbytes else None


def first_words(local: torch.Tensor) -> bytes:
    """Return the bits of the first values of a part, a few of its first row."""
    while local.dim() > 1:
        local = local[0]
    return _words(local[:FIRST_VALUES] if local.dim() else local).cpu().numpy().tobytes()


def part_sum(local: torch.Tensor, offsets: Sequence[int], weights: PlaceWeights) -> int:
    """Return the weighted sum of the words of a part that lies at `offsets`, modulo 2^64."""
    return _total(_begun(None, local, offsets, weights))


def _total(sums: Iterable[int | Future[int]]) -> int:
    return sum(one if isinstance(one, int) else one.result() for one in sums) % 2**64


def _begun(
    hands: Hands | None, local: torch.Tensor, offsets: Sequence[int], weights: PlaceWeights
) -> list[int | Future[int]]:
    """Return numbers that add up to the sum of a part: known, or on their way where there are hands."""
    words = _words(local)  # [..., words of an element]
    row, outer = weights.of(words.shape, offsets)
    rows = words.reshape(outer.size, row.size)
    if words.device.type != "cpu":
        row_there, outer_there = (torch.from_numpy(each).to(words.device) for each in (row, outer))
        return [_sum_on_device(rows, row_there, outer_there, weights)]
    here, few = rows.numpy(), rows.numel() < FEW_WORDS
    if hands is None or few:
        return [_sum_here(here, row, outer, None if few else weights.rooms)]
    step = max(1, TASK_WORDS // row.size)
    return [
        hands.submit(_sum_here, here[begin : begin + step], row, outer[begin : begin + step], weights.rooms)
        for begin in range(0, len(rows), step)
    ]


def _sum_here(rows: WordArray, row: WordArray, outer: WordArray, rooms: Rooms | None = None) -> int:
    """Return the sum of rows in the host's memory, without torch: the calling thread alone computes.

    It borrows one of the `rooms`, since new memory takes longer to get than to fill; a few words need none.
    """
    if rows.size < FEW_WORDS_AT_ONCE:
        sums = np.einsum("ij,j->i", rows.astype(np.int64), row)
        return int(sums[0]) * int(outer[0]) if len(sums) == 1 else int(np.add.reduce(sums * outer))
    step = min(len(rows), max(1, PIECE_WORDS // row.size))
    with contextlib.nullcontext() if rooms is None or step * row.size > PIECE_WORDS else rooms.one() as room:
        wide = np.empty(step * row.size, dtype=np.int64) if room is None else np.frombuffer(room, dtype=np.int64)
        total = 0
        for begin in range(0, len(rows), step):
            piece = rows[begin : begin + step]
            held = wide[: piece.size].reshape(piece.shape)
            np.copyto(held, piece)  # and then two of one type: twice as fast as a product that widens
            total += int((np.einsum("ij,j->i", held, row) * outer[begin : begin + step]).sum())
    return total


def _sum_on_device(rows: torch.Tensor, row: torch.Tensor, outer: torch.Tensor, weights: PlaceWeights) -> int:
    step = min(len(rows), max(1, PIECE_WORDS // row.numel()))
    weighed = weights.room(step * row.numel(), rows.device).view(step, row.numel())
    total = 0
    for begin in range(0, len(rows), step):
        piece = rows[begin : begin + step]
        torch.mul(piece, row, out=weighed[: len(piece)])
        total += int((weighed[: len(piece)].sum(1) * outer[begin : begin + step]).sum())
    return total


def _words(local: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers, with a last dimension for the words of an element."""
    shape = local.shape
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj().resolve_neg())
    flat = local.contiguous().reshape(-1)
    return flat.view(WORDS[flat.element_size()]).view(*shape, -1)


def _row_dimensions(shape: Sequence[int]) -> int:
    """Return the number of the first dimension that belongs to a row, which has up to PIECE_WORDS words."""
    at = len(shape) - 1
    while at > 0:
        longer = math.prod(shape[at - 1 :])
        if longer > (PIECE_WORDS if math.prod(shape[at:]) < SHORT_ROW_WORDS else ROW_WORDS):
            break
        at -= 1
    return at


class PlaceWeights:
    """The weights of coordinates, odd 64-bit numbers by dimension; each is computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], WordArray] = {}
        self._of: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[WordArray, WordArray]] = {}
        self.rooms = Rooms(8 * PIECE_WORDS)  # for products in the host's memory
        self._room = torch.empty(0, dtype=torch.int64)

    def room(self, words: int, device: torch.device) -> torch.Tensor:
        """Return a place for so many products, always the same: new memory takes longer to get than to fill."""
        if self._room.numel() < words or self._room.device != device:
            self._room = torch.empty(words, dtype=torch.int64, device=device)
        return self._room[:words]

    def of(self, shape: Sequence[int], offsets: Sequence[int]) -> tuple[WordArray, WordArray]:
        """Return the weights within a row, which the last dimensions are, and of the rows: products of their own.

        `shape` is that of a part, with a last dimension for the words of an element; `offsets` say where it lies.
        """
        key = tuple(shape), tuple(offsets)
        if (known := self._of.get(key)) is None:
            places, inner = (*offsets, 0), _row_dimensions(shape)
            row = self.product(inner, places[inner:], shape[inner:])
            known = self._of[key] = row, self.product(0, places[:inner], shape[:inner])
        return known

    def product(self, first: int, offsets: Sequence[int], sizes: Sequence[int]) -> WordArray:
        """Return the weights of all places of a block over the dimensions from number `first` on, int64, flat."""
        flat: WordArray | None = None
        for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True), first):
            along = self._along(dimension, offset, size)
            flat = along if flat is None else (flat[:, None] * along).reshape(-1)
        return np.ones(1, dtype=np.int64) if flat is None else flat

    def _along(self, dimension: int, offset: int, size: int) -> WordArray:
        key = (dimension, offset, size)
        if key not in self._known:
            places = np.arange(offset, offset + size, dtype=np.uint64) + np.uint64(dimension << 48)
            self._known[key] = (_mixed(places) | np.uint64(1)).view(np.int64)
        return self._known[key]


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the numbers after splitmix64 (Steele et al. 2014), whose bits look random."""
    with np.errstate(over="ignore"):
        mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
