"""The unigram loss: what a model that ignores context would reach, and training must beat."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.task.data.tokenizer import Tokens
from paceline.task.data.windows import TokenSource

BLOCK_TOKENS = 2**22


def token_counts(tokens: Tokens, vocab: int) -> npt.NDArray[np.int64]:
    """Return how often each id occurs: int64 [vocab]. Reads mapped tokens block by block."""
    counts = np.zeros(vocab, dtype=np.int64)
    for start in range(0, len(tokens), BLOCK_TOKENS):
        counts += np.bincount(tokens[start : start + BLOCK_TOKENS], minlength=vocab)
    return counts


def unigram_loss(train: TokenSource, validation: TokenSource, samples: int | None = None) -> float:
    """Return the cross-entropy, in nats per token, of the unigram model of `train` on the labels of `validation`.

    The model gives token t the probability (count(t) + 1) / (tokens + vocab), Laplace's rule, so that a token not seen
    in training costs much and not everything. `samples` takes the first so many validation samples, such as those
    that an evaluation reads.
    """
    assert train.vocab, "a corpus has a vocabulary"
    read = min(samples or validation.samples, validation.samples)
    counts = token_counts(train.split.open(), train.vocab) + 1
    labels = validation.split.open()[1 : read * validation.items_per_sample + 1]
    held_out = token_counts(labels, train.vocab)
    log_probability = np.log(counts) - np.log(counts.sum())
    return float(-(held_out * log_probability).sum() / held_out.sum())
