"""The two-level order: blocks are permuted, and samples within a window of blocks, for storage that is slow to reach.

Samples lie in blocks of `block` neighbours, the last of which may be shorter. An epoch permutes the blocks and takes
them `window` at a time; the samples of a window come in a permuted order of their own. A reader thus needs `window`
blocks at once, and fetches each block once per epoch. The price is that neighbours meet more often: two samples of one
block always share a window, so that they come into one batch about samples / (window * block) times as often as under
the global order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.task.data.order.permutation import Unsigned, keyed, mix64, permuted, place_of

WITHIN = 0x5851F42D4C957F2D  # sets the keys of windows apart from those of epochs


@dataclass(frozen=True)
class WindowedOrder:
    """The order of `samples` by blocks and windows of blocks. Holds no state: the work per position is fixed."""

    samples: int
    block: int
    window: int

    def ids(self, seed: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sample at each position, in 0..samples-1; every epoch holds each once."""
        flat = np.ascontiguousarray(positions, dtype=np.int64).reshape(-1)
        if flat.size and int(flat.min()) < 0:
            raise ValueError(f"positions count from 0, not {int(flat.min())}")
        epochs, index = np.divmod(flat, self.samples)
        found = np.empty(flat.size, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = np.flatnonzero(epochs == epoch)
            found[here] = self._in_epoch(keyed(seed, np.array([epoch], dtype=np.uint64)), index[here])
        return found.reshape(np.shape(positions))

    def window_of(self, seed: int, position: int) -> npt.NDArray[np.int64]:
        """Return the blocks of the window that a position lies in, in the order of the epoch: what a reader fetches."""
        epoch, index = divmod(position, self.samples)
        key = keyed(seed, np.array([epoch], dtype=np.uint64))
        window = int(self._windows(key, np.array([index]))[0][0])
        return self._blocks(key, np.arange(window * self.window, min((window + 1) * self.window, self._count)))

    @property
    def _count(self) -> int:
        return -(-self.samples // self.block)

    @property
    def _lacking(self) -> int:
        """How many samples the last block lacks."""
        return self._count * self.block - self.samples

    def _windows(self, key: Unsigned, index: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
        """Return (window, place in it) of each index of an epoch. The window with the short block is shorter."""
        full = self.window * self.block
        short = place_of(key, self._count - 1, self._count) // self.window
        last = min((short + 1) * full, self._count * self.block) - self._lacking  # where the short window ends
        shifted = index + np.where(index >= last, self._lacking, 0)
        return shifted // full, shifted % full

    def _in_epoch(self, key: Unsigned, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        windows, places = self._windows(key, index)
        found = np.empty(index.size, dtype=np.int64)
        for window in np.unique(windows):
            here = np.flatnonzero(windows == window)
            ranks = np.arange(window * self.window, min((window + 1) * self.window, self._count))
            blocks = self._blocks(key, ranks)
            is_short = blocks == self._count - 1
            blocks = np.concatenate([blocks[~is_short], blocks[is_short]])  # the short one last
            size = len(blocks) * self.block - (self._lacking if is_short.any() else 0)
            inside = mix64(key + np.uint64((WITHIN * (int(window) + 1)) % 2**64))
            place = permuted(inside, places[here].astype(np.uint64), size).astype(np.int64)
            found[here] = blocks[place // self.block] * self.block + place % self.block
        return found

    def _blocks(self, key: Unsigned, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the blocks at these places of the epoch's order of blocks."""
        return permuted(key, ranks.astype(np.uint64), self._count).astype(np.int64)
