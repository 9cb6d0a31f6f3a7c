"""Who knows the files of a save: the first rank of a list knows its ranks' files, and rank 0 a digest of every list.

Of up to INLINE_RANKS ranks the manifest itself is the only list. In larger worlds a list is of at most MOST_IN_A_LIST
ranks, and lists of at most as many lists stand above them, until few are left: of 16,384 ranks 512 lists of 32 ranks
each, and above them 16 of 32 lists each. The ranks of a list tell the first of them about their files along a tree,
that rank writes the list, and the first ranks of lists tell the first of them about their lists in the same way, up to
rank 0. So nobody hears of more than 32 ranks (5 kB), and of 32 lists (2 kB) of each level.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline.checkpoint.files.digests import KINDS
from paceline.checkpoint.files.flushes import Flushes
from paceline.checkpoint.files.read_back import verify_files
from paceline.checkpoint.manifest import (
    VERSION,
    FileEntry,
    encode_list,
    files_of,
    list_counts,
    list_name,
    lists_in_a_list,
    ranks_in_a_list,
    version_of,
)
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.shards import write_file
from paceline.checkpoint.writers.talk import Message, Talk

FILE_ROW = struct.Struct("<qqB32s")  # of a file: its length, that of its pieces, the kind of theirs, and its digest
LIST_ROW = struct.Struct("<qqB32s")  # of a list: its length, that of its files, the version they take, its digest


@dataclass
class KnownFiles:
    """The files of a save as a rank knows them: `own` are those of the lists that it keeps; the rest is rank 0's.

    `lists` are those that the manifest has, `bytes` is the length of all files below them.
    """

    own: dict[str, FileEntry] = field(default_factory=dict)
    lists: dict[str, FileEntry] = field(default_factory=dict)
    bytes: int = 0
    version: int = VERSION  # that these take

    @property
    def of_manifest(self) -> dict[str, FileEntry]:
        """Return the files that the manifest itself lists."""
        return self.lists or self.own


def tell_of_files(files: Mapping[str, FileEntry], ranks: Ranks, what: str, folder: Path) -> KnownFiles:
    """Tell what this rank has written into `folder`, write the list that it keeps, and return what it knows then.

    Every rank of a save calls it. Raises the same StorageError on all ranks where a list cannot be written.
    """
    row = b"".join(_row(files.get(name)) for name in files_of(ranks.rank, ranks.size))
    of_a_list = ranks_in_a_list(ranks.size)
    if not of_a_list:
        return KnownFiles(_entries(ranks.rows(row), 0, ranks.size))
    number, place = divmod(ranks.rank, of_a_list)
    first = number * of_a_list
    rows = ranks.hold_talk(bring(row, place, min(of_a_list, ranks.size - first), first))
    known = KnownFiles({} if place else _entries(rows, first, ranks.size))
    told = ranks.attempt(what, partial(_write_list, folder, list_name(number), known.own) if not place else bytes)
    of_lists, apart = lists_in_a_list(ranks.size), of_a_list  # ranks between two that keep lists of a level
    counts = list_counts(ranks.size, of_a_list, of_lists)
    for level, count in enumerate(counts[:-1], 1):
        below = _brought(told, ranks, level - 1, count, apart, of_lists)
        apart *= of_lists
        known.own |= below.lists
        keeps = ranks.rank % apart == 0
        write = partial(_write_list, folder, list_name(ranks.rank // apart, level), below.lists, below)
        told = ranks.attempt(what, write if keeps else bytes)
    top = _brought(told, ranks, len(counts) - 1, counts[-1], apart, counts[-1])
    known.lists, known.bytes, known.version = top.lists, top.bytes, top.version
    return known


def _brought(told: bytes, ranks: Ranks, level: int, count: int, apart: int, of_lists: int) -> KnownFiles:
    """Return what the first of so many ranks that keep `count` lists of a level hears of these; other ranks nothing.

    They are `apart` ranks from each other, and each of them has `told` as a row of its list.
    """
    known = KnownFiles()
    number, is_other = divmod(ranks.rank, apart)
    if is_other:
        return known
    place = number % of_lists
    first = number - place
    rows = ranks.hold_talk(bring(told, place, min(of_lists, count - first), first * apart, apart))
    for each, row in enumerate(rows if not place else (), number):
        length, held, version, digest = LIST_ROW.unpack(row)
        known.lists[list_name(each, level)] = FileEntry(length, digest.hex())
        known.bytes += held
        known.version = max(known.version, version)
    return known


def bring(row: bytes, place: int, size: int, first: int, stride: int = 1) -> Talk[list[bytes]]:
    """Talk until the first of `size` ranks has the rows of all ranks in order; other ranks have some rows by then.

    They are the ranks `first`, `first + stride` and so on, of which this one is at `place`; rows are of one length. In
    round k a rank whose place is an odd multiple of 2^k sends what it has 2^k places down: of 5 ranks in the rounds 0,
    1 and 2 the places 1 and 3, then 2 (with 3's), then 4.
    """
    rows = row
    for at in range((size - 1).bit_length()):
        if place % 2 ** (at + 1):
            yield Message(first + stride * (place - 2**at), None, rows)
            break
        if place + 2**at < size:
            rows += yield Message(None, first + stride * (place + 2**at), b"")
    return [rows[begin : begin + len(row)] for begin in range(0, len(rows), len(row))]


def _row(entry: FileEntry | None) -> bytes:
    """Return a file as 49 bytes that travel: zeros for one that is not there."""
    if entry is None:
        return bytes(FILE_ROW.size)
    kind = KINDS.index(entry.piece_digest)
    return FILE_ROW.pack(entry.bytes, entry.piece_bytes, kind, bytes.fromhex(entry.sha256))


def _entries(rows: Sequence[bytes], first: int, world_size: int) -> dict[str, FileEntry]:
    """Return the files that ranks from `first` on have told of."""
    found = {}
    for rank, row in enumerate(rows, first):
        for name, told in zip(files_of(rank, world_size), FILE_ROW.iter_unpack(row), strict=True):
            length, piece_bytes, kind, digest = told
            if length:
                found[name] = FileEntry(length, digest.hex(), piece_bytes, KINDS[kind])
    return found


def _write_list(folder: Path, name: str, files: Mapping[str, FileEntry], below: KnownFiles | None = None) -> bytes:
    """Write a list of files, with what is `below` them, read it back, and return it as a row that travels."""
    with Flushes() as flushes:
        entry = write_file(folder / name, encode_list(files), flushes)
    verify_files(folder, {name: entry})
    held, version = sum(file.bytes for file in files.values()), version_of(files.values())
    if below is not None:
        held, version = held + below.bytes, max(version, below.version)
    return LIST_ROW.pack(entry.bytes, held, version, bytes.fromhex(entry.sha256))
