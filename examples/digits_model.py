"""A small residual network for 8 x 8 images: what a model of your own may look like. Nothing here knows of Paceline."""

import torch
from torch import nn


class Residual(nn.Module):
    """x + f(x), with f two linear layers behind a norm. Normalises per sample: batch statistics would make the
    result depend on how the batch is cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return features of the same shape [rows, width]."""
        return features + self.body(features)


def build(width: int = 64, depth: int = 3, classes: int = 10) -> nn.Module:
    """Return a module from images [rows, 1, 8, 8] to logits [rows, classes]."""
    blocks = [Residual(width) for _ in range(depth)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *blocks, nn.LayerNorm(width), nn.Linear(width, classes))
