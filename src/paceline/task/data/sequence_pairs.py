"""Pairs of a source text and a target text, from a table: what encoder-decoders such as T5 and BART learn from.

    source,target
    translate: two and two,vier

A batch has "source" with "source_mask" [rows, longest source], and "target", which the decoder reads, with "labels",
which it is to say [rows, longest target]. Rows are filled up to the longest beside them; padding counts nowhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import DataError
from paceline.spec.data.labels import IGNORED
from paceline.spec.import_paths import scheme_of
from paceline.spec.task import DataSpec
from paceline.task.data.languages import Around, Sides, sides_of
from paceline.task.data.listed_once import listed
from paceline.task.data.sources.documents import Damaged
from paceline.task.data.sources.tables.listing import list_table
from paceline.task.data.sources.tables.records import columns_of, read_records
from paceline.task.data.sources.tokenizer import FileTokenizer, load_tokenizer

COLUMNS = (("source", "target"), ("text", "summary"), ("document", "summary"), ("article", "highlights"),
           ("dialogue", "summary"), ("text", "target"), ("input", "output"), ("prompt", "completion"),
           ("question", "answer"))  # fmt: skip
AT_ONCE = 1024  # texts that are tokenised together
MULTIPLE = 8  # lengths are filled up to: GPUs like even ones, and CPUs make fewer kernels


class Texts:
    """Tokens of many texts, one after the other."""

    def __init__(self, lengths: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32]) -> None:
        """`tokens` are those of the first text, then those of the second, and so on."""
        self.lengths, self.tokens, self._ends = lengths, tokens, np.cumsum(lengths)

    @classmethod
    def of(cls, parts: Iterable[Sequence[int]]) -> Texts:
        """Return texts, each given as its tokens, as one array: a list of each would take ten times the memory."""
        arrays = [np.array(part, dtype=np.int32) for part in parts]
        return cls(np.array([len(each) for each in arrays], dtype=np.int64), np.concatenate(arrays))

    def between(self, first: int, end: int) -> Texts:
        """Return the texts first..end, whose tokens are these."""
        before, through = (int(self.lengths[:at].sum()) for at in (first, end))
        return Texts(self.lengths[first:end], self.tokens[before:through])

    def __getitem__(self, index: int) -> Tensor:
        """Return the tokens of a text, int64."""
        end = int(self._ends[index])
        return torch.from_numpy(self.tokens[end - int(self.lengths[index]) : end].astype(np.int64))


class SequencePairs:
    """A map-style data set of texts and what is to be written for them, as tokens."""

    fills_up = True  # to the longest of a batch

    def __init__(
        self, sources: Texts, targets: Texts, vocab: int, start: int, pad: int, lengths: tuple[int, int]
    ) -> None:
        """A decoder reads `start` first. `lengths` are the most that sources and targets are filled up to."""
        self.vocab, self._sources, self._targets = vocab, sources, targets
        self._start, self._pad, self._most = start, pad, lengths
        filled = [np.minimum(_filled(each.lengths), most) for each, most in
                  zip((sources, targets), lengths, strict=True)]  # fmt: skip
        self.lengths: npt.NDArray[np.int64] = filled[0] + filled[1]  # of both, which is what a sample costs
        made = hashlib.blake2b(f"{start} {pad} {lengths}".encode(), digest_size=16)
        for each in (sources, targets):
            made.update(each.lengths.tobytes() + each.tokens.tobytes())
        self.fingerprint = made.hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a source and of its target, which ends with the end."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._sources[index], self._targets[index]

    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Return a batch of samples, filled up to the longest of them."""
        start = torch.tensor([self._start])
        return {
            "source": self._together([source for source, _ in samples], 0, self._pad),
            "source_mask": self._together([torch.ones_like(source) for source, _ in samples], 0, 0),
            "target": self._together([torch.cat((start, target[:-1])) for _, target in samples], 1, self._pad),
            "labels": self._together([target for _, target in samples], 1, IGNORED),
        }

    def filled_alike(self, batches: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Return batches of several data sets of pairs, filled up to the longest of all of them."""
        padding = {"source": self._pad, "source_mask": 0, "target": self._pad, "labels": IGNORED}
        widths = {name: max(batch[name].shape[1] for batch in batches) for name in padding}
        return [{name: functional.pad(batch[name], (0, widths[name] - batch[name].shape[1]), value=with_what)
                 for name, with_what in padding.items()} for batch in batches]  # fmt: skip

    def _together(self, rows: Sequence[Tensor], side: int, with_what: int) -> Tensor:
        longest = min(int(_filled(max(len(row) for row in rows))), self._most[side])
        found = torch.full((len(rows), longest), with_what)
        for at, row in enumerate(rows):
            found[at, : len(row)] = row
        return found


def _filled(length: Any) -> Any:
    return length + -length % MULTIPLE


def sequence_pairs(
    path: str,
    model: str,
    source_len: int = 512,
    target_len: int = 128,
    source_field: str = "",
    target_field: str = "",
    prefix: str = "",
    held_out: int = 0,
    source_language: str = "",
    target_language: str = "",
) -> SequencePairs | tuple[SequencePairs, SequencePairs]:
    """Return the rows of a table, and with `held_out` the last so many of them apart, for evaluation.

    `path` is a CSV, TSV, JSON, JSONL, Parquet or Arrow file or a folder of such; `model` the folder of the model, whose
    tokenizer.json and config.json say how texts become tokens, at most `source_len` and `target_len` of them. The
    columns are told by their usual names where none is given. `prefix` is put before each source ("summarize: ").
    Models that translate between many languages (mBART, NLLB) want the tokens of both ("en_XX", "deu_Latn"). All rows
    are held in memory, as tokens. Raises DataError, naming the row, for one without both texts.
    """
    asked = (path, model, source_len, target_len, source_field, target_field, prefix, source_language, target_language)
    vocab, pad, sides, texts = listed(("pairs", *asked), lambda: _tokenised(*asked))
    rows = len(texts[0].lengths)
    if not 0 <= held_out < rows:
        raise DataError(f"held_out = {held_out} of {rows} rows", "none would be left to train on", "fewer")

    def of(first: int, end: int) -> SequencePairs:
        sources, targets = (side.between(first, end) for side in texts)
        return SequencePairs(sources, targets, vocab, sides.start, pad, (source_len, target_len))

    return of(0, rows) if not held_out else (of(0, rows - held_out), of(rows - held_out, rows))


def _tokenised(
    path: str, model: str, source_len: int, target_len: int, source_field: str, target_field: str, prefix: str,
    source_language: str, target_language: str,
) -> tuple[int, int, Sides, tuple[Texts, Texts]]:  # fmt: skip
    """Return the vocabulary, the token of padding, what stands around texts, and the tokens of sources and targets."""
    folder = Path(scheme_of(model)[1] if scheme_of(model)[0] == "hf" else model).expanduser()
    tokenizer, config = load_tokenizer(str(folder)), _config(folder)
    given = config.get("eos_token_id")
    end = given if isinstance(given, int) else tokenizer.end_of_document
    known = int(config.get("vocab_size", tokenizer.vocab))
    if tokenizer.vocab > known:
        raise DataError(
            f"the tokenizer in {folder} has {tokenizer.vocab} tokens", f"its model knows {known}",
            "the tokenizer that belongs to the model",
        )  # fmt: skip
    sources, targets = zip(*_read(path, (source_field, target_field), prefix), strict=True)
    sides = sides_of(folder, config, tokenizer, (source_language, target_language), end, sources)
    written: Iterable[list[int]] = _tokens(targets, tokenizer, sides.target, target_len, end)
    if end not in sides.target.after:  # a model that ends a target by itself has to see its end
        written = (each if each[-1] == end else [*each[: target_len - 1], end] for each in written)
    texts = Texts.of(_tokens(sources, tokenizer, sides.source, source_len, end)), Texts.of(written)
    return tokenizer.vocab, int(config.get("pad_token_id") or 0), sides, texts


def _tokens(texts: Sequence[str], tokenizer: FileTokenizer, around: Around, most: int, end: int) -> Iterator[list[int]]:
    for first in range(0, len(texts), AT_ONCE):
        for own in tokenizer.encode([text.encode() for text in texts[first : first + AT_ONCE]]):
            yield around.fitted(own.tolist(), most) or [end]


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        fix = "a folder with config.json and tokenizer.json"
        raise DataError(f"'{folder}' is no folder of a model", str(error), fix) from error
    return found if isinstance(found, dict) else {}


def _read(path: str, asked: tuple[str, str], prefix: str) -> list[tuple[str, str]]:
    """Return the texts of all rows."""
    listing = list_table(DataSpec(source=path))
    names = _columns(columns_of(listing), asked, path)
    found: list[tuple[str, str]] = []
    for record in read_records(listing, Damaged(skip=False)):
        texts = [record.values.get(name) for name in names]
        for name, text in zip(names, texts, strict=True):
            if not isinstance(text, str) or not text:
                raise DataError(
                    f"{record.origin} has no text in the column '{name}'", f"it is {text!r}", "leave the row out"
                )
        found.append((f"{prefix}{texts[0]}", str(texts[1])))
    if not found:
        raise DataError(
            f"'{path}' holds no rows",
            "there are sources and targets to be learnt from in none of its files",
            "other data",
        )
    return found


def _columns(columns: Sequence[str], asked: tuple[str, str], path: str) -> tuple[str, str]:
    """Return the names of the columns of sources and of targets."""
    if all(asked):
        wanted = [asked]
    elif any(asked):
        raise DataError("one of source_field and target_field is given", "a pair has two columns", "both, or none")
    else:
        wanted = list(COLUMNS)
    for pair in wanted:
        if set(pair) <= set(columns):
            return pair
    listed = ", ".join(columns) or "none"
    raise DataError(
        f"'{path}' has no columns of sources and targets", f"its columns are {listed}",
        f"source_field and target_field, or columns called {' and '.join(COLUMNS[0])}",
    )  # fmt: skip
