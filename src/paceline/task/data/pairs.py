"""Preference pairs from a JSONL file: a prompt, the answer that was chosen, and the one that was rejected.

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}

A sample is the two rows of a pair, [2, seq_len]. Prompts and padding do not count. A row that is too long loses the
beginning of its prompt, and an answer that is too long alone its end.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.task.data.sources.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

IGNORED = -100
FIELDS = ("prompt", "chosen", "rejected")


class PreferencePairs:
    """A map-style data set of pairs; `vocab` is the tokenizer's, a sample has `items_per_sample` positions."""

    unit = "tokens"

    def __init__(self, pairs: list[tuple[str, str, str]], seq_len: int, tokenizer: Tokenizer) -> None:
        self._pairs, self._seq_len, self._tokenizer = pairs, seq_len, tokenizer
        self.vocab, self.items_per_sample = tokenizer.vocab, seq_len

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        prompt, *answers = self._tokenizer.encode([text.encode() for text in self._pairs[index]])
        rows = [self._row(prompt.tolist(), answer.tolist()) for answer in answers]
        tokens, labels = (torch.tensor(side) for side in zip(*rows, strict=True))
        return {"tokens": tokens, "labels": labels}

    def _row(self, prompt: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens and the labels of a row, both of `seq_len`."""
        end = self._tokenizer.end_of_document
        answer = [*answer, end][: self._seq_len]
        kept = (prompt or [end])[-(self._seq_len + 1 - len(answer)) :]
        row = [*kept, *answer]
        labels = [IGNORED] * (len(kept) - 1) + answer
        missing = self._seq_len - len(labels)
        return [*row[:-1], *[end] * missing], [*labels, *[IGNORED] * missing]


def preference_pairs(
    path: str, seq_len: int, tokenizer: str = "bytes", held_out: int = 0
) -> PreferencePairs | tuple[PreferencePairs, PreferencePairs]:
    """Return the pairs of a JSONL file, and with `held_out` the last so many of them apart, for evaluation.

    `tokenizer` is 'bytes' or the path of a tokenizer.json. Raises DataError with the line that holds no pair.
    """
    pairs = read_pairs(Path(path).expanduser())
    tokens: Tokenizer = ByteTokenizer() if tokenizer == "bytes" else load_tokenizer(tokenizer)
    if held_out >= len(pairs):
        raise DataError(f"held_out = {held_out} of {len(pairs)} pairs", "none would be left to train on", "fewer")
    if not held_out:
        return PreferencePairs(pairs, seq_len, tokens)
    return PreferencePairs(pairs[:-held_out], seq_len, tokens), PreferencePairs(pairs[-held_out:], seq_len, tokens)


def read_pairs(path: Path) -> list[tuple[str, str, str]]:
    """Return the (prompt, chosen, rejected) of every line of a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' cannot be read", str(error), "a file of JSON lines in UTF-8") from error
    pairs = [_pair(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not pairs:
        raise DataError(f"'{path}' holds no pairs", "it is empty", '{"prompt": ..., "chosen": ..., "rejected": ...}')
    return pairs


def _pair(path: Path, number: int, line: str) -> tuple[str, str, str]:
    try:
        record: object = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number} is not JSON", str(error), "one JSON object a line") from error
    texts = [record.get(field) if isinstance(record, dict) else None for field in FIELDS]
    wrong = [field for field, text in zip(FIELDS, texts, strict=True) if not isinstance(text, str)]
    if wrong:
        raise DataError(f"{path}:{number} is no preference pair", f"it has no text under {', '.join(wrong)}",
                        '{"prompt": ..., "chosen": ..., "rejected": ...}')  # fmt: skip
    prompt, chosen, rejected = texts
    return str(prompt), str(chosen), str(rejected)
