"""Samples of tables: padded rows of labelled texts, and rows of conversations of which some tokens count."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.spec.data.labels import IGNORED
from paceline.task.data.rows.kept_rows import labels_that_count, rows_of_split
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.packing import Ints, PackedRows
from paceline.task.data.sources.tables.store import TextTable
from paceline.task.data.sources.tokenizer import FileTokenizer
from paceline.task.data.sources.tokens import Split, TokenSplit

PAD_MULTIPLE = 8  # rows are filled up to a multiple of it: GPUs like even lengths, and ranks of tp can share them


class TableSource:
    """What sources over the rows of one split of a table have in common. Sample i is row i."""

    reads_in_threads = True  # of mapped files, and of nothing that changes
    is_near = True
    skip_bad = False
    is_ragged = True  # rows are as long as the longest beside them
    multiple = PAD_MULTIPLE
    least = 0  # tokens of a row
    at_least = 1  # tokens that rows are filled up to
    behind = 0  # tokens that end a row, such as [SEP]: of a row that is cut they stay, and the text before them goes

    def __init__(self, table: TextTable, split: TokenSplit, seq_len: int) -> None:
        """Map the split. Raises DataError where it holds no row."""
        self.table, self.split, self.seq_len = table, split, seq_len
        self.vocab: int | None = table.corpus.vocab
        self.samples = split.documents
        if not self.samples:
            raise DataError(f"the {split.name} data hold no row", "all rows are in the other split", "more rows")
        self._watch, self._tokens = split.watch().hold, split.open()
        self._starts = split.offsets()[:-1].astype(np.int64)
        self._sizes = np.maximum(np.diff(split.offsets()).astype(np.int64) - self._beyond(), self.least)
        self.lengths = np.minimum(self._sizes, seq_len)
        self.longest = int(self.lengths.max())

    def _beyond(self) -> int:
        """Return how many of a row's tokens on disk are no input."""
        return 1

    @property
    def cut(self) -> int:
        """How many rows are longer than `seq_len` tokens, and lose the ends of their texts."""
        return int((self._sizes > self.seq_len).sum())

    def _filled(self, ids: npt.NDArray[np.int64]) -> tuple[Ints, npt.NDArray[np.bool_], Ints]:
        """Return the rows' tokens, filled up with the table's pad; which are real; and where each stands on disk."""
        assert ids.size == 0 or ids.min() >= 0, "a sample id is negative"
        self._watch()
        lengths = self.lengths[ids]
        width = int(lengths.max(initial=self.at_least))
        width = min(width + -width % self.multiple, self.seq_len)
        real = np.arange(width) < lengths[:, None]
        places = np.minimum(self._starts[ids][:, None] + np.arange(width), len(self._tokens) - 1)
        if self.behind:
            more = np.maximum(self._sizes[ids] - self.seq_len, 0)[:, None]
            places = places + np.where(np.arange(width) < self.seq_len - self.behind, 0, more)
        tokens = np.where(real, np.asarray(self._tokens[places]).astype(np.int64), self.table.pad)
        return tokens, real, places

    def tight(self) -> Self:
        """Return the same source, whose rows are filled up to the longest beside them and no further."""
        return self._but(multiple=1)

    def filled_to(self, tokens: int) -> Self:
        """Return the same source, whose rows are filled up as if one of so many tokens were beside them."""
        return self._but(at_least=tokens)

    def _but(self, **changes: int) -> Self:
        found = object.__new__(type(self))  # copy.copy would open it once more
        found.__dict__.update(self.__dict__, **changes)
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.table, self.split, self.seq_len)


class LabelledSource(TableSource):
    """Texts with labels: {"tokens" int64 [rows, longest], "attention_mask" of the same shape, "labels"}.

    Labels are int64 [rows] of classes, float32 [rows] of numbers, or float32 [rows, classes] of several at once.
    """

    unit = "samples"
    items_per_sample = 1
    least = 1  # a text of no token is its end

    def __init__(self, table: TextTable, split: TokenSplit, seq_len: int) -> None:
        super().__init__(table, split, seq_len)
        assert table.labels is not None, "a table of labels"
        self.labels, self.classes = table.label_array(split.name), table.labels.classes
        tokenizer = table.corpus.open_tokenizer() if self.cut and not table.keeps_end else None
        if isinstance(tokenizer, FileTokenizer):
            self.behind = min(tokenizer.behind(), seq_len - 1)
        made = f"{split.digest} {table.labels} {seq_len} {table.keeps_end} {table.pad}"
        made += f" {self.behind}" if self.behind else ""
        digest = hashlib.blake2b(made.encode() + self.labels.tobytes(), digest_size=16)
        self.fingerprint = digest.hexdigest()

    def _beyond(self) -> int:
        return 0 if self.table.keeps_end else 1

    def counted_by(self, classes: Sequence[str]) -> LabelledSource:
        """Return the same rows, whose labels count these classes: the rows' own are some of them."""
        places = np.array([classes.index(each) for each in self.classes])
        found = self._but()
        if self.labels.ndim == 1:
            labels = places[self.labels]
        else:
            labels = np.zeros((len(self.labels), len(classes)), dtype=self.labels.dtype)
            labels[:, places] = self.labels
        found.labels, found.classes = labels, tuple(classes)
        return found

    def __reduce__(self) -> tuple[object, ...]:
        made = LabelledSource(self.table, self.split, self.seq_len)
        return super().__reduce__() if made.classes == self.classes else (made.counted_by, (self.classes,))

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return the batch. Positions do not matter."""
        import torch

        tokens, real, _ = self._filled(ids)
        labels = np.asarray(self.labels[ids])
        labels = labels if labels.dtype == np.int64 else labels.astype(np.float32)
        return {"tokens": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(real.astype(np.int64)),
                "labels": torch.from_numpy(labels)}  # fmt: skip


class PaddedDialogue(TableSource):
    """Prompts and conversations, one in a row: {"tokens", "labels"} int64 [rows, longest]; labels that do not count are
    -100. Nothing has to be masked: causal attention never looks at what fills a row up."""

    unit = "tokens"
    unlearnt = 0  # rows left out: nothing of their first `seq_len` tokens counts

    def __init__(self, table: TextTable, split: TokenSplit, seq_len: int) -> None:
        super().__init__(table, split, seq_len)
        self.items_per_sample = seq_len
        self._counted = table.counted_array(split.name)
        learnt = labels_that_count(self._counted, self._starts, self.lengths) > 0
        self.unlearnt = int((~learnt).sum())
        if not learnt.any():
            raise DataError(
                f"no row of the {split.name} data has anything to learn within seq_len = {seq_len:,} tokens",
                "what counts comes after a longer prompt", f"seq_len = {int(self._sizes.max())}",
            )  # fmt: skip
        self._starts, self._sizes, self.lengths = self._starts[learnt], self._sizes[learnt], self.lengths[learnt]
        self.samples, self.longest = int(learnt.sum()), int(self.lengths.max())
        self.fingerprint = _counted_print(split, self._counted, f"padded {seq_len} {table.pad}")

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return the batch. Positions do not matter."""
        import torch

        tokens, real, places = self._filled(ids)
        after = np.minimum(places + 1, len(self._tokens) - 1)
        counts = real & (self._counted[after] > 0)
        labels = np.where(counts, np.asarray(self._tokens[after]).astype(np.int64), IGNORED)
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}


class PackedDialogue(PackedSource):
    """Prompts and conversations packed into rows as documents are; labels of what does not count are -100."""

    leaves_out = True

    def __init__(self, table: TextTable, split: TokenSplit, seq_len: int, cross_documents: bool = False) -> None:
        """Raises DataError where the split does not hold two tokens."""
        self.table, self._counted = table, table.counted_array(split.name)
        super().__init__(split, table.corpus.vocab, seq_len, cross_documents)
        self.fingerprint = _counted_print(split, self._counted, self.fingerprint)

    def _rows_of(self, split: Split, seq_len: int) -> PackedRows:
        return rows_of_split(split, seq_len, self._counted)

    @property
    def waste(self) -> float:
        """The part of all rows that no token fills."""
        return 1 - float(self.rows.lengths.sum()) / (self.samples * self.items_per_sample)

    @property
    def cut(self) -> int:
        """How many conversations are longer than a row, and go on in another."""
        return int((np.diff(self.split.offsets()) > self.items_per_sample).sum())

    def _made_of(self) -> tuple[object, ...]:
        return self.table, self.split, self.items_per_sample, self.cross_documents

    def _counted_labels(self, starts: Ints, lengths: Ints) -> npt.NDArray[Any]:
        ahead = np.cumsum(lengths) - lengths
        found: npt.NDArray[Any] = self._counted[np.repeat(starts + 1 - ahead, lengths) + np.arange(lengths.sum())] > 0
        return found


def _counted_print(split: TokenSplit, counted: npt.NDArray[np.uint8], made: str) -> str:
    return hashlib.blake2b(f"{split.digest} {made}".encode() + counted.tobytes(), digest_size=16).hexdigest()
