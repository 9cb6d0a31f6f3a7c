"""Sources with their targets, from a table: what models that read one text and write another learn from (T5, BART).

    source,target
    translate: two and two,vier

A sample is padded to two lengths that are the same for all: "source" with "source_mask" [source_len], and "target",
which the decoder reads, with "labels", which it is to say [target_len]. Padding counts nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.spec.import_paths import scheme_of
from paceline.spec.task import DataSpec
from paceline.task.data.sources.documents import Damaged
from paceline.task.data.sources.tables.listing import list_table
from paceline.task.data.sources.tables.records import columns_of, read_records
from paceline.task.data.sources.tokenizer import FileTokenizer, load_tokenizer

IGNORED = -100
COLUMNS = (("source", "target"), ("text", "summary"), ("document", "summary"), ("article", "highlights"),
           ("dialogue", "summary"), ("text", "target"), ("input", "output"), ("prompt", "completion"),
           ("question", "answer"))  # fmt: skip

# Kinds of models whose targets begin with their language (mBART shifts it to the front), or have a tokenizer apart.
OTHER_TARGETS = ("mbart", "plbart", "m2m_100", "nllb-moe", "marian", "fsmt", "seamless_m4t", "seamless_m4t_v2")


class SequencePairs:
    """A map-style data set of texts and what is to be written for them."""

    def __init__(
        self, pairs: Sequence[tuple[str, str]], tokenizer: FileTokenizer, lengths: tuple[int, int], start: int,
        end: int, pad: int,
    ) -> None:  # fmt: skip
        """`lengths` are those of a source and of a target; a decoder reads `start` first and says `end` last."""
        self._pairs, self._tokenizer, self._lengths = pairs, tokenizer, lengths
        self._start, self._end, self._pad = start, end, pad
        self.vocab = tokenizer.vocab

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source, target = (
            self._fitted(text, most) for text, most in zip(self._pairs[index], self._lengths, strict=True)
        )
        if target[-1] != self._end:
            target = [*target[: self._lengths[1] - 1], self._end]
        return {
            "source": self._filled(source, self._lengths[0], self._pad),
            "source_mask": self._filled([1] * len(source), self._lengths[0], 0),
            "target": self._filled([self._start, *target[:-1]], self._lengths[1], self._pad),
            "labels": self._filled(target, self._lengths[1], IGNORED),
        }

    def _fitted(self, text: str, most: int) -> list[int]:
        """Return the tokens of a text with what the tokenizer puts around it; one that is too long loses its end."""
        own = self._tokenizer.encode([text.encode()])[0].tolist()
        around = self._tokenizer.encode_around([text.encode()])[0].tolist()
        if len(around) <= most:
            return around or [self._end]
        before = next((at for at in range(len(around) - len(own) + 1) if around[at : at + len(own)] == own), 0)
        after = around[before + len(own) :]
        return [*around[:before], *own[: max(0, most - before - len(after))], *after][-most:]

    @staticmethod
    def _filled(ids: list[int], length: int, with_what: int) -> Tensor:
        return torch.tensor([*ids, *[with_what] * (length - len(ids))])


def sequence_pairs(
    path: str,
    model: str,
    source_len: int = 512,
    target_len: int = 128,
    source_field: str = "",
    target_field: str = "",
    prefix: str = "",
    held_out: int = 0,
) -> SequencePairs | tuple[SequencePairs, SequencePairs]:
    """Return the rows of a table, and with `held_out` the last so many of them apart, for evaluation.

    `path` is a CSV, TSV, JSON, JSONL, Parquet or Arrow file or a folder of such; `model` the folder of the model, whose
    tokenizer.json and config.json say how texts become tokens. The columns are told by their usual names where none is
    given. `prefix` is put before each source ("summarize: "). All rows are held in memory, as text. Raises DataError,
    naming the row, for one without both texts.
    """
    folder = Path(scheme_of(model)[1] if scheme_of(model)[0] == "hf" else model).expanduser()
    tokenizer, config = load_tokenizer(str(folder)), _config(folder)
    if (kind := config.get("model_type")) in OTHER_TARGETS:
        raise DataError(
            f"the tokenizer in {folder} writes targets otherwise than sources", f"it is of a {kind}: in another"
            " language, or with pieces of their own, of which tokenizer.json knows nothing",
            "a data set of your own, with the same entries",
        )  # fmt: skip
    start = config.get("decoder_start_token_id")
    if not isinstance(start, int):
        raise DataError(
            f"{folder}/config.json says nothing of how a target begins", "it has no decoder_start_token_id",
            "the folder of an encoder-decoder, such as T5 or BART",
        )  # fmt: skip
    known = int(config.get("vocab_size", tokenizer.vocab))
    if tokenizer.vocab > known:
        raise DataError(
            f"the tokenizer in {folder} has {tokenizer.vocab} tokens", f"its model knows {known}",
            "the tokenizer that belongs to the model",
        )  # fmt: skip
    pairs = _read(path, (source_field, target_field), prefix)
    if not 0 <= held_out < len(pairs):
        raise DataError(f"held_out = {held_out} of {len(pairs)} rows", "none would be left to train on", "fewer")
    end = config.get("eos_token_id")
    special = (int(start), end if isinstance(end, int) else tokenizer.end_of_document,
               int(config.get("pad_token_id") or 0))  # fmt: skip

    def of(rows: Sequence[tuple[str, str]]) -> SequencePairs:
        return SequencePairs(rows, tokenizer, (source_len, target_len), *special)

    return of(pairs) if not held_out else (of(pairs[:-held_out]), of(pairs[-held_out:]))


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
    found = []
    for record in read_records(listing, Damaged(skip=False)):
        texts = [record.values.get(name) for name in names]
        for name, text in zip(names, texts, strict=True):
            if not isinstance(text, str) or not text:
                raise DataError(
                    f"{record.origin} has no text in the column '{name}'", f"it is {text!r}", "leave the row out"
                )
        found.append((f"{prefix}{texts[0]}", str(texts[1])))
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
