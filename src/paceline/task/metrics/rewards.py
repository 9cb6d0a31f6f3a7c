"""Metrics of preference pairs: how much more likely than its reference a model finds each answer, in the loss's scale.

They need both models' log-probabilities, so they are read from what the objective tells of the pairs it has evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.spec.watch.evaluate import REWARDS
from paceline.task.metrics.metric import LossTotal, Totals, ratio


@dataclass(frozen=True)
class RewardsOfPairs:
    """The mean reward of chosen and of rejected answers, their mean distance, and how often the chosen one's is more.

    The reward of an answer is beta (log p - log r).
    """

    name: str = "rewards"
    reads_outputs: bool = False

    def measure(self, outputs: Any, batch: object) -> Mapping[str, Tensor]:
        """Return the sums over pairs, and how many there are; `outputs` are their rewards [pairs, 2]."""
        chosen, rejected = outputs.double().unbind(1)
        sums = (chosen.sum(), rejected.sum(), (chosen > rejected).sum(), (chosen - rejected).sum())
        return {**dict(zip(REWARDS, sums, strict=True)), "count": torch.tensor(len(chosen))}

    def values(self, totals: Totals, loss: LossTotal) -> dict[str, float]:
        """Return the means."""
        return {name: ratio(totals[name][0], totals["count"][0]) for name in REWARDS}
