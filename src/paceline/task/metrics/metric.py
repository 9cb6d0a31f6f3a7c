"""What a metric is: numbers that add up over all held-out samples, and what is made of their totals.

A metric never sees a mean. What it returns for a part of the samples is added to what it returns for the others, over
micro-batches, ranks and parts of sequences; so it is exact for uneven batches, and the same on every layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Totals = Mapping[str, npt.NDArray[np.float64]]  # vectors by name, added up over all held-out samples


@dataclass(frozen=True)
class LossTotal:
    """The objective over all held-out samples: the sum of its losses, and how many items it counts."""

    total: float
    weight: float


class Metric(Protocol):
    """Measures a part of the samples at a time."""

    @property
    def reads_outputs(self) -> bool:
        """Whether the metric looks at what the model returns."""

    def measure(self, outputs: object, batch: object) -> Mapping[str, Tensor]:
        """Return vectors [n], or numbers, that add up, by names of this metric's own.

        `outputs` is what the model returned for `batch`, None where the metric does not read it.
        """

    def values(self, totals: Totals, loss: LossTotal) -> dict[str, float]:
        """Return what the metric comes to, by name, NaN where nothing was counted."""


def ratio(above: float, below: float) -> float:
    """Return a quotient, NaN where it has none."""
    return float(above / below) if below else float("nan")
