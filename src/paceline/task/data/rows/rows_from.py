"""Rows of one length from any place of tokens in memory: a single call of numpy copies all rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.task.data.rows.packing import Ints
from paceline.task.data.sources.tokenizer import Tokens


class RowsFrom:
    """Tokens in memory, or mapped into it."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.memory = tokens.data
        self._view: Tokens | None = None  # every row of the length that was asked for last

    def rows_from(self, starts: Ints, stops: Ints, length: int) -> tuple[Tokens, npt.NDArray[np.bool_]]:
        """Return `length` tokens from each start on, [starts, length], and of which rows they are there.

        The others would end after the tokens do, and hold something else.
        """
        last = len(self._tokens) - length
        is_whole = starts <= last
        if last < 0:
            return np.zeros((len(starts), length), dtype=self._tokens.dtype), is_whole
        if self._view is None or self._view.shape[1] != length:
            size = self._tokens.itemsize
            self._view = np.lib.stride_tricks.as_strided(
                self._tokens, (last + 1, length), (size, size), writeable=False
            )
        self.touch(starts)
        return self._view[starts if is_whole.all() else np.minimum(starts, last)], is_whole

    def touch(self, places: Ints) -> Tokens:
        """Return the tokens at these places: memory that is far away is waited for once, and not for each of them."""
        return self._tokens[places]

    def lay(self, into: Tokens, places: Ints, starts: Ints, stops: Ints) -> Tokens:
        """Copy the tokens starts..stops of each run to `into`, from its place on, and return the last token of each.

        A run may lie over the end of the one before. Views of memory copy them: of a few short runs, slices of arrays
        take twice as long.
        """
        lasts = self.touch(stops - 1)
        there, here = into.data, self.memory
        for place, start, stop in zip(places.tolist(), starts.tolist(), stops.tolist(), strict=True):
            there[place : place + stop - start] = here[start:stop]
        return lasts
