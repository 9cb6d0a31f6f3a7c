"""Preference pairs: direct preference optimisation against a frozen reference (arXiv:2305.18290, eq. 7).

    h = (log p(chosen) - log p(rejected)) - (log r(chosen) - log r(rejected))
    sigmoid: loss of a pair = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
    ipo:     (h - 1 / (2 beta))^2, of log-probabilities that are means over the labels that count (arXiv:2310.12036)
    hinge:   (1 - e) max(0, 1 - beta h) + e max(0, 1 + beta h)

p is the model with its adapters and r the same model without them, or r is a frozen copy of it (referenced.py); e is
the label smoothing. Log-probabilities are else sums over the labels that count. The loss is a sum over pairs, whatever
the layout. The reward of an answer is beta (log p - log r).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.spec.data.labels import IGNORED
from paceline.task.adapt.linear import AdaptedLinear
from paceline.task.adapt.noise import EmbeddingNoise, noises
from paceline.task.adapt.referenced import WithReference, log_probabilities_of
from paceline.task.models.held import is_spread
from paceline.task.models.layers.vocabulary import spread_logits_cross_entropy
from paceline.task.objective import without_cache

REWARDS = "rewards"  # what an evaluation is told of each pair, [pairs, 2]: the chosen answer's and the rejected one's


@dataclass(frozen=True)
class PreferenceLoss:
    """The objective of preference pairs: "tokens" and "labels", int64 [pairs, 2, seq]; of two rows the first is chosen.

    Labels are the next tokens already, -100 where they do not count: in the prompt and in padding.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    kind: str = "sigmoid"
    has_copy: bool = False  # whether the reference is a copy: a part of the model that is called once
    told: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)  # of the batch evaluated last

    @property
    def forward_passes(self) -> int:
        """How often the objective calls the model; one of the calls has a backward pass."""
        return 1 if self.has_copy else 2

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the pairs, and their number."""
        ratios = log_ratios(model, batch)
        if not torch.is_grad_enabled():
            self.told[REWARDS] = self.beta * ratios
        if self.kind == "ipo":
            ratios = ratios / (batch["labels"] != IGNORED).sum(-1).clamp(min=1)
        margins = ratios[:, 0] - ratios[:, 1]
        return self.of_margins(margins).sum(), torch.tensor(len(margins), device=margins.device)

    def of_margins(self, margins: Tensor) -> Tensor:
        """Return the loss of every pair, [pairs], of its h."""
        if self.kind == "ipo":
            return (margins - 1 / (2 * self.beta)).square()
        right, wrong = self.beta * margins, -self.beta * margins
        if self.kind == "hinge":
            return (1 - self.label_smoothing) * F.relu(1 - right) + self.label_smoothing * F.relu(1 - wrong)
        return -(1 - self.label_smoothing) * F.logsigmoid(right) - self.label_smoothing * F.logsigmoid(wrong)


def log_ratios(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return log p - log r of the chosen and the rejected answer of every pair, [pairs, 2], in fp32 or wider."""
    tokens, labels = batch["tokens"], batch["labels"]
    if tokens.dim() != 3 or tokens.shape[1] != 2:
        raise ConfigError(
            f"the objective 'dpo' got tokens of shape {list(tokens.shape)}", "a sample is a pair: [pairs, 2, tokens]",
            "task.data.source = 'paceline.task.data.pairs:preference_pairs'",
        )  # fmt: skip
    rows = tokens.flatten(0, 1), labels.flatten(0, 1)
    if isinstance(model, WithReference):
        reference, own = model(*rows)
    else:
        with torch.no_grad(), adapters_off(model):
            reference = log_probabilities(model, *rows)
        own = log_probabilities(model, *rows)
    return (own - reference).view(-1, 2)


def log_probabilities(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of the labels of every row [rows, seq] that count, summed: [rows]."""
    output = model(tokens, **without_cache(model))
    logits = getattr(output, "logits", output)
    if is_spread(logits):  # a head whose classes are spread over ranks
        return -spread_logits_cross_entropy(logits, labels).view(labels.shape).sum(1)
    return log_probabilities_of(logits, labels)


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Have the model compute what its frozen base does. Raises ConfigError for a model without adapters."""
    layers = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    if not layers:
        raise ConfigError(
            "the objective 'dpo' with a model without adapters",
            "what it is held against is the model's own frozen base, and this one has none",
            "task.adapter.kind = 'lora', or a model of paceline.task.adapt.referenced:with_reference",
        )
    switched: list[AdaptedLinear | EmbeddingNoise] = [*layers, *noises(model)]
    for each in switched:
        each.is_on = False
    try:
        yield
    finally:
        for each in switched:
            each.is_on = True
