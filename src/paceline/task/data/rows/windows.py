"""TokenSource: windows of a tokenised corpus as samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.task.data.rows.of_split import SourceOfSplit, rows_at, tokens_and_labels, watch_of
from paceline.task.data.rows.packing import Ints
from paceline.task.data.rows.rows_from import RowsAcross
from paceline.task.data.sources.tokens import Split
from paceline.units import plural


class WindowsAsTheyLie(NamedTuple):
    """Windows as they lie in the files: tokens and labels, [2, rows, seq_len]."""

    both: npt.NDArray[Any]
    documents: npt.NDArray[np.int32] | None  # of each token, [rows, seq_len]; None where documents mix


class TokenSource(SourceOfSplit):
    """Sample i is the tokens [i * seq_len, (i + 1) * seq_len) of a split; its labels are the tokens after each of them.

    Each token of the split is thus a label once (the first and the last few excepted). Windows run across documents,
    which the end-of-document token separates. Without `cross_documents` a batch says which document each token is of:
    the end-of-document token then opens the document after it, so that its label, that document's first token, and all
    others are predicted from their own document alone.
    """

    def __init__(self, split: Split, vocab: int, seq_len: int, cross_documents: bool = True) -> None:
        """Map the split. Raises DataError where it does not make one sample."""
        super().__init__(split, vocab, seq_len, cross_documents)
        self.samples = split.windows(seq_len)
        if not self.samples:
            held = f"{plural(split.tokens, 'token')} in {plural(split.documents, 'document')}"
            raise DataError(
                f"the {split.name} data do not make a single sample",
                f"they are {held}; a sample needs {seq_len + 1:,}",
                f"seq_len = {max(1, split.tokens - 1):,} or less, more text, or a lower validation_fraction"
                if split.tokens > 1
                else "more text, or validation_fraction = 0",
            )
        self.fingerprint = hashlib.blake2b(f"{split.digest} {seq_len}".encode(), digest_size=16).hexdigest()
        # Where documents begin: at the end-of-document token before them.
        self._begins = None if cross_documents else split.offsets()[1:] - 1
        self._open()

    def _open(self) -> None:
        """Open the split for `_rows`."""
        self._watch = watch_of(self.split)
        tokens, seq_len = self.split.open(), self.items_per_sample
        self._tokens = tokens
        # One row per sample, each starting where the label of the last token of the one before lies.
        self._windows = np.lib.stride_tricks.as_strided(
            tokens,
            (self.samples, seq_len + 1),
            (seq_len * tokens.itemsize, tokens.itemsize),
            writeable=False,
        )

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """The tokens of the split, mapped."""
        found: npt.NDArray[Any] = self._tokens
        return found

    @property
    def is_paged(self) -> bool:
        """Whether rows are asked for before they are copied."""
        return self._scattered is not None

    def hold(self) -> None:
        """Raise DataError where the file of the tokens is no longer as it was when it was opened."""
        self._watch()

    def _rows(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return each sample's tokens and the label of the last of them: [rows, seq_len + 1]."""
        self._watch()
        if (scattered := self._scattered) is None:
            return self._windows[ids]
        size, starts = self._windows.itemsize, np.asarray(ids, dtype=np.int64) * self.items_per_sample
        if scattered.is_cold:
            scattered.expect(starts * size, (starts + self.items_per_sample + 1) * size)
        with scattered.copying(len(ids)):
            return self._windows[ids]

    def gather(self, ids: npt.NDArray[np.int64]) -> WindowsAsTheyLie:
        """Return the samples' rows."""
        assert ids.min(initial=0) >= 0, "a sample id is negative"
        both = tokens_and_labels(self._rows(ids))
        if self._begins is None:
            return WindowsAsTheyLie(both, None)
        return WindowsAsTheyLie(both, _documents(self._begins, ids.astype(np.int64), self.items_per_sample))

    def batch(self, gathered: WindowsAsTheyLie, first: int, last: int) -> Any:
        """Return {"tokens", "labels"}, and "documents" where they do not mix."""
        import torch

        both = gathered.both[:, first:last].astype(np.int64, order="C")
        batch = {"tokens": torch.from_numpy(both[0]), "labels": torch.from_numpy(both[1])}
        if gathered.documents is not None:
            batch["documents"] = torch.from_numpy(gathered.documents[first:last].copy())
        return batch

    def joined(self, parts: Sequence[WindowsAsTheyLie], places: Sequence[npt.NDArray[np.int64]]) -> WindowsAsTheyLie:
        """Return the rows of several sources as one, each part's at its places."""
        documents = [part.documents for part in parts if part.documents is not None]
        return WindowsAsTheyLie(
            rows_at([part.both for part in parts], places), rows_at(documents, places) if documents else None
        )


class WindowsAcross:
    """Windows of several corpora in near memory, gathered in any order by one call of numpy: no part of it is copied
    twice, as rows are that sources gather one by one and that are then put into their places."""

    def __init__(self, sources: Sequence[TokenSource]) -> None:
        """Raises ValueError where their tokens have different types."""
        self._sources, self._size = tuple(sources), sources[0].items_per_sample
        self._rows = RowsAcross([source.tokens for source in sources])

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._sources,)  # which map their files again; views of memory do not travel

    def gather(self, numbers: Ints, ids: Ints) -> WindowsAsTheyLie | None:
        """Return samples by the number of their source and the id there; None where a source pages its file by itself.

        Raises DataError where a file of the sources has changed.
        """
        for number in np.flatnonzero(np.bincount(numbers)).tolist():
            source = self._sources[number]
            if source.is_paged:
                return None
            source.hold()
        return WindowsAsTheyLie(tokens_and_labels(self._rows.rows(numbers, ids * self._size, self._size + 1)), None)


def windows_across(sources: Sequence[object]) -> WindowsAcross | None:
    """Return what gathers the windows of all of these sources at once; None where they are no windows, or say their
    documents, or have tokens of several types."""
    windows = [each for each in sources if type(each) is TokenSource and each.cross_documents]
    if len(windows) < max(2, len(sources)):
        return None
    try:
        return WindowsAcross(windows)
    except ValueError:
        return None


def _documents(begins: npt.NDArray[Any], ids: npt.NDArray[np.int64], seq_len: int) -> npt.NDArray[np.int32]:
    """Return the document of each token of windows: how many of `begins` lie at its place or before. [ids, seq_len].

    A run of tokens of one document at a time: to look up each token takes five times as long as to read it.
    """
    starts = ids * seq_len
    first = np.searchsorted(begins, starts, side="right")
    more = np.searchsorted(begins, starts + seq_len, side="left") - first  # documents that begin after the first token
    ends = np.cumsum(more + 1)
    inner = np.arange(ends[-1] if len(ends) else 0)
    number = np.repeat(first - (ends - more - 1), more + 1) + inner
    # Where each run begins, counted through all windows: with the window, or where its document does.
    at = np.repeat(np.arange(len(ids)) * seq_len, more + 1)
    is_inner = np.ones(len(number), dtype=bool)
    is_inner[ends - more - 1] = False
    at[is_inner] += begins[number[is_inner] - 1] - np.repeat(starts, more)
    runs = np.diff(at, append=len(ids) * seq_len)
    return np.repeat(number.astype(np.int32), runs).reshape(len(ids), seq_len)
