"""Where the tensors of a shard lie in its file, so that their bytes are read straight into place.

A file that is mapped gives its pages one fault after the other, which takes four times as long as to read it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import StorageError

MOST_HEADER_BYTES = 10**8  # the format's own limit


@dataclass(frozen=True)
class PlaceInFile:
    """A tensor in a shard: the format's name of its dtype, its shape, and where its bytes begin and end in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def rows(self, offsets: Sequence[int], lengths: Sequence[int]) -> tuple[int, int] | None:
        """Return where the bytes of a part begin and end; None where they do not lie in one piece.

        The part begins at `offsets` of the tensor and has the shape `lengths`.
        """
        if tuple(lengths[1:]) != self.shape[1:]:
            return None
        if not self.shape:
            return self.begin, self.end
        row = (self.end - self.begin) // self.shape[0] if self.shape[0] else 0
        return self.begin + offsets[0] * row, self.begin + (offsets[0] + lengths[0]) * row


def places_in(file: IO[bytes]) -> Mapping[str, PlaceInFile]:
    """Return where the tensors of an open shard lie, by key; of a file that is no such shard nothing.

    Nothing is trusted: places lie in the file, and are as long as their shapes.
    """
    length = os.fstat(file.fileno()).st_size
    try:
        begin = 8 + int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
        if not 8 <= begin <= min(length, MOST_HEADER_BYTES):
            return {}
        header = json.loads(os.pread(file.fileno(), begin - 8, 8))
        return {key: _place(each, begin, length) for key, each in header.items() if key != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _place(told: Mapping[str, object], begin: int, length: int) -> PlaceInFile:
    """Return what a line of a header tells of. Raises ValueError, and others, where that cannot be."""
    name, shape, places = told["dtype"], told["shape"], told["data_offsets"]
    if not isinstance(name, str) or not isinstance(shape, list) or not isinstance(places, list):
        raise TypeError("no line of a header")
    first, last = map(int, places)
    sizes = tuple(map(int, shape))
    whole = math.prod(sizes)
    if min(sizes, default=0) < 0 or not 0 <= first <= last <= length - begin or (last - first) % max(1, whole):
        raise ValueError("its places are not those of its shape")
    return PlaceInFile(name, sizes, begin + first, begin + last)


class OpenShards:
    """The shards of a folder that are open, and where tensors lie in them; used in a `with`, which closes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, tuple[IO[bytes], Mapping[str, PlaceInFile]]] = {}

    def find(self, name: str, key: str) -> tuple[int, PlaceInFile] | None:
        """Return a file's descriptor and where a tensor lies in it; None where that is not told.

        Raises StorageError where the file cannot be read.
        """
        if name not in self._open:
            try:
                opened = (self._path / name).open("rb", buffering=0)
                self._open[name] = opened, places_in(opened)
            except OSError as error:
                raise StorageError(
                    f"cannot read {self._path / name}", str(error), "use an earlier checkpoint"
                ) from error
        file, places = self._open[name]
        return (file.fileno(), places[key]) if key in places else None

    def __enter__(self) -> OpenShards:
        return self

    def __exit__(self, *raised: object) -> None:
        while self._open:
            self._open.popitem()[1][0].close()
