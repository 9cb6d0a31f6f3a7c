"""Tokens that lie in several files, read as if they were one array: by windows of a length, or by slices."""

from __future__ import annotations

import contextlib
import threading
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.task.data.rows.rows_from import RowsAcross, RowsFrom
from paceline.task.data.sources.shards.layout import damaged
from paceline.task.data.sources.tokenizer import Tokens
from paceline.task.data.storage.bytes import ByteFile, LocalBytes, as_words

MANY_RUNS = 32  # so many are looked at together

Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Checksums:
    """The checksums of a file's blocks: each block is held against its own when it is read for the first time."""

    def __init__(self, file: ByteFile, start: int, stop: int, block_bytes: int, recorded: npt.NDArray[Any]) -> None:
        """The bytes start..stop of `file` are checked in blocks of `block_bytes`."""
        self._file, self._start, self._stop = file, start, stop
        self._block_bytes, self._recorded = block_bytes, recorded
        self._sound, self._lock = bytearray(len(recorded)), threading.Lock()
        self._are_sound = np.frombuffer(self._sound, dtype=np.bool_)  # the same memory
        self.unseen = len(recorded)  # blocks that were not read yet

    def hold(self, starts: Sequence[int] | Indices, stops: Sequence[int] | Indices) -> None:
        """Raise DamagedData unless the bytes starts..stops, counted from the first one, are as they were written."""
        if isinstance(starts, np.ndarray) and isinstance(stops, np.ndarray):
            first = np.minimum(starts // self._block_bytes, len(self._sound) - 1)
            last = (stops - 1) // self._block_bytes
            open_ = (stops > starts) & ~(self._are_sound[first] & self._are_sound[last] & (last - first < 2))
            starts, stops = starts[open_].tolist(), stops[open_].tolist()
        # Of a batch's few runs, numpy's calls would take longer than these.
        sound, size = self._sound, self._block_bytes
        for start, stop in zip(starts, stops, strict=True):
            if start < stop:
                first, last = start // size, (stop - 1) // size
                if last - first > 1 or not (sound[first] and sound[last]):
                    for block in range(first, last + 1):
                        if not sound[block]:
                            self._check(block)

    def _check(self, block: int) -> None:
        start = self._start + block * self._block_bytes
        stop, recorded = min(start + self._block_bytes, self._stop), int(self._recorded[block])
        found = zlib.crc32(np.ascontiguousarray(self._file.read(start, stop)).data)
        if found != recorded and self._file.forget(start, stop):  # what was kept of a remote file may be at fault
            found = zlib.crc32(np.ascontiguousarray(self._file.read(start, stop)).data)
        if found != recorded:
            raise damaged(self._file.name, start, stop, found, recorded)
        with self._lock:  # another thread may have read it meanwhile
            if not self._sound[block]:
                self._sound[block] = True
                self.unseen -= 1


class TokenPart:
    """The tokens of one file."""

    def __init__(self, file: ByteFile, start: int, tokens: int, dtype: str, checksums: Checksums | None = None) -> None:
        """The tokens begin at byte `start` of `file`."""
        self.file, self.tokens, self.dtype = file, tokens, np.dtype(dtype)
        self._start, self._checksums = start, checksums
        self.is_checked = checksums is not None
        self._mapped: Tokens | None = None
        self._rows: RowsFrom | None = None
        self._watch = file.watch if isinstance(file, LocalBytes) else None
        if isinstance(file, LocalBytes):
            self._mapped = as_words(file.read(start, start + tokens * self.dtype.itemsize), dtype)
            self._rows = RowsFrom(self._mapped)

    def read(self, start: int, stop: int) -> Tokens:
        """Return the tokens start..stop. Raises DataError where they are not as they were written."""
        return self.runs([start], [stop])[0]

    def runs(self, starts: Sequence[int], stops: Sequence[int]) -> list[Tokens]:
        """Return the tokens starts..stops of each run. Raises DataError where they are not as they were written."""
        self.hold(starts, stops)
        if (mapped := self._mapped) is not None:
            return [mapped[start:stop] for start, stop in zip(starts, stops, strict=True)]
        return [self._raw(start, stop) for start, stop in zip(starts, stops, strict=True)]

    def gather(self, places: Indices) -> Tokens:
        """Return the tokens at these places, which lie in runs. Raises DataError where they are damaged."""
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        firsts = places[np.concatenate([[0], breaks])]
        lasts = places[np.concatenate([breaks, [len(places)]]) - 1]
        if self._mapped is None:
            return np.concatenate(self.runs(firsts.tolist(), (lasts + 1).tolist()))
        self.hold(firsts.tolist(), (lasts + 1).tolist())
        return self._mapped[places]

    def rows_from(self, starts: Indices, stops: Indices, length: int) -> tuple[Tokens, Flags]:
        """Return `length` tokens from each start on, [starts, length], and of which rows they are there.

        The others would end after the file. Raises DataError where what lies up to `stops` is not as it was written.
        """
        assert self._rows is not None, "a file that is fetched is read run by run"
        is_whole = starts <= self.tokens - length
        held = slice(None) if is_whole.all() else is_whole
        self.hold(starts[held], stops[held])
        return self._rows.rows_from(starts, stops, length)

    def spots(self, starts: Indices, stops: Indices) -> list[int]:
        """Return where in `memory` each run of tokens begins. Raises DataError for damaged ones."""
        self.hold(starts, stops)
        found: list[int] = starts.tolist()
        return found

    @property
    def mapped(self) -> Tokens:
        """The tokens of a local file; whoever reads them holds them first."""
        assert self._mapped is not None, "a file that is fetched is read run by run"
        return self._mapped

    @property
    def memory(self) -> memoryview:
        """The tokens of a local file; whoever reads them holds them first."""
        assert self._rows is not None, "a file that is fetched is read run by run"
        return self._rows.memory

    def expect(self, spans: Indices) -> None:
        """Say which tokens will be read next: [spans, 2], where each begins and ends."""
        self.file.expect(self._start + spans * self.dtype.itemsize)

    def _raw(self, start: int, stop: int) -> Tokens:
        size = self.dtype.itemsize
        return as_words(self.file.read(self._start + start * size, self._start + stop * size), self.dtype.str)

    def hold(self, starts: Sequence[int] | Indices, stops: Sequence[int] | Indices) -> None:
        """Raise DataError where the file has changed, or a block of these runs is not as it was written."""
        size = self.dtype.itemsize
        if self._watch is not None and len(starts):
            try:
                self._watch.hold()
            except DataError:  # which bytes were wanted is worked out for its words alone
                self._watch.hold(self._start + size * int(min(starts)), self._start + size * int(max(stops)))
                raise
        if self._checksums is None or not self._checksums.unseen:
            return
        if isinstance(starts, np.ndarray) and isinstance(stops, np.ndarray) and len(starts) >= MANY_RUNS:
            self._checksums.hold(starts * size, stops * size)
        else:
            self._checksums.hold([int(start) * size for start in starts], [int(stop) * size for stop in stops])

    @property
    def is_open(self) -> bool:
        """Whether a block of it was not held against its checksum yet."""
        return self._checksums is not None and self._checksums.unseen > 0


class TokenParts:
    """The tokens of several files in a row. `parts[a:b]` returns a slice of them, as an array would."""

    def __init__(self, parts: Sequence[TokenPart]) -> None:
        self._parts = [part for part in parts if part.tokens]
        self._begins = np.cumsum([0, *(part.tokens for part in self._parts)], dtype=np.int64)
        self._bounds: list[int] = self._begins.tolist()
        self.is_near = all(isinstance(part.file, LocalBytes) for part in self._parts)  # in local files
        self.dtype = max(
            (part.dtype for part in self._parts), key=lambda dtype: dtype.itemsize, default=np.dtype("<u2")
        )
        self._across: RowsAcross | None = None  # of files of several types rows are laid one by one
        if self.is_near and self._parts:
            with contextlib.suppress(ValueError):
                self._across = RowsAcross([part.mapped for part in self._parts])

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
        return self.runs([start], [max(start, stop)])[0]

    def runs(self, starts: Sequence[int], stops: Sequence[int]) -> list[Tokens]:
        """Return the tokens starts..stops of each run. Raises DataError for damaged ones."""
        if len(self._parts) == 1:
            return self._parts[0].runs(starts, stops)
        wanted: dict[int, tuple[list[int], list[int]]] = {}  # of each part: where runs of it begin and end
        for start, stop in zip(starts, stops, strict=True):
            for number, first, last in self._spans(start, stop):
                firsts, lasts = wanted.setdefault(number, ([], []))
                firsts.append(first)
                lasts.append(last)
        read = {number: iter(self._parts[number].runs(*runs)) for number, runs in wanted.items()}
        found = []
        for start, stop in zip(starts, stops, strict=True):
            pieces = [next(read[number]) for number, _, _ in self._spans(start, stop)]
            empty = pieces or [np.zeros(0, dtype=self.dtype)]
            found.append(empty[0] if len(empty) == 1 else np.concatenate(empty))
        return found

    def windows(self, starts: Indices, length: int) -> Tokens:
        """Return the `length` tokens from each start on: [starts, length]. Raises DataError for damaged ones."""
        if not self.is_near:
            runs = self.runs(starts.tolist(), (starts + length).tolist())
            return np.concatenate(runs).reshape(-1, length) if runs else np.zeros((0, length), dtype=self.dtype)
        found, is_whole = self.rows_from(starts, starts + length, length)
        if not is_whole.all():
            over = np.flatnonzero(~is_whole)
            runs = self.runs(starts[over].tolist(), (starts[over] + length).tolist())
            for row, run in zip(over.tolist(), runs, strict=True):
                found[row] = run
        return found

    def rows_from(self, starts: Indices, stops: Indices, length: int) -> tuple[Tokens, Flags]:
        """Return `length` tokens from each start on, [starts, length], and of which rows they are there.

        The others would go on in another file, or have another type. Raises DataError where what lies up to `stops` is
        damaged.
        """
        if len(self._parts) == 1:
            return self._parts[0].rows_from(starts, stops, length)
        numbers = np.searchsorted(self._begins, starts, side="right") - 1
        is_whole: Flags = starts + length <= self._begins[numbers + 1]
        if self._across is None:
            return np.empty((len(starts), length), dtype=self.dtype), np.zeros(len(starts), dtype=bool)
        whole = slice(None) if is_whole.all() else np.flatnonzero(is_whole)
        self._hold(numbers[whole], starts[whole], stops[whole])
        rows = self._across.rows(numbers[whole], starts[whole] - self._begins[numbers[whole]], length)
        if len(rows) == len(starts):
            return rows, is_whole
        found = np.empty((len(starts), length), dtype=self.dtype)
        found[whole] = rows
        return found, is_whole

    def _gather(self, places: Indices) -> Tokens:
        found = np.empty(len(places), dtype=self.dtype)
        numbers = np.searchsorted(self._begins, places, side="right") - 1
        for number in np.unique(numbers).tolist():
            chosen = np.flatnonzero(numbers == number)
            found[chosen] = self._parts[number].gather(places[chosen] - self._begins[number])
        return found

    def spots(self, starts: Indices, stops: Indices) -> list[int]:
        """Return where in `memory` each run of tokens begins, -1 of one that goes on in another file.

        Raises DataError for damaged ones.
        """
        if len(self._parts) == 1:
            return self._parts[0].spots(starts, stops)
        if self._across is None:
            return [-1] * len(starts)
        numbers = np.searchsorted(self._begins, starts, side="right") - 1
        self._hold(numbers, starts, stops)
        spots = self._across.spots(numbers, starts - self._begins[numbers])
        found: list[int] = np.where(stops <= self._begins[numbers + 1], spots, -1).tolist()
        return found

    @property
    def memory(self) -> memoryview:
        """What `spots` count in; whoever reads there has asked for them first."""
        if len(self._parts) == 1:
            return self._parts[0].memory
        return memoryview(b"") if self._across is None else self._across.memory

    def _hold(self, numbers: Indices, starts: Indices, stops: Indices) -> None:
        """Hold what runs read of the files in which they begin. Raises DataError for damaged ones."""
        last = np.full(len(self._parts), -1)  # run of each file
        last[numbers] = starts
        for number in np.flatnonzero(last >= 0).tolist():
            part, begin, start = self._parts[number], self._bounds[number], last.item(number)
            if part.is_open:
                chosen = np.flatnonzero(numbers == number)
                inside = np.minimum(stops[chosen], self._bounds[number + 1])
                part.hold(starts[chosen] - begin, inside - begin)
            else:
                part.hold((start - begin,), (start - begin + 1,))

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
        begins = self._bounds
        number, spans = bisect_right(begins, start) - 1, []
        while start < stop:
            begin, end = begins[number], begins[number + 1]
            last = min(stop, end)
            spans.append((number, start - begin, last - begin))
            start, number = last, number + 1
        return spans
