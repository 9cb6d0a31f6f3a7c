"""The loss that further steps would reach: a power law c + a s^-b of the step s through a run's own curve.

The curve is cut into bins of steps that grow by the same factor; a bin's value is the median of its losses, and counts
by how many they are. What is told is the level of the loss, not one noisy step's. Nothing is told of a curve that is
shorter than LEAST_STEPS, farther ahead than FARTHEST times the steps made, or where the law, fitted without the last
part of the curve, does not foretell that part: a learning rate that fell meanwhile, or a run that diverges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EXPONENTS = np.linspace(0.05, 1.5, 30)  # of the power laws that are tried
BINS, LEAST_STEPS = 40, 200
LEFT_OUT = 0.3  # of the bins, that the law must foretell
OFF = 0.02  # of the loss, that it may be off by there, beside what the curve's noise explains
SCATTER = 3.0  # deviations of a bin that its noise explains: there are a dozen of them
FARTHEST = 3.0  # times the steps made, beyond which nothing is foretold
DEVIATIONS = 2.0  # of what is fitted, on either side: 95 of 100 for errors of a normal distribution


@dataclass(frozen=True)
class ExpectedLoss:
    """The level of a loss at a later step, and between which values it is expected in 19 of 20 cases."""

    step: float
    loss: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """The expected loss in words."""
        return f"a loss of about {self.loss:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class _Curve:
    """Bins of a curve: mean step, median loss, number of losses."""

    steps: NDArray[np.float64]
    losses: NDArray[np.float64]
    counts: NDArray[np.float64]

    def first(self, bins: int) -> _Curve:
        return _Curve(self.steps[:bins], self.losses[:bins], self.counts[:bins])


def expected_loss(steps: NDArray[np.float64], losses: NDArray[np.float64], further: float) -> ExpectedLoss | None:
    """Return what the loss comes to after so many further steps; None where the curve is no sound ground for it."""
    known = np.isfinite(losses) & np.isfinite(steps) & (steps > 0)
    steps, losses = steps[known], losses[known]
    if len(steps) < LEAST_STEPS or further > FARTHEST * steps.max():
        return None
    curve, at = _binned(steps, losses), float(steps.max() + further)
    bins = len(curve.steps)
    first = max(5, int(bins * (1 - LEFT_OUT)))
    if bins - first < 3:
        return None
    earlier = _laws(curve.first(first))
    off = curve.losses[first:] - earlier.best(curve.steps[first:])
    scatter = SCATTER * np.sqrt(earlier.noise / curve.counts[first:])
    if (np.abs(off) > OFF * np.abs(curve.losses[first:]) + scatter).any():
        return None
    laws = _laws(curve)
    loss, low, high = laws.between(at)
    missed = _missed(off, curve, first, at)
    if not math.isfinite(loss) or not 0 < loss <= curve.losses[-1] * (1 + OFF):
        return None
    return ExpectedLoss(at, loss, max(0.0, float(low) - missed), float(high) + missed)


def _missed(off: NDArray[np.float64], curve: _Curve, first: int, at: float) -> float:
    """Return by how much a law may be off that far ahead, as one of the earlier bins was for the later ones.

    It is their mean error, which noise leaves near zero, times how much farther the step lies.
    """
    steps, counts = curve.steps, curve.counts[first:]
    mean = abs(float((off * counts).sum() / counts.sum()))
    return mean * max(1.0, math.log(at / steps[-1]) / math.log(steps[-1] / steps[first - 1]))


def _binned(steps: NDArray[np.float64], losses: NDArray[np.float64]) -> _Curve:
    edges = np.unique(np.geomspace(1, steps.max() + 1, BINS).astype(int))
    places = np.digitize(steps, edges)
    bins = [places == place for place in np.unique(places)]
    return _Curve(
        np.array([steps[each].mean() for each in bins]),
        np.array([np.median(losses[each]) for each in bins]),
        np.array([float(each.sum()) for each in bins]),
    )


@dataclass(frozen=True)
class _Laws:
    """Power laws that a curve allows, each of another exponent: (c, a, b), and how sure c and a are."""

    found: tuple[tuple[float, float, float, NDArray[np.float64]], ...]  # the best first
    noise: float  # the variance of one loss, as the bins scatter about the best law

    def best(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        c, a, b, _ = self.found[0]
        return c + a * x**-b

    def between(self, step: float) -> tuple[float, float, float]:
        """Return what the best law says, and the lowest and highest value that any of them allows."""
        low, high = math.inf, -math.inf
        for c, a, b, covariance in self.found:
            at = np.array([1.0, step**-b])
            value, error = c + a * at[1], DEVIATIONS * math.sqrt(max(0.0, float(at @ covariance @ at)))
            low, high = min(low, value - error), max(high, value + error)
        return float(self.best(np.array([step]))[0]), low, high


def _laws(curve: _Curve) -> _Laws:
    """Return the law of least squares, and those of other exponents that fit nearly as well."""
    x, y, weights = curve.steps, curve.losses, curve.counts
    powers = x[None, :] ** -EXPONENTS[:, None]
    whole, first, second = weights.sum(), powers @ weights, powers**2 @ weights
    values, products = float(weights @ y), powers @ (weights * y)
    determinant = whole * second - first**2
    a = (whole * products - first * values) / determinant
    c = (values - first * a) / whole
    errors = ((c[:, None] + a[:, None] * powers - y) ** 2) @ weights
    order = np.argsort(errors)
    noise = float(errors[order[0]]) / max(1, len(x) - 3)
    allowed = [each for each in order if errors[each] <= errors[order[0]] + DEVIATIONS**2 * noise]
    inverse = [np.array([[second[k], -first[k]], [-first[k], whole]]) / determinant[k] for k in allowed]
    laws = ((float(c[k]), float(a[k]), float(EXPONENTS[k])) for k in allowed)
    return _Laws(tuple((*law, noise * each) for law, each in zip(laws, inverse, strict=True)), noise)
