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

Places = npt.NDArray[np.int64]
WITHIN = 0x5851F42D4C957F2D  # sets the keys of windows apart from those of epochs


@dataclass(frozen=True)
class WindowedOrder:
    """The order of `samples` by blocks and windows of blocks. Holds no state: the work per position is fixed."""

    samples: int
    block: int
    window: int

    def ids(self, seed: int, positions: Places) -> Places:
        """Return the sample at each position, in 0..samples-1; every epoch holds each once."""
        flat = np.ascontiguousarray(positions, dtype=np.int64).reshape(-1)
        if flat.size and int(flat.min()) < 0:
            raise ValueError(f"positions count from 0, not {int(flat.min())}")
        epochs, index = np.divmod(flat, self.samples)
        if flat.size and epochs.min() == epochs.max():
            found = self._in_epochs(keyed(seed, epochs[:1].astype(np.uint64)), np.zeros(1, dtype=np.int64), index)
        else:
            each, of = np.unique(epochs, return_inverse=True)
            found = self._in_epochs(keyed(seed, each.astype(np.uint64)), of, index)
        return found.reshape(np.shape(positions))

    def window_of(self, seed: int, position: int) -> Places:
        """Return the blocks of the window that a position lies in, in the order of the epoch: what a reader fetches."""
        epoch, index = divmod(position, self.samples)
        key = keyed(seed, np.array([epoch], dtype=np.uint64))
        window = int(self._windows(self._short(key), np.array([index]))[0][0])
        return self._blocks(key, np.arange(window * self.window, min((window + 1) * self.window, self._count)))

    @property
    def _count(self) -> int:
        return -(-self.samples // self.block)

    @property
    def _lacking(self) -> int:
        """How many samples the last block lacks."""
        return self._count * self.block - self.samples

    def _short(self, keys: Unsigned) -> Places:
        """Return the place of the short block in the order of blocks of each epoch."""
        return place_of(keys, self._count - 1, self._count)

    def _windows(self, short: Places, index: Places) -> tuple[Places, Places]:
        """Return (window, place in it) of each index of an epoch. The window with the short block is shorter."""
        full = self.window * self.block
        last = np.minimum((short // self.window + 1) * full, self._count * self.block) - self._lacking  # where it ends
        shifted = index + np.where(index >= last, self._lacking, 0)
        return shifted // full, shifted % full

    def _in_epochs(self, keys: Unsigned, of: Places, index: Places) -> Places:
        """Return the sample at each index of an epoch; `of` says under which of the epochs' keys, once or for each."""
        short, keys = self._short(keys)[of], keys[of]
        windows, places = self._windows(short, index)
        blocks = np.minimum((windows + 1) * self.window, self._count) - windows * self.window  # of the window
        has_short = windows == short // self.window
        sizes = blocks * self.block - np.where(has_short, self._lacking, 0)
        of_window = windows[:1] if keys.size == 1 and windows.size and windows.min() == windows.max() else windows
        inside = mix64(keys + np.uint64(WITHIN) * (of_window + 1).astype(np.uint64))
        found = np.empty(index.size, dtype=np.int64)
        for size in np.unique(sizes).tolist():  # a few: of full windows, the last one, and one with the short block
            here = np.flatnonzero(sizes == size)
            own = inside if inside.size == 1 else inside[here]
            found[here] = permuted(own, places[here].astype(np.uint64), size).astype(np.int64)
        block, within = np.divmod(found, self.block)
        at = short % self.window  # the short block comes last of its window, the others move up
        moved = np.where(block == blocks - 1, at, block + (block >= at))
        return self._blocks(keys, windows * self.window + np.where(has_short, moved, block)) * self.block + within

    def _blocks(self, keys: Unsigned, ranks: Places) -> Places:
        """Return the blocks at these places of an epoch's order of blocks, under one key or one for each."""
        first, last = (int(ranks.min()), int(ranks.max())) if ranks.size else (0, 0)
        if keys.size == 1 and last - first < ranks.size:  # each block once
            near = np.arange(first, last + 1, dtype=np.uint64)
            return permuted(keys, near, self._count).astype(np.int64)[ranks - first]
        return permuted(keys, ranks.astype(np.uint64), self._count).astype(np.int64)
