"""Interval: how often to save. Young's and Daly's formulas, and the exact mean and spread of a run's time.

All of it is for failures that come at random at a constant rate, also while the job recovers, with a mean time between
failures M; every failure costs the work since the last checkpoint and a recovery of R seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HOPELESS = 300.0  # intervals of so many mean times between failures: e^300 of them, which no run lives to see


def young_interval(stall_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds of work between checkpoints, sqrt(2 d M) (Young 1974, doi:10.1145/361147.361115)."""
    return math.sqrt(2 * stall_seconds * mtbf_seconds) if math.isfinite(mtbf_seconds) else math.inf


def daly_interval(stall_seconds: float, mtbf_seconds: float) -> float:
    """Return Daly's higher-order optimum (Daly 2006, doi:10.1016/j.future.2004.11.016, equation 37).

    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d where d < 2M, else M.
    """
    if not math.isfinite(mtbf_seconds):
        return math.inf
    ratio = stall_seconds / (2 * mtbf_seconds)
    if ratio >= 1:
        return mtbf_seconds
    return young_interval(stall_seconds, mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds


@dataclass(frozen=True)
class Moments:
    """Mean and variance of a time in seconds."""

    mean: float
    variance: float


def expected_time(
    work_seconds: float, every: float, stall: float, mtbf_seconds: float, recovery: float, write: float = 0.0
) -> Moments:
    """Return mean and variance of the time that `work_seconds` of work take, saved every `every` seconds.

    The mean is M e^(R/M) (e^((t + d)/M) - 1) per interval of t seconds of work and d of saving (Daly 2006, equation
    20), where nothing is saved after the last. Where a checkpoint is safe only `write` seconds after its stall, a
    failure in that time also loses the interval before, of which there are write / (t + d) in the mean: that part is of
    first order in (t + d) / M.
    """
    if max(min(every, work_seconds) + stall, recovery) / mtbf_seconds > HOPELESS:
        return Moments(math.inf, math.inf)
    if not math.isfinite(mtbf_seconds):
        saves = max(0, math.ceil(work_seconds / every - 1e-9) - 1) if math.isfinite(every) else 0
        return Moments(work_seconds + saves * stall, 0.0)
    every = min(every, work_seconds)
    whole = max(0, math.ceil(work_seconds / every - 1e-9) - 1)
    inner = _attempts(every + stall, mtbf_seconds, recovery)
    last = _attempts(work_seconds - whole * every, mtbf_seconds, recovery)
    mean, variance = whole * inner.mean + last.mean, whole * inner.variance + last.variance
    if write and whole:
        failures = whole * math.expm1((every + stall) / mtbf_seconds)
        mean += failures * write / (every + stall) * every
    return Moments(mean, variance)


def _attempts(seconds: float, mtbf: float, recovery: float) -> Moments:
    """Return the moments of getting through `seconds` without a failure, each failure costing a recovery.

    Attempts that fail number K, geometric with mean k = e^(s/M) - 1 and variance k (k + 1); each takes a time of the
    exponential distribution cut off at s, and the recovery that follows is itself such a row of attempts.
    """
    back = Moments(0.0, 0.0)
    if recovery:
        lost, count = _cut_exponential(recovery, mtbf), math.expm1(recovery / mtbf)
        back = Moments(
            recovery + count * lost.mean, count * lost.variance + count * (count + 1) * lost.mean * lost.mean
        )
    lost, count = _cut_exponential(seconds, mtbf), math.expm1(seconds / mtbf)
    one = Moments(lost.mean + back.mean, lost.variance + back.variance)
    return Moments(seconds + count * one.mean, count * one.variance + count * (count + 1) * one.mean * one.mean)


def _cut_exponential(limit: float, mean: float) -> Moments:
    """Return the moments of an exponential time that is known to be below `limit`."""
    ratio = limit / mean
    if ratio < 1e-4:  # uniform to that order; the closed form loses its digits there
        return Moments(limit / 2, limit * limit / 12)
    tail = limit / math.expm1(ratio)
    first = mean - tail
    second = 2 * mean * mean - tail * (limit + 2 * mean)
    return Moments(first, max(0.0, second - first * first))
