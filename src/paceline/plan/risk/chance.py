"""Chances from intervals: how likely a value known by its 80 % and 95 % intervals passes a limit.

Errors are ratios. Between the ends of the intervals the number of standard deviations is linear in the logarithm of the
ratio, so that both intervals hold what they say; where the wide one is a normal distribution's, this is the log-normal.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.spec.forecast import Z80, Z95

Floats = NDArray[np.float64]
Width = TypeVar("Width", float, NDArray[np.float64])

# Abramowitz & Stegun 1964, formula 7.1.26 of the error function: off by 1.5e-7 at most.
ERF_SCALE = 0.3275911
ERF_TERMS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def normal_tail(deviations: Floats) -> Floats:
    """Return the chance that a standard normal variable exceeds each of `deviations`."""
    x = np.abs(deviations) / math.sqrt(2)
    t = 1 / (1 + ERF_SCALE * x)
    series = t * (ERF_TERMS[0] + t * (ERF_TERMS[1] + t * (ERF_TERMS[2] + t * (ERF_TERMS[3] + t * ERF_TERMS[4]))))
    beyond = series * np.exp(-(x**2)) / 2
    found: Floats = np.where(deviations < 0, 1 - beyond, beyond)
    return found


def chance_above(value: Floats, limit: float, width80: Floats | float, width95: Floats | float) -> Floats:
    """Return the chance that the truth of each value is above the limit; 0 where either is unknown.

    `width80` and `width95` are the half-widths of the intervals as logarithms of ratios; of 0 the value is certain.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.log(limit / value)
        narrow = np.asarray(width80, dtype=np.float64)
        slope = (Z95 - Z80) / np.maximum(np.asarray(width95) - narrow, 1e-12)
        size = np.abs(room)
        deviations = np.where(size <= narrow, Z80 * size / narrow, Z80 + (size - narrow) * slope)
    tails = normal_tail(np.copysign(np.nan_to_num(deviations, nan=0.0, posinf=40.0), room))
    found: Floats = np.where(np.isfinite(room), tails, 0.0)
    return found


def margin(chance: float, width80: Width, width95: Width) -> Width:
    """Return the logarithm of the ratio to a value that its truth exceeds with this chance, of at most one half."""
    deviations = _quantile(chance)
    if deviations <= Z80:
        return width80 * deviations / Z80
    return width80 + (deviations - Z80) * (width95 - width80) / (Z95 - Z80)


def _quantile(chance: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(1 - chance)
