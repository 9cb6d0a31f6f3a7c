"""Rows of one length from any place of tokens that lie in memory: one call of numpy copies all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.task.data.sources.tokenizer import Tokens


class RowsFrom:
    """Tokens in memory, or mapped into it."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._memory = memoryview(tokens)
        self._view: Tokens | None = None  # every row of the length that was asked for last

    def rows_from(
        self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], length: int
    ) -> tuple[Tokens, npt.NDArray[np.bool_]]:
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

    def touch(self, places: npt.NDArray[np.int64]) -> None:
        """Ask for the tokens at these places together: memory is waited for once, and not for each row that is far."""
        self._tokens[places]

    def lay(self, into: Tokens, places: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        """Copy the tokens starts..stops of each run to `into`, from its place on; each over the end of the one before.

        By views of memory: of a few short runs, slices of arrays take twice as long.
        """
        there, here = memoryview(into), self._memory
        for place, start, stop in zip(places, starts, stops, strict=True):
            there[place : place + stop - start] = here[start:stop]

    def at(self, places: npt.NDArray[np.int64]) -> Tokens:
        """Return the tokens at these places."""
        return self._tokens[places]
