"""Documents that a folder of shards holds already: with `--dedup`, none of them is added to it again.

They are known by their tokens, which every shard holds: the same tokenizer makes the same tokens of the same text.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.durable import publish
from paceline.task.data.sources.shards.folder import ShardIndex, splits_of
from paceline.task.data.sources.tokenizer import Tokens
from paceline.task.data.storage.bytes import Storage

NAME = "earlier.npy"
Hashes = npt.NDArray[np.uint64]


def write_earlier(work: Path, folder: Path, index: ShardIndex, storage: Storage) -> None:
    """Write the hashes of all documents of a folder's shards, sorted: uint64 [documents, 2]. Raises DataError."""
    if (work / NAME).exists():
        return
    found = []
    for split in splits_of(str(folder), index, storage).values():
        tokens = split.open()
        found += [_hash(tokens[start : stop - 1]) for start, stop in pairwise(split.offsets().tolist())]
    hashes = np.frombuffer(b"".join(found), dtype="<u8").reshape(-1, 2)
    beside = work / f".{NAME}.part"
    with beside.open("wb") as stream:
        np.save(stream, hashes[np.lexsort((hashes[:, 1], hashes[:, 0]))])
    publish(beside, work / NAME)


class EarlierShards:
    """The documents that `write_earlier` has written down; none where it has not."""

    def __init__(self, work: Path) -> None:
        path = work / NAME
        hashes: Hashes = np.load(path, mmap_mode="r") if path.exists() else np.zeros((0, 2), dtype=np.uint64)
        self._firsts, self._seconds = np.ascontiguousarray(hashes[:, 0]), hashes[:, 1]

    def have(self, ids: Tokens) -> bool:
        """Return whether a document of these tokens, its end left out, is among them."""
        if not len(self._firsts):
            return False
        first, second = np.frombuffer(_hash(ids), dtype="<u8")
        at, stop = (int(np.searchsorted(self._firsts, first, side)) for side in ("left", "right"))
        return bool((self._seconds[at:stop] == second).any())


def _hash(ids: Tokens) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype="<u4").data, digest_size=16).digest()
