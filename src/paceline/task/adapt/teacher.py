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
    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the model's logits, of which nothing is kept; `documents` as in `logits_of`."""
        return logits_of(self.model, tokens, documents)


def teachers_of(model: nn.Module) -> list[Teacher]:
    """Return the frozen models inside a model that only go forward."""
    return [module for module in model.modules() if isinstance(module, Teacher)]


def logits_of(model: nn.Module, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """Return a model's logits, which it returns itself or as `.logits`.

    With `documents` [rows, seq] no token sees another document than its own. Raises ConfigError for a model that cannot
    be told of them.
    """
    if documents is None:
        found = model(tokens)
    else:
        from paceline.task.objective import beside_tokens  # which many modules reach, this one among them

        found = model(tokens, **beside_tokens(model, {"documents": documents}))
    logits: Tensor = getattr(found, "logits", found)
    return logits
