"""How many bytes of text each token of a vocabulary stands for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.task.data.protocol import Source
from paceline.task.data.rows.mixed import InOrder
from paceline.task.data.sources.manifest import TOKENIZER
from paceline.task.data.sources.tokenizer import BYTES_END, ByteTokenizer

METRIC = "the metric 'bits_per_byte'"


def bytes_of_tokens(source: Source) -> Tensor:
    """Return the bytes of each token id, int64 [vocab], of the tokenizer that a source of text was made with.

    They are exact for bytes and for byte-level tokenizers, whose tokens are written with one character for each byte;
    special tokens stand for none. Raises ConfigError for other tokenizers, and for data that are no text.
    """
    source = source.inner if isinstance(source, InOrder) else source
    folder = getattr(getattr(source, "split", None), "folder", None)
    file = Path(folder) / TOKENIZER if folder else None
    if file is None or not file.is_file() or source.vocab is None:
        raise ConfigError(
            f"{METRIC} needs text that is tokenised here", "the bytes of these samples are not known",
            "the metric 'perplexity', or task.data.source = a file or folder of text",
        )  # fmt: skip
    text = file.read_text(encoding="utf-8")
    found = torch.zeros(source.vocab, dtype=torch.int64)
    if text == ByteTokenizer().to_json():
        found[:BYTES_END] = 1
        return found
    written = json.loads(text)
    if not _is_byte_level(written.get("decoder")):
        raise ConfigError(
            f"{METRIC} does not know the bytes of a token",
            "the tokenizer is not byte-level, so what a token stands for depends on its neighbours",
            "the metric 'perplexity', or a byte-level tokenizer",
        )
    vocab = written["model"]["vocab"]  # numbers by tokens; of Unigram models a list of tokens with their scores
    for token, number in vocab.items() if isinstance(vocab, dict) else ((each[0], at) for at, each in enumerate(vocab)):
        found[number] = len(token)
    for added in written.get("added_tokens", ()):
        found[added["id"]] = 0 if added.get("special") else len(added["content"].encode())
    return found


def _is_byte_level(decoder: object) -> bool:
    """Return whether a decoder of a tokenizer.json makes a byte of each character."""
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders", ())))
