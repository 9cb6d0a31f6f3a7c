"""A Gaussian process over plans with few variances: what the residuals of finished runs say of other plans.

The residual of a run is log(measured / forecast). Residuals of two plans have the covariance s_i s_j k_ij, where s is
the standard deviation that the unlearnt forecast states of itself (its 80 % interval), and the kinship k is the sum of
the SHARES of what the two have in common: the machine always, then the task, the layout, and the whole plan. So the
posterior mean corrects a forecast the more, the more alike it is to what ran, and the posterior variance is what stays
open (Rasmussen & Williams 2006, equations 2.25 and 2.26).

A run on a machine that others were using tells nothing of the next one. Noise is Student's t with DEGREES degrees of
freedom: by the usual iteration, started from no correction at all, a run far from what its forecast can explain is
given more noise, and counts for little until others say the same (Lange, Little & Taylor 1989, doi:10.2307/2290063).
Where the residuals are larger than the forecasts' intervals said, all variances grow with them, as in a Student-t
process (Shah, Wilson & Ghahramani 2014, arXiv:1402.4306).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Of a forecast's variance, what is common to all plans of a machine, to those of one task, of one layout whatever the
# task, and to one plan of one task. They add up to 1.
SHARES = {"machine": 0.35, "task": 0.25, "layout": 0.15, "plan": 0.25}
RUN_NOISE = 0.03  # relative standard deviation between runs of one plan on one quiet machine
DEGREES = 4.0  # of freedom of the noise
LARGEST_LOG = math.log(3.0)  # no forecast is corrected by more than a factor of three
ITERATIONS = 100


@dataclass(frozen=True)
class Kinship:
    """What plans have in common with the runs: flags of whatever shape the comparison has."""

    task: NDArray[np.bool_] | Any
    layout: NDArray[np.bool_] | Any
    plan: NDArray[np.bool_] | Any

    @property
    def value(self) -> Floats:
        """The kinship k."""
        shared: Floats = SHARES["machine"] + (
            SHARES["task"] * np.asarray(self.task, dtype=np.float64)
            + SHARES["layout"] * np.asarray(self.layout, dtype=np.float64)
            + SHARES["plan"] * np.asarray(self.plan, dtype=np.float64)
        )
        return shared


@dataclass(frozen=True)
class Fitted:
    """What was learnt from residuals of runs: all that a posterior needs."""

    residuals: Floats
    spreads: Floats  # s of every run's forecast
    noise: Floats  # standard deviation of every run's noise, outliers' as far as they are
    inverse: Floats  # of the covariance of the residuals, noise included
    growth: float  # of all standard deviations

    def posterior(self, kinship: Floats, spreads: Floats) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of log(measured / forecast) of plans.

        `kinship` is (plan x run), `spreads` the s of every plan's own forecast. The noise of one more run is included.
        """
        covariance = kinship * self.spreads
        mean = spreads * (covariance @ (self.inverse @ self.residuals))
        explained = np.einsum("ij,jk,ik->i", covariance, self.inverse, covariance)
        left = spreads**2 * np.maximum(0.0, 1 - explained)
        return np.clip(mean, -LARGEST_LOG, LARGEST_LOG), self.growth * np.sqrt(left + RUN_NOISE**2)

    def apart(self, kinship: Floats, spreads: Floats, between: float) -> float:
        """Return the standard deviation of the difference of two plans' log(measured / forecast).

        `kinship` is (plan x run), `between` that of the two plans: what both have in common cancels.
        """
        covariance = kinship * self.spreads
        shared = np.array([[1.0, between], [between, 1.0]])
        left = np.outer(spreads, spreads) * (shared - covariance @ self.inverse @ covariance.T)
        return float(self.growth * np.sqrt(max(0.0, left[0, 0] + left[1, 1] - 2 * left[0, 1])))


def fit(residuals: Sequence[float], spreads: Sequence[float], noise: Sequence[float], kinship: Floats) -> Fitted:
    """Return what residuals of runs say. `spreads` and `noise` are standard deviations, `kinship` is (run x run)."""
    measured, known, quiet = (np.asarray(values, dtype=np.float64) for values in (residuals, spreads, noise))
    prior = known[:, None] * kinship * known
    loud, found = quiet, np.zeros_like(measured)
    for _ in range(ITERATIONS):
        loud = quiet * np.sqrt((DEGREES + ((measured - found) / quiet) ** 2) / (DEGREES + 1))
        loud = np.maximum(loud, quiet)  # a run that fits well is no better known for it
        before, found = found, prior @ np.linalg.solve(prior + np.diag(loud**2), measured)
        if np.allclose(before, found, rtol=0, atol=1e-6):
            break
    inverse = np.linalg.inv(prior + np.diag(loud**2)).astype(np.float64)
    surprise = float(measured @ inverse @ measured)
    growth = math.sqrt((DEGREES + surprise) / (DEGREES + len(measured)))
    return Fitted(measured, known, loud, inverse, max(1.0, growth))
