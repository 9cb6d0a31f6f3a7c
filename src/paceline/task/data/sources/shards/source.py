"""Samples of tokens that lie in several files, local or remote: windows of them, or packed documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DamagedData, DataError
from paceline.spec.data.labels import IGNORED
from paceline.task.data.rows.of_split import SourceOfSplit
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.sources.shards.tokens_in_files import TokenParts
from paceline.task.data.sources.tokens import Split
from paceline.task.data.storage.notices import DataNotices

STEPS_AHEAD = 8  # whose samples are fetched before they are wanted, where they are remote


class _OverFiles(SourceOfSplit):
    """What windows and packed documents have in common where their tokens lie in several files.

    `notices` tells of reads that were tried again. With `skip_bad` a sample that touches damaged bytes keeps its place
    and counts nothing. Whether it does depends on the files alone, so all layouts and all resumes leave out the same.
    """

    _tokens: TokenParts

    def __init__(
        self,
        split: Split,
        vocab: int,
        seq_len: int,
        cross_documents: bool = True,
        skip_bad: bool = False,
        notices: DataNotices | None = None,
    ) -> None:
        """Open the split. Raises DataError where it does not make one sample, or a file of it is not there."""
        self.skip_bad, self.notices = skip_bad, notices or DataNotices()
        self.damaged: dict[int, str] = {}  # samples that were left out as they were read, and why
        super().__init__(split, vocab, seq_len, cross_documents)
        self.is_near, self.is_checked = self._tokens.is_near, self._tokens.is_checked
        self.gathers_rows = self.is_near
        self.steps_ahead = 0 if self.is_near else STEPS_AHEAD

    def _made_of(self) -> tuple[Any, ...]:
        return *super()._made_of(), self.skip_bad, self.notices

    def _or_blank(self, read: Any, ids: npt.NDArray[np.int64]) -> Any:
        """Return `read(ids)`; where bytes are damaged and may be, the batch with their rows left blank.

        A storage that fails, and a token that the vocabulary lacks, are raised always.
        """
        try:
            return read(ids)
        except DamagedData as error:
            if not self.skip_bad:
                raise
            if len(ids) == 1:
                self.damaged[int(ids[0])] = f"{error.what}: {error.because}"
                return self._blank()
        import torch

        rows = [self._or_blank(read, ids[at : at + 1]) for at in range(len(ids))]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def batch(self, gathered: Any, first: int, last: int) -> Any:
        """Return the batch, whose tokens are of the vocabulary."""
        return self._held(super().batch(gathered, first, last))

    def _blank(self) -> dict[str, Any]:
        import torch

        tokens = torch.zeros(1, self.items_per_sample, dtype=torch.int64)
        blank = {"tokens": tokens, "labels": tokens + IGNORED}
        return blank if self.cross_documents else {**blank, "documents": tokens.to(torch.int32)}

    def _held(self, batch: Any) -> Any:
        """Return the batch, whose tokens are of the vocabulary. Files with checksums hold what was written to them."""
        if not self.is_checked and batch["tokens"].numel():
            highest = max(int(batch["tokens"].max()), int(batch["labels"].max()))
            if self._tokens.dtype.kind == "i" and (lowest := self._lowest(batch)) < 0:
                raise DataError(
                    f"token {lowest:,} is in the {self.split.name} data", "ids of tokens begin at 0",
                    "write the data again, without numbers that mask a loss",
                )  # fmt: skip
            if highest >= (self.vocab or 0):
                raise DataError(
                    f"token {highest:,} is in the {self.split.name} data, and the vocabulary ends before it",
                    f"the vocabulary is said to have {self.vocab:,} tokens, and the files have no checksums",
                    "name the tokenizer that wrote them, or its vocabulary",
                )
        return batch

    def _lowest(self, batch: Any) -> int:
        """Return the lowest token of a batch, and of its labels; what fills a packed row has none, and is not meant."""
        labels = batch["labels"]
        labels = labels[labels != IGNORED] if isinstance(self, PackedSource) else labels
        return int(min(batch["tokens"].min(), labels.min() if len(labels) else 0))


class ShardSource(_OverFiles, TokenSource):
    """A TokenSource over token shards and their like."""

    def expect(self, ids: npt.NDArray[np.int64]) -> None:
        """Say which samples will be read next, in their order: remote ones are fetched meanwhile."""
        starts = self._starts(ids)
        self._tokens.expect(starts, starts + self.items_per_sample + 1)

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return the batch of a TokenSource; damaged samples count nothing where they may be left out."""
        return self._or_blank(super().read, ids)

    def _open(self) -> None:
        self._tokens = self.split.open()

    def _rows(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return self._tokens.windows(self._starts(ids), self.items_per_sample + 1)

    def _starts(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if (highest := int(ids.max(initial=0))) >= self.samples:
            raise IndexError(f"sample {highest:,} of {self.samples:,}")
        return np.asarray(ids, dtype=np.int64) * self.items_per_sample


class PackedShards(_OverFiles, PackedSource):
    """A PackedSource over token shards and their like."""

    def expect(self, ids: npt.NDArray[np.int64]) -> None:
        """Say which samples will be read next, in their order: remote ones are fetched meanwhile."""
        for sample in np.asarray(ids).tolist():
            pieces = slice(int(self.rows.firsts[sample]), int(self.rows.firsts[sample + 1]))
            starts = self.rows.starts[pieces]
            self._tokens.expect(starts, starts + self.rows.lengths[pieces] + 1)

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return the batch of a PackedSource; damaged samples count nothing where they may be left out."""
        return self._or_blank(super().read, ids)
