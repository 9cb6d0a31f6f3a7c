"""How keys and values reach all ranks that share a sequence, and how their gradients come home: at once, or in a ring.

Both methods give a rank the same blocks of the others' keys, and take back the gradients of each. Chunks are those of
zigzag.py: a rank's first chunk comes before all chunks of later ranks, its second after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 gave the collectives of single tensors new names, and the old ones a warning.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Block:
    """Keys and values [rows, kv_heads, keys, head_dim] of other ranks.

    They come before all queries of this rank, or (`late`) before those of its second chunk and after the first's.
    """

    k: Tensor
    v: Tensor
    late: bool


class Gathered:
    """All keys at once, by all-gather; their gradients by one reduce-scatter."""

    def __init__(self, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> None:
        """Start to gather."""
        self._group, self._rank, self._ranks = group, group.rank(), group.size()
        own = torch.stack((k, v))  # [2, rows, kv_heads, 2 chunks, head_dim]
        self._all = own.new_empty(self._ranks, *own.shape)
        self._work = all_gather(self._all.flatten(0, 1), own, group, async_op=True)
        self._chunk = k.shape[2] // 2
        self._late = False

    def blocks(self) -> Iterator[Block]:
        """Yield the first chunks of all ranks before this one, and both chunks of all ranks after it."""
        self._work.wait()
        for self._late in (False, True):
            # A query that sees all of a block does not care in which order its keys stand.
            found = self._of(self._all).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)  # [2, rows, kv_heads, keys, head_dim]
            if found.shape[3]:
                yield Block(found[0], found[1], self._late)

    def _of(self, everything: Tensor) -> Tensor:
        """Return the block's part of [ranks, 2, rows, kv_heads, 2 chunks, head_dim]."""
        return everything[self._rank + 1 :] if self._late else everything[: self._rank, ..., : self._chunk, :]

    def begin(self, by_k: Tensor, by_v: Tensor) -> None:
        """Take the gradients of this rank's own keys and values."""
        self._sums = torch.zeros_like(self._all, dtype=torch.promote_types(by_k.dtype, torch.float32))
        self._sums[self._rank, 0], self._sums[self._rank, 1] = by_k, by_v

    def add(self, by_k: Tensor, by_v: Tensor) -> None:
        """Take the gradients of the block that was yielded last."""
        place = self._of(self._sums)  # [block's ranks, 2, rows, kv_heads, block's keys of a rank, head_dim]
        for index, by in enumerate((by_k, by_v)):
            place[:, index] = by.unflatten(2, (place.shape[0], place.shape[4])).permute(2, 0, 1, 3, 4)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return this rank's sums."""
        own = torch.empty_like(self._sums[0])
        reduce_scatter(own, self._sums.flatten(0, 1), group=self._group)
        return own[0], own[1]


class Ring:
    """Keys of one rank after the other, each passed on while it is used; their gradients travel one step behind.

    After ranks - 1 steps every rank has seen all keys; after one more, the gradients are where the keys came from.
    """

    KEYS, GRADIENTS = 0, 1  # tags

    def __init__(self, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> None:
        """Start to pass this rank's keys on."""
        self._group, self._rank, self._ranks = group, group.rank(), group.size()
        self._chunk = k.shape[2] // 2
        self._pass_keys(torch.stack((k, v)))  # [2, rows, kv_heads, 2 chunks, head_dim]

    def blocks(self) -> Iterator[Block]:
        """Yield the first chunk of a rank before this one, or both chunks of a rank after it, nearest before first."""
        for step in range(1, self._ranks):
            found = self._keys.arrived()
            if step < self._ranks - 1:
                self._pass_keys(found)
            self._late = (self._rank - step) % self._ranks > self._rank
            if not self._late:
                found = found[:, :, :, : self._chunk]
            yield Block(found[0], found[1], self._late)

    def begin(self, by_k: Tensor, by_v: Tensor) -> None:
        """Take the gradients of this rank's own keys and values, and start to pass them after the keys."""
        self._pass_gradients(torch.stack((by_k, by_v)).to(torch.promote_types(by_k.dtype, torch.float32)))

    def add(self, by_k: Tensor, by_v: Tensor) -> None:
        """Add the gradients of the block that was yielded last to what came with it, and pass them on."""
        sums = self._gradients.arrived()
        seen = slice(None) if self._late else slice(self._chunk)
        sums[0, :, :, seen] += by_k
        sums[1, :, :, seen] += by_v
        self._pass_gradients(sums)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return this rank's sums, back home."""
        own = self._gradients.arrived()
        return own[0], own[1]

    def _pass_keys(self, keys: Tensor) -> None:
        self._keys = _Passed(keys, self._group, self.KEYS)

    def _pass_gradients(self, gradients: Tensor) -> None:
        self._gradients = _Passed(gradients, self._group, self.GRADIENTS)


class _Passed:
    """A tensor on its way to the next rank of the ring, while the previous rank's comes in."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        rank, ranks = group.rank(), group.size()
        self._sent, self._received = tensor, torch.empty_like(tensor)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=(rank + 1) % ranks),
                dist.P2POp(dist.irecv, self._received, group=group, tag=tag, group_peer=(rank - 1) % ranks),
            ]
        )

    def arrived(self) -> Tensor:
        """Return what the previous rank sent, once it is here."""
        for work in self._works:
            work.wait()
        return self._received


METHODS: dict[str, type[Gathered] | type[Ring]] = {"gather": Gathered, "ring": Ring}
