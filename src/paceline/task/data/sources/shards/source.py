"""ShardSource: windows of tokens that lie in several files, local or remote."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.sources.tokens import Split
from paceline.task.data.storage.notices import Notices

NO_LABEL = -100
STEPS_AHEAD = 8  # whose samples are fetched before they are wanted, where they are remote


class ShardSource(TokenSource):
    """A TokenSource over token shards and their like. `notices` tells of reads that were tried again.

    With `skip_bad` a sample that touches damaged bytes keeps its place and counts nothing: its tokens are 0 and its
    labels -100. Whether it does depends on the files alone, so all layouts and all resumes leave out the same samples.
    """

    def __init__(
        self,
        split: Split,
        vocab: int,
        seq_len: int,
        cross_documents: bool = True,
        skip_bad: bool = False,
        notices: Notices | None = None,
    ) -> None:
        """Open the split. Raises DataError where it does not make one sample, or a file of it is not there."""
        self.skip_bad, self.notices = skip_bad, notices or Notices()
        super().__init__(split, vocab, seq_len, cross_documents)

    def expect(self, ids: npt.NDArray[Any]) -> None:
        """Say which samples will be read next, in their order: remote ones are fetched meanwhile."""
        self._tokens.expect(self._starts(ids), self.items_per_sample + 1)

    def _open(self) -> None:
        self._tokens = self.split.open()
        self.is_near = self._tokens.is_near
        self.steps_ahead = 0 if self.is_near else STEPS_AHEAD

    def _rows(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        rows = self._tokens.windows(self._starts(ids), self.items_per_sample + 1)
        if not self._tokens.is_checked and rows.size and int(rows.max()) >= (self.vocab or 0):
            raise DataError(
                f"token {int(rows.max()):,} is in the {self.split.name} data, and the vocabulary ends before it",
                f"the vocabulary is said to have {self.vocab:,} tokens, and the files have no checksums",
                "name the tokenizer that wrote them, or its vocabulary",
            )
        return rows

    def _starts(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        if ids.size and ids.max() >= self.samples:
            raise IndexError(f"sample {ids.max():,} of {self.samples:,}")
        return np.asarray(ids, dtype=np.int64) * self.items_per_sample

    def read(self, ids: npt.NDArray[Any], positions: npt.NDArray[Any] | None = None) -> Any:
        """Return the batch of a TokenSource; damaged samples count nothing where they may be skipped."""
        if not self.skip_bad:
            return super().read(ids, positions)
        assert ids.size == 0 or ids.min() >= 0, "a sample id is negative"
        rows, wrong = self._tokens.sound_windows(self._starts(ids), self.items_per_sample + 1)
        batch = self._batch(ids, rows)
        for row, error in wrong.items():
            batch["labels"][row] = NO_LABEL
            self.notices.tell("a sample was left out", f"{error.what}: {error.because}")
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        settings = (self.split, self.vocab, self.items_per_sample, self.cross_documents, self.skip_bad, self.notices)
        return ShardSource, settings
