"""What sources over the tokens of a split have in common, however a source cuts samples out of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.task.data.sources.tokens import Split, TokenSplit
from paceline.task.data.storage.paging import ScatteredRows


class SourceOfSplit:
    """Samples of at most `seq_len` tokens of a split. Without `cross_documents` no token sees another document's."""

    unit = "tokens"
    reads_in_threads = True  # of a mapped file, and of nothing that changes
    is_near = True  # reading it costs no request over a network
    gathers_rows = True  # of near memory: those of several steps at once (task/data/protocol.py)
    is_checked = True  # its tokens are of the vocabulary: they were written here, or have checksums
    skip_bad = False  # whether damaged samples are left out
    _tokens: Any  # an array over a mapped file, or what reads several
    _scattered: ScatteredRows | None = None

    def __init__(self, split: Split, vocab: int, seq_len: int, cross_documents: bool = True) -> None:
        self.split, self.items_per_sample = split, seq_len
        self.vocab: int | None = vocab
        self.cross_documents = cross_documents

    def reads_scattered(self) -> None:
        """Read from now on at scattered places, as the orders of a training but for those of neighbours do."""
        self._scattered = ScatteredRows.of(self._tokens)

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return {"tokens", "labels"}: int64 tensors [rows, seq_len]; and "documents", int32, where they do not mix.

        Positions do not matter.
        """
        return self.batch(self.gather(ids), 0, len(ids))

    def gather(self, ids: npt.NDArray[np.int64]) -> Any:
        """Return the rows of these samples as they lie. Raises DataError where one cannot be read."""
        raise NotImplementedError

    def batch(self, gathered: Any, first: int, last: int) -> Any:
        """Return the batch of the gathered rows first..last, as `read` does."""
        raise NotImplementedError

    def joined(self, parts: Sequence[Any], places: Sequence[npt.NDArray[np.int64]]) -> Any:
        """Return what several sources have gathered as if one source had, the rows of a part at the part's places."""
        raise NotImplementedError

    def _made_of(self) -> tuple[object, ...]:
        return self.split, self.vocab, self.items_per_sample, self.cross_documents

    def __reduce__(self) -> tuple[object, ...]:
        # A process that receives the source maps the files again; the tokens themselves do not travel.
        return type(self), self._made_of()


def rows_at(parts: Sequence[npt.NDArray[Any]], places: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[Any]:
    """Return rows of one length put together, each part's at its places: [rows, tokens], or [n, rows, tokens]."""
    dtype = max((part.dtype for part in parts), key=lambda each: each.itemsize)
    *more, _, tokens = parts[0].shape
    found = np.empty((*more, sum(map(len, places)), tokens), dtype=dtype)
    for part, place in zip(parts, places, strict=True):
        found[..., place, :] = part
    return found


def tokens_and_labels(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of rows with the token after them, [rows, tokens + 1], as tokens and labels: [2, rows, tokens].

    Both are turned into int64 by one call. The rows lie in a run.
    """
    count, size = rows.shape
    across, along = rows.strides
    return np.ndarray((2, count, size - 1), rows.dtype, rows, 0, (along, across, along))


def watch_of(split: Split) -> Callable[[], None]:
    """Return what raises DataError where a split's mapped tokens are no longer as they were when they were opened.

    Token shards and their like hold their files themselves.
    """
    return split.watch().hold if isinstance(split, TokenSplit) else _nothing


def _nothing() -> None:
    """Hold nothing."""
