"""The carbon of electricity that `run.when` states, as a figure of the cluster: the mean of the hours of a run."""

from __future__ import annotations

import dataclasses
import math
import time

from paceline.cluster.grid.figures import FixedFigure, mean_of
from paceline.cluster.grid.window import YEAR_SECONDS, window_of
from paceline.spec.cluster import Cluster, ClusterSpec, Figure
from paceline.spec.watch.when import WhenSpec

DAY_SECONDS = 86400.0  # that a run is taken to last until its forecast is known


def changes_by_hour(cluster: ClusterSpec, when: WhenSpec) -> bool:
    """Return whether the carbon of a run depends on the hours in which it trains."""
    return _is_stated(cluster, when) and not isinstance(window_of(when).carbon, FixedFigure)


def with_carbon(
    cluster: Cluster, spec: ClusterSpec, when: WhenSpec, seconds: float = DAY_SECONDS, now: float | None = None
) -> Cluster:
    """Return the cluster with the carbon that `run.when` states, where the cluster's own table states none.

    It is the mean of the hours in which a run of so many seconds trains, begun now. Where an hour of them is unknown,
    the cluster's figure stays: its region's average, or none. Raises ConfigError for figures that cannot be had.
    """
    if not _is_stated(spec, when):
        return cluster
    window, now = window_of(when), time.time() if now is None else now
    seconds = seconds if math.isfinite(seconds) and seconds > 0 else DAY_SECONDS
    ends = now + min(seconds, YEAR_SECONDS)
    grams = window.waiting(now, seconds).carbon if when.window else mean_of(window.carbon, now, ends)
    if math.isnan(grams):
        return cluster
    of = "" if isinstance(window.carbon, FixedFigure) else ", mean of the hours of the run"
    return dataclasses.replace(cluster, carbon_g_per_kwh=Figure(grams, "published", f"{window.carbon.source}{of}"))


def _is_stated(cluster: ClusterSpec, when: WhenSpec) -> bool:
    return bool(when.carbon) and cluster.carbon_g_per_kwh is None
