"""A frozen model beside the trained model: the frozen one only goes forward, so its weights may be in other shards."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Teacher(nn.Module):
    """A frozen model. A class of its own: two models of one class side by side would be taken for repeated blocks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Return the model's logits, of which nothing is kept."""
        return logits_of(self.model, tokens)


def teachers_of(model: nn.Module) -> list[Teacher]:
    """Return the frozen models inside a model that only go forward."""
    return [module for module in model.modules() if isinstance(module, Teacher)]


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return a model's logits, which it returns itself or as `.logits`."""
    found = model(tokens)
    logits: Tensor = getattr(found, "logits", found)
    return logits
