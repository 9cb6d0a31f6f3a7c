"""Files of bytes that are read at any place: local ones mapped into memory, remote ones by way of the block cache."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import DamagedData, DataError
from paceline.task.data.storage.blocks import BlockCache, Bytes
from paceline.task.data.storage.fetch_ahead import FetchesAhead
from paceline.task.data.storage.notices import DataNotices
from paceline.task.data.storage.remote import RemoteFile, RemoteFiles, is_remote
from paceline.task.data.storage.watch import RESTART, State, WatchedFile

PIECE_BYTES = 128 * 2**10  # what is kept or goes: small against the neighbours that an order of blocks reads together
ROW_PIECES = 32  # what one request asks for at most, 4 MiB: large against a request's latency, small against a shard


class ByteFile(Protocol):
    """A file that is read at any place."""

    name: str
    size: int

    def read(self, start: int, stop: int) -> Bytes:
        """Return the bytes start..stop. Raises DamagedData past the end, DataError for a storage that fails."""
        ...

    def forget(self, start: int, stop: int) -> bool:
        """Drop what is kept of these bytes, so that they are read anew; return whether anything was kept."""
        ...

    def expect(self, spans: npt.NDArray[np.int64]) -> None:
        """Begin to read what will be asked for, where that takes long: [spans, 2], where each begins and ends."""
        ...


class LocalBytes:
    """A local file, mapped: nothing is read until it is used."""

    def __init__(self, path: str, state: State | None = None) -> None:
        """Map a file, which is in `state` where that is given.

        Raises DataError where it is not there, cannot be read, or is in another state.
        """
        self.name = path
        try:
            self.watch = WatchedFile(path, state)
            self.size = self.watch.size
            self.watch.hold()
            empty = np.zeros(0, dtype=np.uint8)  # an empty file cannot be mapped
            whole = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray) if self.size else empty
            self.mapped: Bytes = whole
            self.watch.hold()  # that it is the watched file which was mapped
        except ValueError as error:  # of numpy: the file is shorter by now
            raise cut_short(path, Path(path).stat().st_size, self.size) from error
        except FileNotFoundError as error:
            raise DataError(
                f"'{path}' is not there", "no such file", "check the path, or copy the data again"
            ) from error
        except OSError as error:
            raise DataError(
                f"'{path}' cannot be read", error.strerror or str(error), "check its permissions"
            ) from error

    def read(self, start: int, stop: int) -> Bytes:
        """Return the bytes start..stop, mapped: who uses them later holds the watch again.

        Raises DamagedData past the end, DataError where the file has changed since it was opened.
        """
        if stop > self.size:
            raise cut_short(self.name, self.size, stop)
        self.watch.hold(start, stop)
        return self.mapped[start:stop]

    def forget(self, start: int, stop: int) -> bool:
        """Keep nothing: the system does."""
        return False

    def expect(self, spans: npt.NDArray[np.int64]) -> None:
        """Begin nothing."""

    def __reduce__(self) -> tuple[object, ...]:
        return LocalBytes, (self.name, self.watch.state)


class CachedBytes:
    """A remote file: its pieces are fetched as they are wanted, or before, and stay in the block cache."""

    def __init__(
        self,
        files: RemoteFiles,
        file: RemoteFile,
        cache: BlockCache,
        ahead: FetchesAhead | None = None,
        piece_bytes: int = PIECE_BYTES,
        head_bytes: int = 0,
        is_checked: bool = False,
    ) -> None:
        """Cut the file into pieces; the first `head_bytes` are one of their own, and pieces count from their end.

        Of a file that has no checksums of its own each request is followed by a look at whether it is still the one
        that was opened: pieces of two versions would be one file.
        """
        self.name, self.size, self.version = file.url, file.size, file.version
        self._files, self._file, self._cache, self._piece_bytes = files, file, cache, piece_bytes
        self._ahead, self._is_checked = ahead or FetchesAhead(), is_checked
        self._head_bytes, self._shift = head_bytes, -head_bytes % piece_bytes
        self._stretches: dict[int, str] = {}  # keys that were asked for

    def read(self, start: int, stop: int) -> Bytes:
        """Return the bytes start..stop."""
        if stop > self.size:
            raise cut_short(self.name, self.size, stop)
        if stop <= start:
            return np.zeros(0, dtype=np.uint8)
        pieces: list[Bytes] = []
        for row in _rows(self._numbers(start, stop)):
            self._ahead.wait([self._key(number) for number in row])
            pieces += self._get(row)
        numbers = self._numbers(start, stop)
        pieces[-1] = pieces[-1][: stop - self._begin(numbers[-1])]
        pieces[0] = pieces[0][start - self._begin(numbers[0]) :]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def forget(self, start: int, stop: int) -> bool:
        """Drop the pieces that hold these bytes."""
        for number in self._numbers(start, stop):
            self._cache.forget(self._key(number))
        return True

    def expect(self, spans: npt.NDArray[np.int64]) -> None:
        """Begin to fetch the pieces of these bytes, the first ones of them first, and their neighbours with them."""
        spans = spans[spans[:, 1] > spans[:, 0]]
        first, last = self._number(spans[:, 0]), self._number(spans[:, 1] - 1)
        widest = int((last - first).max(initial=-1)) + 1
        numbers = np.minimum(first[:, None] + np.arange(widest), last[:, None]).reshape(-1)
        rows: dict[int, list[int]] = {}
        for number in dict.fromkeys(numbers.tolist()):
            if not self._ahead.is_coming(key := self._key(number)) and not self._cache.has(key):
                rows.setdefault(number // ROW_PIECES, []).append(number)
        for together in rows.values():
            for row in _rows(sorted(together)):
                if not self._ahead.begin([self._key(number) for number in row], partial(self._get, row)):
                    return

    def _get(self, row: Sequence[int]) -> list[Bytes]:
        """Return pieces that lie in a row, from the cache or by one request for each run that it lacks."""

        def fetch(first: int, stop: int) -> list[bytes]:
            begins = [self._begin(number) for number in (*row[first:stop], row[stop - 1] + 1)]
            content = self._files.read(self._file.url, begins[0], min(self.size, begins[-1]))
            if not self._is_checked:
                self._hold(begins[0], begins[-1])
            return [content[at - begins[0] : to - begins[0]] for at, to in itertools.pairwise(begins)]

        return self._cache.get_row([self._key(number) for number in row], fetch)

    def _hold(self, start: int, stop: int) -> None:
        """Raise DataError where the storage has another file of that name by now."""
        now = self._files.file(self._file.url, is_new=True)
        if (now.size, now.version) != (self.size, self.version):
            because = "its size, its time or its tag is another one than when it was opened"
            if now.size != self.size:
                because = f"it had {self.size:,} bytes when it was opened, and has {now.size:,}"
            wanted = f"its bytes {start:,} to {min(stop, self.size):,} were to be read"
            raise DataError(f"'{self.name}' changed while it was read", f"{because}; {wanted}", RESTART)

    def _numbers(self, start: int, stop: int) -> range:
        return range(self._number(start), self._number(stop - 1) + 1)

    def _number(self, place: Any) -> Any:
        """Return the number of the piece that holds a byte, or those of an array of bytes."""
        return (place + self._shift) // self._piece_bytes

    def _begin(self, number: int) -> int:
        """Return where a piece begins."""
        return max(0, number * self._piece_bytes - self._shift)

    def _key(self, number: int) -> str:
        """Return a piece's key. Those of one stretch of the file begin alike: they are in one folder of the cache."""
        stretch, place = divmod(number, ROW_PIECES)
        if (known := self._stretches.get(stretch)) is None:
            what = f"{self.name} {self.size} {self.version} {self._piece_bytes} {self._head_bytes} {stretch}"
            known = self._stretches[stretch] = hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
        return f"{known}{place:02x}"

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (self._file, self._cache, self._ahead, self._piece_bytes, self._head_bytes, self._is_checked)


def _rows(numbers: Sequence[int]) -> list[list[int]]:
    """Return ascending numbers of pieces in runs of one stretch each."""
    rows: list[list[int]] = []
    for number in numbers:
        if rows and rows[-1][-1] == number - 1 and number % ROW_PIECES:
            rows[-1].append(number)
        else:
            rows.append([number])
    return rows


def _again(
    file: RemoteFile, cache: BlockCache, ahead: FetchesAhead, piece_bytes: int, head_bytes: int, is_checked: bool
) -> CachedBytes:
    files = RemoteFiles(file.url, cache.notices)
    return CachedBytes(files, file, cache, ahead, piece_bytes, head_bytes, is_checked)


@dataclass(frozen=True)
class Storage:
    """How files of bytes are opened: where pieces of remote ones are kept, how much of them, and who is told."""

    cache_dir: Path
    cache_bytes: int
    notices: DataNotices = field(default_factory=DataNotices)
    ahead: FetchesAhead = field(default_factory=FetchesAhead)

    @cached_property
    def cache(self) -> BlockCache:
        """The pieces of all remote files: one for all of them, so that its limit is that of all together."""
        return BlockCache(self.cache_dir / "blocks", self.cache_bytes, self.notices)

    def open(self, path: str, state: State | None = None, head_bytes: int = 0, is_checked: bool = False) -> ByteFile:
        """Return a file, of a path or a URL; a local one is in `state` where that is given.

        `is_checked` says that its bytes are held against checksums by whoever reads them.

        The pieces of a remote one count from the end of its first `head_bytes`: where its samples begin.

        Raises DataError where it is not there.
        """
        if not is_remote(path):
            return LocalBytes(path, state)
        files = RemoteFiles(path, self.notices)
        file = files.file(is_new=not is_checked)
        return CachedBytes(files, file, self.cache, self.ahead, head_bytes=head_bytes, is_checked=is_checked)

    def state(self, path: str) -> State:
        """Return the state of a local file. Raises DataError where it is not there."""
        return LocalBytes(path).watch.state

    def read_all(self, path: str) -> bytes:
        """Return a small file whole, as it is now. Raises DataError."""
        if is_remote(path):
            return RemoteFiles(path, self.notices).read_all(path)
        file = LocalBytes(path)
        return file.read(0, file.size).tobytes()

    def exists(self, path: str) -> bool:
        """Return whether there is a file of that path or URL. Raises DataError where the storage does not say."""
        return RemoteFiles(path, self.notices).exists(path) if is_remote(path) else Path(path).is_file()


def beside(path: str, name: str) -> str:
    """Return the path of a name in a folder, which may be a URL."""
    return f"{path.rstrip('/')}/{name}"


def named_inside(path: str, name: str) -> str:
    """Return the path of a file that an index of a folder names. Raises DataError where the name leads out of there.

    An index comes with its data, so a name may be anybody's. Links are the doing of whoever has the folder.
    """
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\0" in name:
        raise DataError(
            f"an index of {path} names a file outside of the folder: '{name}'",
            "a file of an index lies beside it or below", "data from a source that you trust",
        )  # fmt: skip
    return beside(path, name)


def cut_short(name: str, size: int, wanted: int) -> DamagedData:
    """Return the error of a file that ends too early."""
    return DamagedData(
        f"{name} is cut short", f"it has {size:,} bytes, and {wanted:,} belong to it", "copy or prepare it again"
    )


def as_words(content: Bytes, dtype: str) -> npt.NDArray[Any]:
    """Return bytes as numbers of a type, without a copy where they lie well."""
    if content.ctypes.data % np.dtype(dtype).alignment:
        content = content.copy()
    return content.view(dtype)
