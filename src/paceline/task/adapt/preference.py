"""Preference pairs: direct preference optimisation against the model's own frozen base (arXiv:2305.18290, eq. 7).

    h = (log p(chosen) - log p(rejected)) - (log r(chosen) - log r(rejected))
    loss of a pair = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)

p is the model with its adapters, r the same model without them, e the label smoothing. Log-probabilities are sums over
the labels that count, so the loss is a sum over pairs, whatever the layout.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import ConfigError
from paceline.task.adapt.linear import AdaptedLinear
from paceline.task.models.layers.vocabulary import spread_logits_cross_entropy

IGNORED = -100


@dataclass(frozen=True)
class PreferenceLoss:
    """The objective of preference pairs: "tokens" and "labels", int64 [pairs, 2, seq]; of two rows the first is chosen.

    Labels are the next tokens already, -100 where they do not count: in the prompt and in padding.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    forward_passes = 2  # of the model, of which one has a backward pass

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the pairs, and their number."""
        margins = log_margins(model, batch)
        losses = -(1 - self.label_smoothing) * F.logsigmoid(self.beta * margins)
        losses = losses - self.label_smoothing * F.logsigmoid(-self.beta * margins)
        return losses.sum(), torch.tensor(len(margins), device=margins.device)


def log_margins(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return h of every pair, [pairs], in fp32 or wider: what the model prefers beyond what its base does."""
    tokens, labels = batch["tokens"], batch["labels"]
    if tokens.dim() != 3 or tokens.shape[1] != 2:
        raise ConfigError(
            f"the objective 'dpo' got tokens of shape {list(tokens.shape)}", "a sample is a pair: [pairs, 2, tokens]",
            "task.data.source = 'paceline.task.data.pairs:preference_pairs'",
        )  # fmt: skip
    rows = tokens.flatten(0, 1), labels.flatten(0, 1)
    with torch.no_grad(), adapters_off(model):
        reference = log_probabilities(model, *rows)
    own = log_probabilities(model, *rows)
    chosen, rejected = (own - reference).view(-1, 2).unbind(1)
    return chosen - rejected


def log_probabilities(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of the labels of every row [rows, seq] that count, summed: [rows]."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    output = model(tokens, **options)
    logits = getattr(output, "logits", output)
    if isinstance(logits, DTensor):  # a head whose classes are spread over ranks
        return -spread_logits_cross_entropy(logits, labels).view(labels.shape).sum(1)
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(labels.shape).sum(1)


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Have the model compute what its frozen base does. Raises ConfigError for a model without adapters."""
    layers = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    if not layers:
        raise ConfigError(
            "the objective 'dpo' with a model without adapters",
            "what it is held against is the model's own frozen base, and this one has none",
            "task.adapter.kind = 'lora'",
        )
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True
