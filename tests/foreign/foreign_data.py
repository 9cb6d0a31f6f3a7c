"""Data sets for foreign models: rows that follow from their number alone, in the shapes that each model reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VOCAB, SEQ_LEN, CLASSES = 61, 12, 5
SAMPLES = 400


class Rows:
    """A map-style data set: row `index` is what `make` draws from a generator seeded by it."""

    def __init__(self, make: Callable[[torch.Generator], Any], **declared: Any) -> None:
        self._make = make
        self.fingerprint = getattr(make, "__name__", "rows")
        for name, value in declared.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self._make(torch.Generator().manual_seed(1000 + index))


def _walk(generator: torch.Generator) -> Tensor:
    """Return tokens [SEQ_LEN + 1] of a walk with small steps, so that there is something to learn."""
    return torch.randint(1, 4, (SEQ_LEN + 1,), generator=generator).cumsum(0) % VOCAB


def _labels(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Return the next tokens, the first few of a random number masked: rows weigh differently."""
    labels = tokens[1:].clone()
    labels[: int(torch.randint(0, SEQ_LEN // 2, (), generator=generator))] = -100
    return labels


def next_tokens() -> Rows:
    """Return rows of tokens and next tokens."""

    def row(generator: torch.Generator) -> dict[str, Tensor]:
        tokens = _walk(generator)
        return {"tokens": tokens[:-1], "labels": _labels(tokens, generator)}

    return Rows(row, items_per_sample=SEQ_LEN)


def masked_tokens() -> Rows:
    """Return rows of tokens of which some are hidden, their labels, and a mask of the padding at the end."""

    def row(generator: torch.Generator) -> dict[str, Tensor]:
        tokens, hidden = _walk(generator)[:-1], torch.rand(SEQ_LEN, generator=generator) < 0.3
        hidden[0] = True
        length = int(torch.randint(SEQ_LEN // 2, SEQ_LEN + 1, (), generator=generator))
        mask = (torch.arange(SEQ_LEN) < length).long()
        labels = torch.where(hidden & mask.bool(), tokens, -100)
        return {"tokens": torch.where(hidden, 0, tokens), "mask": mask, "labels": labels}

    return Rows(row, items_per_sample=SEQ_LEN)


def sequence_pairs() -> Rows:
    """Return rows of a source sequence, and of a target sequence with its next tokens."""

    def row(generator: torch.Generator) -> dict[str, Tensor]:
        source, target = _walk(generator)[:-1], _walk(generator)
        return {"source": source, "target": target[:-1], "labels": _labels(target, generator)}

    return Rows(row, items_per_sample=SEQ_LEN)


def sounds() -> Rows:
    """Return rows of a sound of four bands, and of its transcript with the next tokens."""

    def row(generator: torch.Generator) -> dict[str, Tensor]:
        target = _walk(generator)
        sound = torch.randn(4, 32, generator=generator)
        return {"sound": sound, "target": target[:-1], "labels": _labels(target, generator)}

    return Rows(row, items_per_sample=SEQ_LEN)


def images(size: int = 16, channels: int = 3) -> Rows:
    """Return rows (image, class)."""

    def row(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        label = torch.randint(0, CLASSES, (), generator=generator)
        return torch.randn(channels, size, size, generator=generator) + 0.3 * label, label

    return Rows(row)


def vectors(width: int = 16) -> Rows:
    """Return rows (vector, class)."""

    def row(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        label = torch.randint(0, CLASSES, (), generator=generator)
        return torch.randn(width, generator=generator) + 0.5 * label, label

    return Rows(row)


def captions() -> Rows:
    """Return rows of an image and its caption."""

    def row(generator: torch.Generator) -> dict[str, Tensor]:
        return {"pixels": torch.randn(3, 16, 16, generator=generator), "tokens": _walk(generator)[:-1]}

    return Rows(row)


def signals(length: int = 32) -> Rows:
    """Return rows (signal [1, length], the same a quarter period later)."""

    def row(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        at, wave = torch.linspace(0, 6.28, length), 1 + torch.rand((), generator=generator)
        return torch.sin(at * wave)[None], torch.cos(at * wave)[None]

    return Rows(row)


def ragged() -> Rows:
    """Return rows of vectors of which only the first `length` are real; the rest is noise that must not be read."""

    def row(generator: torch.Generator) -> dict[str, Tensor]:
        label = torch.randint(0, CLASSES, (), generator=generator)
        length = torch.randint(1, SEQ_LEN + 1, (), generator=generator)
        return {"steps": torch.randn(SEQ_LEN, 8, generator=generator) + 0.3 * label, "length": length, "labels": label}

    return Rows(row)


def graphs(nodes: int = 6) -> Rows:
    """Return rows of a graph: features of its nodes, its edges as a matrix, and a class."""

    def row(generator: torch.Generator) -> dict[str, Tensor]:
        edges = (torch.rand(nodes, nodes, generator=generator) < 0.4).float()
        label = (edges.sum() % CLASSES).long()
        return {"nodes": torch.randn(nodes, 8, generator=generator), "edges": edges, "labels": label}

    return Rows(row)


def named_rows(width: int = 16) -> Rows:
    """Return rows with names, one of which has a dictionary of its own."""

    def row(generator: torch.Generator) -> dict[str, Any]:
        x, label = vectors(width)._make(generator)
        return {"x": x, "more": {"scale": torch.rand((), generator=generator) + 0.5}, "label": label}

    return Rows(row)
