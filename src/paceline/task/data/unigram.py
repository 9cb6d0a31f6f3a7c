"""The unigram loss: what a model that ignores context would reach, and training must beat."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.errors import DamagedData
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.sources.tokenizer import Tokens

OfText = TokenSource | PackedSource
BLOCK_TOKENS = 2**22
FAR_BLOCK_TOKENS, FAR_BLOCKS = 2**17, 8  # of remote data, which would be fetched for nothing else
COUNTED_TOKENS = 2**26  # enough for frequencies; a tenth of a second


def token_counts(tokens: Tokens, vocab: int) -> npt.NDArray[np.int64]:
    """Return how often each id occurs: int64 [vocab]. Reads mapped tokens block by block."""
    counts = np.zeros(vocab, dtype=np.int64)
    for start in range(0, len(tokens), BLOCK_TOKENS):
        counts += np.bincount(tokens[start : start + BLOCK_TOKENS], minlength=vocab)
    return counts


def first_counts(source: OfText) -> npt.NDArray[np.int64]:
    """Return how often each id occurs in the first COUNTED_TOKENS of a split; of remote ones in the first few blocks.

    Blocks with damaged tokens are passed over where the source leaves out damaged samples.
    """
    assert source.vocab, "a corpus has a vocabulary"
    counts, tokens = np.zeros(source.vocab, dtype=np.int64), source.split.open()
    block = BLOCK_TOKENS if source.is_near else FAR_BLOCK_TOKENS
    stop = min(len(tokens), COUNTED_TOKENS if source.is_near else FAR_BLOCKS * FAR_BLOCK_TOKENS)
    for start in range(0, stop, block):
        try:
            counts += np.bincount(tokens[start : min(stop, start + block)], minlength=source.vocab)
        except DamagedData:
            if not source.skip_bad:
                raise
    return counts


def unigram_loss(train: OfText, validation: OfText, ids: npt.NDArray[np.int64] | None = None) -> float:
    """Return the cross-entropy, in nats per token, of the unigram model of `train` on the labels of `validation`.

    The model gives token t the probability (count(t) + 1) / (tokens + vocab), Laplace's rule, so that a token not seen
    in training costs much and not everything; it counts the first COUNTED_TOKENS of the training split. `ids` takes
    these validation samples only, such as those that an evaluation reads. NaN where none of their labels counts.
    """
    assert train.vocab, "a corpus has a vocabulary"
    counts = first_counts(train) + 1
    if ids is None:
        windows = isinstance(validation, TokenSource)
        labels = validation.samples * validation.items_per_sample if windows else validation.split.tokens
        held_out = token_counts(validation.split.open()[1 : labels + 1], train.vocab)
    else:
        labels_read = validation.read(ids)["labels"].numpy().reshape(-1)
        held_out = token_counts(labels_read[labels_read >= 0], train.vocab)  # -100 does not count
    if not held_out.any():
        return math.nan
    log_probability = np.log(counts) - np.log(counts.sum())
    return float(-(held_out * log_probability).sum() / held_out.sum())
