"""Sequences of different lengths, padded per batch: is the sum of a sequence's digits even?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

LONGEST = 12
PADDING = 10  # no digit


class Sums:
    """Numbered sequences of 1 to LONGEST digits, each with the parity of its sum."""

    unit = "samples"

    def __init__(self, samples: int = 4000) -> None:
        self.samples = samples
        self.fingerprint = f"sums-{samples}"

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = np.random.default_rng(index)
        digits = generator.integers(0, PADDING, int(generator.integers(1, LONGEST + 1)))
        return torch.from_numpy(digits), int(digits.sum()) % 2


def pad(samples: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """Return a batch as long as its longest sample: digits [rows, longest] and labels [rows]."""
    digits = nn.utils.rnn.pad_sequence([digits for digits, _ in samples], batch_first=True, padding_value=PADDING)
    return {"digits": digits, "labels": torch.tensor([label for _, label in samples])}


class Parity(nn.Module):
    """Adds up what it makes of each digit; padding adds nothing, however much of it there is."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(PADDING + 1, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 2)

    def forward(self, digits: Tensor) -> Tensor:
        """Return logits [rows, 2] for digits [rows, length]."""
        real = (digits != PADDING).unsqueeze(-1)
        x = (self.embed(digits) * real).sum(1)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)
