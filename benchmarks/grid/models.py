"""A user's module for the forecast grid: a transformer encoder over the pixels of 8 x 8 images, without any rules."""

from __future__ import annotations

import torch
from torch import nn


class PixelEncoder(nn.Module):
    """Every pixel is a position; the mean over positions is classified."""

    def __init__(self, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.place = nn.Parameter(torch.zeros(64, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # [rows, 1, 8, 8]
        """Return logits [rows, classes]."""
        stream = self.embed(images.reshape(len(images), 64, 1)) + self.place
        for layer in self.layers:
            stream = layer(stream)
        return self.head(stream.mean(dim=1))


def encoder(width: int = 96, depth: int = 4, heads: int = 4, classes: int = 10) -> nn.Module:
    """Return the module."""
    return PixelEncoder(width, depth, heads, classes)
