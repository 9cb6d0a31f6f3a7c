"""The state of one moment that ranks hold in memory, sent to the ranks that need it: no file, and no disk.

Each rank says which parts it holds, works out which of them its own tensors need under their layout, and asks for these
from rank to rank; parts that it holds itself do not travel. It checks what it has and what it gets by the sums of
fingerprint.py. What a rank keeps at once is its own need, and one other rank's at a time.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.checkpoint.boxes import Box, overlap
from paceline.checkpoint.fingerprint import PlaceWeights, local_part, part_sum, within
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.shards import dtype_name
from paceline.checkpoint.snapshot import Snapshot
from paceline.errors import ConfigError, StorageError

WHAT = "the state that the ranks hold was not brought together"
SUM_BYTES = 8


@dataclass(frozen=True)
class Wish:
    """A rectangle of a tensor that a rank needs, and the part that it is of, by its number at the rank that holds it.

    A rank's own `target` is where it lies in what the rank has of the tensor.
    """

    part: int
    box: Box
    target: torch.Tensor = field(compare=False)


class HeldByRanks:
    """The state after a step, which all ranks hold between them, and what belongs to it beside tensors (`extra`)."""

    def __init__(self, taken: Snapshot, ranks: Ranks) -> None:
        """Every rank makes one, with what it holds of the step: no part at all where it is new."""
        self.extra: Mapping[str, object] = taken.extra
        self.step = taken.step
        self._mine, self._ranks = list(taken.values.items()), ranks
        told = [(part.name, part.dtype, part.shape, part.offsets, part.sizes) for part, _ in self._mine]
        self._holders: dict[str, dict[Box, list[tuple[int, int]]]] = defaultdict(dict)  # -> (rank, its number there)
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        for rank, parts in enumerate(ranks.everywhere(told)):
            for number, (name, dtype, shape, offsets, sizes) in enumerate(parts):
                self._kinds[name] = dtype, shape
                self._holders[name].setdefault((offsets, sizes), []).append((rank, number))

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return sorted(self._kinds)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the state in place into tensors of any layout (plain or DTensor). Every rank calls it, with its own.

        Raises on all ranks alike: ConfigError where a name, shape or dtype differs, StorageError where nobody holds
        what a rank needs, or values are not those that were sent.
        """
        with torch.no_grad():
            self._ranks.attempt(WHAT, self._check)
            wishes = self._ranks.attempt(WHAT, lambda: self._wishes(tensors))
            asked = self._ranks.any_of([name in tensors for name in self.names])
            unread = [name for name, is_asked in zip(self.names, asked, strict=True) if not is_asked]
            if unread:
                raise ConfigError(f"the ranks hold '{unread[0]}', which nothing asks for", "it is of another model")
            answers = self._answers(wishes)
            self._ranks.attempt(WHAT, lambda: self._place(wishes, answers))

    def _check(self) -> None:
        """Raise StorageError where what this rank holds is not what it took."""
        weights = PlaceWeights()
        for part, value in self._mine:
            if part.fingerprint not in (None, part_sum(value, part.offsets, weights) if part.bytes else None):
                raise StorageError(WHAT, f"rank {self._ranks.rank} no longer holds the values of '{part.key}'")

    # ---- what is needed --------------------------------------------------------------------------------------------

    def _wishes(self, tensors: Mapping[str, torch.Tensor]) -> dict[int, list[Wish]]:
        """Return what this rank needs of each rank: of itself, wherever it holds that."""
        found: dict[int, list[Wish]] = defaultdict(list)
        for name, tensor in tensors.items():
            if self._kinds.get(name) != (dtype_name(tensor.dtype), tuple(tensor.shape)):
                raise ConfigError(
                    f"'{name}' is {dtype_name(tensor.dtype)}{list(tensor.shape)} here",
                    f"the ranks hold {self._kinds.get(name, 'no such tensor')}",
                )
            local, places = local_part(tensor.detach())
            for place in places:
                self._find(found, name, place, local)
        return found

    def _find(self, found: dict[int, list[Wish]], name: str, place: Box, local: torch.Tensor) -> None:
        count = 0
        for box, holders in self._holders[name].items():
            shared = overlap(box, place)
            if shared is None:
                continue
            count += math.prod(shared[1])
            own = [number for rank, number in holders if rank == self._ranks.rank]
            rank, number = (self._ranks.rank, own[0]) if own else holders[self._ranks.rank % len(holders)]
            found[rank].append(Wish(number, shared, within(local, place, shared)))
        if count != math.prod(place[1]):
            raise StorageError(WHAT, f"of '{name}' they hold {count} of {math.prod(place[1])} elements, or some twice")

    # ---- from rank to rank -----------------------------------------------------------------------------------------

    def _answers(self, wishes: Mapping[int, Sequence[Wish]]) -> dict[int, torch.Tensor]:
        """Return what the others have answered, each in turn, and answer them."""
        rank, size = self._ranks.rank, self._ranks.size
        answers = {}
        for shift in range(1, size):
            holder, asker = (rank + shift) % size, (rank - shift) % size
            asked = json.dumps([[wish.part, wish.box] for wish in wishes.get(holder, ())]).encode()
            heard = self._ranks.swap(torch.frombuffer(bytearray(asked), dtype=torch.uint8), holder, asker)
            theirs = [(part, (tuple(box[0]), tuple(box[1]))) for part, box in json.loads(bytes(heard.numpy()))]
            answers[holder] = self._ranks.swap(self._answer(theirs), asker, holder)
        return answers

    def _answer(self, asked: Sequence[tuple[int, Box]]) -> torch.Tensor:
        """Return the values of some rectangles as bytes, each after its sum."""
        pieces, weights = [], PlaceWeights()
        for number, box in asked:
            part, held = self._mine[number]
            value = within(held, part.box, box).contiguous()
            total = part_sum(value, box[0], weights)
            pieces += [torch.frombuffer(bytearray(total.to_bytes(SUM_BYTES, "little")), dtype=torch.uint8), raw(value)]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)

    def _place(self, wishes: Mapping[int, Sequence[Wish]], answers: Mapping[int, torch.Tensor]) -> None:
        weights = PlaceWeights()
        for wish in wishes.get(self._ranks.rank, ()):
            part, held = self._mine[wish.part]
            wish.target.copy_(within(held, part.box, wish.box))
        for rank, content in answers.items():
            at = 0
            for wish in wishes.get(rank, ()):
                total = int.from_bytes(bytes(content[at : at + SUM_BYTES].numpy()), "little")
                value = torch.empty(wish.box[1], dtype=wish.target.dtype)
                length = value.nbytes
                raw(value).copy_(content[at + SUM_BYTES : at + SUM_BYTES + length])
                at += SUM_BYTES + length
                if part_sum(value, wish.box[0], weights) != total:
                    raise StorageError(WHAT, f"values from rank {rank} are not those that it held")
                wish.target.copy_(value)


def raw(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, as a view."""
    flat = torch.view_as_real(value) if value.is_complex() else value
    return flat.reshape(-1).view(torch.uint8)
