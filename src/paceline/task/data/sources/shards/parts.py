"""Tokens that lie in several files, read as if they were one array: by windows of a length, or by slices."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.task.data.sources.shards.layout import damaged
from paceline.task.data.sources.tokenizer import Tokens
from paceline.task.data.storage.bytes import ByteFile, LocalBytes, as_words

Indices = npt.NDArray[np.int64]


class Checksums:
    """The checksums of a file's blocks: each block is held against its own when it is read for the first time."""

    def __init__(self, file: ByteFile, start: int, stop: int, block_bytes: int, recorded: npt.NDArray[Any]) -> None:
        """The bytes start..stop of `file` are checked in blocks of `block_bytes`."""
        self._file, self._start, self._stop = file, start, stop
        self._block_bytes, self._recorded = block_bytes, recorded
        self._sound = np.zeros(len(recorded), dtype=bool)
        self._unseen = len(recorded)

    def hold(self, starts: Indices, stops: Indices) -> None:
        """Raise DamagedData unless the bytes starts..stops, counted from the first one, are as they were written."""
        if not self._unseen:
            return
        first, last = starts // self._block_bytes, (stops - 1) // self._block_bytes
        if (last - first <= 1).all() and self._sound[first].all() and self._sound[last].all():
            return
        widest = int((last - first).max()) if len(first) else -1
        for offset in range(widest + 1):
            blocks = np.minimum(first + offset, last)
            if not (sound := self._sound[blocks]).all():
                for block in np.unique(blocks[~sound]).tolist():
                    self._check(block)

    def _check(self, block: int) -> None:
        start = self._start + block * self._block_bytes
        stop, recorded = min(start + self._block_bytes, self._stop), int(self._recorded[block])
        found = zlib.crc32(np.ascontiguousarray(self._file.read(start, stop)).data)
        if found != recorded and self._file.forget(start, stop):  # what was kept of a remote file may be at fault
            found = zlib.crc32(np.ascontiguousarray(self._file.read(start, stop)).data)
        if found != recorded:
            raise damaged(self._file.name, start, stop, found, recorded)
        if not self._sound[block]:
            self._sound[block] = True
            self._unseen = len(self._sound) - int(self._sound.sum())


class TokenPart:
    """The tokens of one file."""

    def __init__(self, file: ByteFile, start: int, tokens: int, dtype: str, checksums: Checksums | None = None) -> None:
        """The tokens begin at byte `start` of `file`."""
        self.file, self.tokens, self.dtype = file, tokens, np.dtype(dtype)
        self._start, self._checksums = start, checksums
        self.is_checked = checksums is not None
        self._mapped: Tokens | None = None
        self._view: Tokens | None = None  # every window of the length that was asked for last
        if isinstance(file, LocalBytes):
            self._mapped = as_words(file.read(start, start + tokens * self.dtype.itemsize), dtype)

    def read(self, start: int, stop: int) -> Tokens:
        """Return the tokens start..stop. Raises DataError where they are not as they were written."""
        self._hold(np.array([start]), stop - start)
        return self._raw(start, stop)

    def gather(self, places: Indices) -> Tokens:
        """Return the tokens at these places, which lie in runs. Raises DataError where they are damaged."""
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        firsts = places[np.concatenate([[0], breaks])]
        lasts = places[np.concatenate([breaks, [len(places)]]) - 1]
        if self._mapped is None:
            return np.concatenate([self.read(a, b + 1) for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)])
        if self._checksums is not None:
            size = self.dtype.itemsize
            self._checksums.hold(firsts * size, (lasts + 1) * size)
        return self._mapped[places]

    def windows(self, starts: Indices, length: int) -> Tokens:
        """Return the `length` tokens from each start on: [starts, length]."""
        self._hold(starts, length)
        if self._mapped is None:
            return np.stack([self._raw(start, start + length) for start in starts.tolist()])
        if self._view is None or self._view.shape[1] != length:
            size, shape = self.dtype.itemsize, (self.tokens - length + 1, length)
            self._view = np.lib.stride_tricks.as_strided(self._mapped, shape, (size, size), writeable=False)
        return self._view[starts]

    def expect(self, spans: Indices) -> None:
        """Say which tokens will be read next: [spans, 2], where each begins and ends."""
        self.file.expect(self._start + spans * self.dtype.itemsize)

    def _raw(self, start: int, stop: int) -> Tokens:
        if self._mapped is not None:
            return self._mapped[start:stop]
        size = self.dtype.itemsize
        return as_words(self.file.read(self._start + start * size, self._start + stop * size), self.dtype.str)

    def _hold(self, starts: Indices, length: int) -> None:
        if self._checksums is not None and length:
            first = starts * self.dtype.itemsize
            self._checksums.hold(first, first + length * self.dtype.itemsize)


class TokenParts:
    """The tokens of several files in a row. `parts[a:b]` returns a slice of them, as an array would."""

    def __init__(self, parts: Sequence[TokenPart]) -> None:
        self._parts = [part for part in parts if part.tokens]
        self._begins = np.cumsum([0, *(part.tokens for part in self._parts)], dtype=np.int64)
        self.dtype = max(
            (part.dtype for part in self._parts), key=lambda dtype: dtype.itemsize, default=np.dtype("<u2")
        )

    @property
    def is_near(self) -> bool:
        """Whether all of them are in local files."""
        return all(isinstance(part.file, LocalBytes) for part in self._parts)

    @property
    def is_checked(self) -> bool:
        """Whether all of them have checksums."""
        return all(part.is_checked for part in self._parts)

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, wanted: slice | Indices) -> Tokens:
        """Return a slice without steps, or the tokens at places that lie in runs. Raises DataError for damaged ones."""
        if not isinstance(wanted, slice):
            return self._gather(wanted)
        start, stop, step = wanted.indices(len(self))
        assert step == 1, "a slice without steps"
        found = [self._parts[number].read(first, last) for number, first, last in self._spans(start, max(start, stop))]
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.zeros(0, dtype=self.dtype)

    def windows(self, starts: Indices, length: int) -> Tokens:
        """Return the `length` tokens from each start on: [starts, length]. Raises DataError for damaged ones."""
        if len(self._parts) == 1:
            return self._parts[0].windows(starts, length)
        numbers = np.searchsorted(self._begins, starts, side="right") - 1
        within = starts - self._begins[numbers]
        inside = starts + length <= self._begins[numbers + 1]
        rows = np.empty((len(starts), length), dtype=self.dtype)
        for number in sorted(set(numbers[inside].tolist())):
            chosen = inside & (numbers == number)
            rows[chosen] = self._parts[number].windows(within[chosen], length)
        for row in np.flatnonzero(~inside).tolist():
            rows[row] = self[int(starts[row]) : int(starts[row]) + length]
        return rows

    def _gather(self, places: Indices) -> Tokens:
        found = np.empty(len(places), dtype=self.dtype)
        numbers = np.searchsorted(self._begins, places, side="right") - 1
        for number in np.unique(numbers).tolist():
            chosen = np.flatnonzero(numbers == number)
            found[chosen] = self._parts[number].gather(places[chosen] - self._begins[number])
        return found

    def expect(self, starts: Indices, stops: Indices) -> None:
        """Say which runs of tokens will be read next, in their order."""
        numbers = np.searchsorted(self._begins, starts, side="right") - 1
        within = np.stack([starts, np.minimum(stops, self._begins[numbers + 1])], axis=1) - self._begins[numbers, None]
        for number in dict.fromkeys(numbers.tolist()):
            self._parts[number].expect(within[numbers == number])
        over = stops > self._begins[numbers + 1]
        for start, stop in zip(starts[over].tolist(), stops[over].tolist(), strict=True):
            for number, first, last in self._spans(start, stop)[1:]:
                self._parts[number].expect(np.array([[first, last]]))

    def _spans(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return where the tokens start..stop lie: (part, first, last), without empty ones."""
        number = int(np.searchsorted(self._begins, start, side="right")) - 1
        spans = []
        while start < stop:
            begin, end = int(self._begins[number]), int(self._begins[number + 1])
            last = min(stop, end)
            spans.append((number, start - begin, last - begin))
            start, number = last, number + 1
        return spans
