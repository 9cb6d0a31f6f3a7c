"""The batch that the gradient noise scale asks for, as one device measures it, written from the definition.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1. With the squared gradient norms g of the first b samples of a
batch and G of all B of them, at the same weights: noise S = (g - G) / (1 / b - 1 / B), signal = (B G - b g) / (B - b).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.spec.steps.growth import GrowthSpec

PART = 8  # of the batch, that the small one is


@dataclass(frozen=True)
class NoiseEstimate:
    """What a batch has grown by: means of S and of the signal, each with the size of what was subtracted to get it."""

    noise: float
    signal: float
    noise_size: float
    signal_size: float


@dataclass
class NoiseScale:
    """The samples of every step so far and of the one that comes; `decided` are the estimates by 1-based step."""

    growth: GrowthSpec
    sizes: list[int]
    decided: dict[int, NoiseEstimate] = field(default_factory=dict)
    _pairs: list[tuple[float, float, int, int]] = field(default_factory=list)  # g, G, b, B

    def small(self) -> int:
        """Return how many samples the small batch of the coming step has; 0 where nothing is measured."""
        samples, largest = self.sizes[-1], self.growth.largest
        assert largest is not None
        return 0 if samples >= largest.value or samples < 2 else max(1, samples // PART)

    def after(self, small: int, small_norm: float, norm: float) -> None:
        """Take the norms of a step, and work out the batch of the next one."""
        samples, largest = self.sizes[-1], self.growth.largest
        assert largest is not None
        if small:
            self._pairs = [*self._pairs, (small_norm**2, norm**2, small, samples)][-self.growth.measurements :]
        following = samples
        if small and len(self._pairs) == self.growth.measurements:
            found = self._estimate()
            scale = found.noise / found.signal if found.signal > 0 else math.inf
            if scale >= self.growth.noise_ratio * samples:
                self.decided[len(self.sizes)] = found
                following, self._pairs = min(2 * samples, int(largest.value)), []
        self.sizes.append(following)

    def _estimate(self) -> NoiseEstimate:
        count = len(self._pairs)
        inverse = [1 / b - 1 / samples for _, _, b, samples in self._pairs]
        rest = [samples - b for _, _, b, samples in self._pairs]
        each = list(zip(self._pairs, inverse, rest, strict=True))
        return NoiseEstimate(
            noise=sum((g - whole) / by for (g, whole, _, _), by, _ in each) / count,
            signal=sum((samples * whole - b * g) / left for (g, whole, b, samples), _, left in each) / count,
            noise_size=sum((g + whole) / by for (g, whole, _, _), by, _ in each) / count,
            signal_size=sum((samples * whole + b * g) / left for (g, whole, b, samples), _, left in each) / count,
        )
