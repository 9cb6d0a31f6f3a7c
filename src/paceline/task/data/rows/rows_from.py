"""Rows of one length from any place of tokens in memory: a single call of numpy copies all rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.task.data.rows.packing import Ints
from paceline.task.data.sources.tokenizer import Tokens


class RowsAcross:
    """Rows of several arrays of one type, wherever each lies in memory: one call of numpy copies rows of all of them.

    A view spans the memory from the first array to the end of the last. What lies between them is never touched: a row
    is asked for by its array and its place there, and lies in it.
    """

    def __init__(self, arrays: Sequence[Tokens]) -> None:
        """Raises ValueError where one view cannot span them."""
        places = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
        self._size = size = arrays[0].itemsize
        first = int(places.argmin())
        if any(array.dtype != arrays[0].dtype for array in arrays) or ((places - places[first]) % size).any():
            raise ValueError("the arrays are not of one type")
        self._arrays, self._first = arrays, arrays[first]  # the views hold the memory of one of them
        self._begins = (places - places[first]) // size
        self._lengths = np.array([len(array) for array in arrays])
        self._span = int((self._begins + self._lengths).max())
        self._flat = self._spanned((self._span,))
        self._view: Tokens | None = None  # every row of the length that was asked for last
        self.memory = self._flat.data

    def spots(self, numbers: Ints, starts: Ints) -> Ints:
        """Return where in `memory` the tokens lie that begin there in each array."""
        found: Ints = self._begins[numbers] + starts
        return found

    def rows(self, numbers: Ints, starts: Ints, length: int) -> Tokens:
        """Return the `length` tokens of each array from each start on: [starts, length]. All of them are there."""
        assert ((starts >= 0) & (starts + length <= self._lengths[numbers])).all(), "a row lies in its array"
        view = self._view
        if view is None or view.shape[1] != length:
            view = self._view = self._spanned((max(0, self._span - length + 1), length))
        places = self.spots(numbers, starts)
        self._flat[places]  # memory that is far away is waited for once, and not for each row
        found: Tokens = view[places]
        return found

    def _spanned(self, shape: tuple[int, ...]) -> Tokens:
        strides = (self._size,) * len(shape)
        return np.lib.stride_tricks.as_strided(self._first, shape, strides, writeable=False)


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
        view = self._view  # another thread may ask for rows of another length
        if view is None or view.shape[1] != length:
            size = self._tokens.itemsize
            view = np.lib.stride_tricks.as_strided(self._tokens, (last + 1, length), (size, size), writeable=False)
            self._view = view
        self.touch(starts)
        return view[starts if is_whole.all() else np.minimum(starts, last)], is_whole

    def touch(self, places: Ints) -> Tokens:
        """Return the tokens at these places: memory that is far away is waited for once, and not for each of them."""
        return self._tokens[places]

    def spots(self, starts: Ints, stops: Ints) -> list[int]:
        """Return where in `memory` each run of tokens begins."""
        found: list[int] = starts.tolist()
        return found
