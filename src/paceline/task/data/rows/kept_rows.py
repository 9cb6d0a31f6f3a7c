"""Rows of packed documents beside the tokens that they are made of: packed once, and mapped at every later start.

    SPLIT.rows-SEQ_LEN-DIGEST   little-endian int64: FORMAT, rows, pieces; then firsts [rows + 1], starts and lengths

The name holds a part of the tokens' hash, so that rows of other tokens are never taken for these.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.durable import publish
from paceline.task.data.rows.packing import Ints, PackedRows, pack, pieces_of
from paceline.task.data.sources.tokens import Split, TokenSplit

FORMAT = 2  # raise it when the same documents would give other rows; 2: rows share the room of emptier ones
HEAD = 3


def rows_of_split(split: Split, seq_len: int, counted: npt.NDArray[np.uint8] | None = None) -> PackedRows:
    """Return the packed rows of a split: mapped where they are kept, else packed, and kept for the next time.

    Where `counted` says of each token whether it counts, pieces of which none does are left out. Documents of other
    files than the cache's, or of a folder that others own, are packed again at every start.
    """
    if not isinstance(split, TokenSplit):
        return pack(*_pieces(split, seq_len, counted), seq_len)
    suffix = "" if counted is None else "-counted"
    path = Path(split.folder) / f"{split.name}.rows-{seq_len}-{split.digest[:16]}{suffix}"
    kept = _read(path)
    if kept is not None:
        return kept
    rows = pack(*_pieces(split, seq_len, counted), seq_len)
    with contextlib.suppress(OSError):
        _write(path, rows)
    return rows


def labels_that_count(counted: npt.NDArray[np.uint8], starts: Ints, lengths: Ints) -> Ints:
    """Return how many labels of each piece count: of `lengths` tokens from `starts` on; a label is the token after."""
    bounds = np.stack([starts + 1, starts + 1 + lengths], axis=1).reshape(-1)
    return np.add.reduceat(np.append(counted, np.uint8(0)), bounds, dtype=np.int64)[::2] * (lengths > 0)


def _pieces(split: Split, seq_len: int, counted: npt.NDArray[np.uint8] | None) -> tuple[Ints, Ints]:
    starts, lengths = pieces_of(split.offsets(), seq_len)
    if counted is None or not len(starts):
        return starts, lengths
    learnt = labels_that_count(counted, starts, lengths) > 0
    return starts[learnt], lengths[learnt]


def _read(path: Path) -> PackedRows | None:
    """Return the rows that a file holds; None where there is none, or not a whole one."""
    try:
        size = path.stat().st_size
    except OSError:
        return None
    if size < HEAD * 8 or size % 8:
        return None
    words = np.memmap(path, dtype="<i8", mode="r", shape=(size // 8,)).view(np.ndarray)
    version, rows, pieces = words[:HEAD].tolist()
    if version != FORMAT or HEAD + rows + 1 + 2 * pieces != len(words):
        return None
    starts = HEAD + rows + 1
    return PackedRows(words[HEAD:starts], words[starts : starts + pieces], words[starts + pieces :])


def _write(path: Path, rows: PackedRows) -> None:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        head = np.array([FORMAT, len(rows.firsts) - 1, len(rows.starts)])
        with beside.open("wb") as stream:
            for part in (head, rows.firsts, rows.starts, rows.lengths):
                stream.write(part.astype("<i8").tobytes())
        publish(beside, path)
    finally:
        beside.unlink(missing_ok=True)
