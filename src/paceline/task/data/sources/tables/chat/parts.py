"""Parts of a row's text of which some counts, and how tokens are made of them.

A template's own marks (`<|im_start|>`) become the special tokens that they are where the tokenizer knows them. What
stands in a message never does: a message that spells out a special token stays plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.task.data.sources.tokenizer import FileTokenizer, Tokenizer, Tokens

Counted = npt.NDArray[np.uint8]


class TextPart(NamedTuple):
    """A part of a row: its text, whether its tokens count in the loss, and whether it may hold a template's own marks.

    A part that `goes_on` is made into tokens together with the mark before it, as one text.
    """

    text: str
    counted: bool
    mark: bool = False
    goes_on: bool = False


def encode_segments(tokenizer: Tokenizer, rows: Sequence[Sequence[TextPart]]) -> list[tuple[Tokens, Counted]]:
    """Return each row's token ids, and 1 for those that count. Segments are encoded by themselves or as they go on.

    A row begins with the tokenizer's opening, unless a template's marks say how it begins.
    """
    runs = [list(_runs(row)) for row in rows]
    flat = [run for row in runs for run in row]
    found: dict[int, tuple[Tokens, Counted]] = {}
    for mark, encode in ((False, tokenizer.encode), (True, _marks_encoder(tokenizer))):
        alone = [at for at, run in enumerate(flat) if len(run) == 1 and run[0].mark == mark]
        for at, ids in zip(alone, encode([flat[at][0].text.encode() for at in alone]), strict=True):
            found[at] = ids, np.full(len(ids), flat[at][0].counted, dtype=np.uint8)
    if longer := [at for at in range(len(flat)) if at not in found]:
        found |= zip(longer, _encode_runs(tokenizer, [flat[at] for at in longer]), strict=True)
    given = (found[at] for at in range(len(flat)))
    opening = np.asarray(tokenizer.opening, dtype=np.uint32)
    encoded = []
    for row in runs:
        begin = opening[:0] if any(part.mark for run in row for part in run) else opening
        parts = [(begin, np.zeros(len(begin), dtype=np.uint8)), *(next(given) for _ in row)]
        encoded.append((np.concatenate([ids.astype(np.uint32) for ids, _ in parts]),
                        np.concatenate([counted for _, counted in parts])))  # fmt: skip
    return encoded


def _runs(row: Sequence[TextPart]) -> Iterator[list[TextPart]]:
    """Yield the parts of a row that hold any text, those together that go on."""
    run: list[TextPart] = []
    for part in row:
        if not part.text:
            continue
        if run and not part.goes_on:
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _marks_encoder(tokenizer: Tokenizer) -> Callable[[Sequence[bytes]], list[Tokens]]:
    """Return what makes ids of a template's marks: special tokens where the tokenizer knows them."""
    return tokenizer.encode_special if isinstance(tokenizer, FileTokenizer) else tokenizer.encode


def _encode_runs(tokenizer: Tokenizer, runs: Sequence[Sequence[TextPart]]) -> Iterator[tuple[Tokens, Counted]]:
    """Yield the ids of parts that are one text, and 1 for each token that any of a part that counts is in."""
    assert isinstance(tokenizer, FileTokenizer), "texts go on under the template of a tokenizer's own folder"
    texts = ["".join(part.text for part in run) for run in runs]
    for run, (ids, begins, ends) in zip(runs, tokenizer.encode_placed(texts), strict=True):
        counted, start = np.zeros(len(ids), dtype=np.uint8), 0
        for part in run:
            stop = start + len(part.text)
            inside = np.flatnonzero((begins < stop) & (ends > start))
            if part.counted and inside.size:
                counted[inside[0] : inside[-1] + 1] = 1
            start = stop
        yield ids, counted
