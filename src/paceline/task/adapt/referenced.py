"""A model beside a frozen copy of what it was at the start: what preference pairs are held against.

Where all of a model is trained there is no frozen base left to be its reference, so there is a second copy. Both are
one module: the copy is priced with the model, and proven with it; it rests as the model does, or is spread. Checkpoints
hold the trained model alone: the copy is made, or read, anew by every start.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.spec.data.labels import IGNORED
from paceline.spec.task import ModelSpec
from paceline.task.adapt.distill import kept_alone
from paceline.task.adapt.teacher import Teacher, logits_of
from paceline.task.models.build import build_model

TRAINED, REFERENCE = "model.", "reference."


class WithReference(nn.Module):
    """A model and its frozen reference; called with labels it returns the log-probabilities of both, else logits."""

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        super().__init__()
        self.model, self.reference = model, Teacher(reference).eval()
        self.register_state_dict_post_hook(partial(kept_alone, TRAINED, REFERENCE))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        """Return (reference's, model's) log-probabilities [rows] of the labels that count, or logits of the model."""
        if labels is None:
            return logits_of(self.model, tokens)
        reference = log_probabilities_of(self.reference(tokens), labels)
        return reference, log_probabilities_of(logits_of(self.model, tokens), labels)


def log_probabilities_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of the labels of every row [rows, seq] that count, summed: [rows], in fp32 or wider.

    `logits` are [rows, seq, vocab].
    """
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(labels.shape).sum(1)


def with_reference(model: Mapping[str, Any], vocab: int, seq_len: int = 1) -> WithReference:
    """Return a model and a frozen copy of it: a factory for `task.model`, whose arguments are a model's options.

    Both have the same first values: of torch's seed, or of the model's weights.
    """
    seed, device = torch.initial_seed(), torch.empty(0).device.type
    own, theirs = (build_model(ModelSpec(**model), vocab, seq_len, seed, device) for _ in range(2))
    return WithReference(own, theirs)


def trained_of(model: ModelSpec) -> ModelSpec | None:
    """Return the model that is trained of what `with_reference` makes, None for other models."""
    path = f"{with_reference.__module__}:{with_reference.__name__}"
    return ModelSpec(**model.arguments["model"]) if model.name == path else None
