"""How sure a difference of two runs is: the noise from step to step, and the noise between runs of different seeds.

Losses of neighbouring steps are not independent, so the noise of a mean is drawn from whole blocks of steps (the
moving-block bootstrap of Künsch, 1989), after a straight line was taken off. Blocks are as long as Carlstein's rule
(1986) has it for noise whose neighbours are correlated as these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.spec.forecast import Z95

DRAWS = 600
LEAST_STEPS = 12  # fewer tell nothing of their noise
SEED = 20140111  # of the draws: the same runs compare equally each time
Sampled = NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """The standard error of an estimate, and by how many independent pieces less one it is known."""

    error: float
    freedom: float

    @property
    def half_width(self) -> float:
        """Half of the interval that holds the truth in 95 of 100 cases, by Student's t."""
        return self.error * t95(self.freedom)

    def sure(self, difference: float) -> float:
        """Return how sure it is that a difference has its sign: 0.5 to 1."""
        if self.error <= 0:
            return 0.5 if difference == 0 else 1.0
        z = abs(difference) * Z95 / self.half_width
        return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def t95(freedom: float) -> float:
    """Return Student's t of a two-sided 95 % interval, within 2 % from 2 on (Cornish and Fisher's expansion)."""
    v, z = freedom, Z95
    if v < 3:
        return 12.706 if v < 2 else 4.303
    terms = (z**3 + z) / 4 / v + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / v**2
    return z + terms + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / v**3


def detrended(values: Sampled) -> Sampled:
    """Return the values less the straight line through them."""
    x = np.arange(len(values), dtype=np.float64) - (len(values) - 1) / 2
    slope = float(x @ values) / float(x @ x)
    left: Sampled = values - values.mean() - slope * x
    return left


def block_length(noise: Sampled) -> int:
    """Return how many neighbours are drawn together."""
    n, power = len(noise), float(noise @ noise)
    if power <= 0:
        return 1
    correlation = min(0.97, max(0.0, float(noise[1:] @ noise[:-1]) / power + 2 / n))
    length = (math.sqrt(6) * correlation / (1 - correlation**2)) ** (2 / 3) * n ** (1 / 3)
    return max(1, min(n // 4, math.ceil(length)))


def noise_of(values: Sampled, of: Callable[[Sampled], Sampled] = lambda drawn: drawn.mean(axis=1)) -> Noise | None:
    """Return the noise of a statistic of values in order, the mean by default; None of too few.

    `of` takes rows of draws and gives one figure a row.
    """
    values = values[np.isfinite(values)]
    if len(values) < LEAST_STEPS:
        return None
    noise = detrended(values)
    length = block_length(noise)
    blocks = math.ceil(len(noise) / length)
    draw = np.random.default_rng(SEED)
    starts = draw.integers(0, len(noise) - length + 1, size=(DRAWS, blocks, 1))
    drawn = noise[starts + np.arange(length)].reshape(DRAWS, -1)[:, : len(noise)]
    freedom = max(1.0, len(noise) / length - 2)  # of the mean, and of the line
    error = float(np.std(of(drawn))) * math.sqrt((freedom + 2) / freedom)
    return Noise(error, freedom)


def between_runs(groups: Sequence[Sequence[float]], first: int, second: int) -> Noise | None:
    """Return the noise of the difference of two groups' means, from how runs of a group differ; None where none can.

    Runs of a group differ by their seed alone. Groups of one run are taken to be as noisy as the others.
    """
    spread = sum(sum((value - math.fsum(own) / len(own)) ** 2 for value in own) for own in groups if len(own) > 1)
    freedom = sum(len(own) - 1 for own in groups)
    if not freedom:
        return None
    variance = spread / freedom
    return Noise(math.sqrt(variance * (1 / len(groups[first]) + 1 / len(groups[second]))), float(freedom))
