"""Limits: the deadline and the budget of a run, which plans keep both, and how likely a plan keeps them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.cluster.store import probe_command
from paceline.errors import ConfigError
from paceline.plan.cost.columns import Flags
from paceline.plan.risk.chance import normal_tail
from paceline.plan.search.values import Values
from paceline.spec.cluster import Cluster
from paceline.spec.forecast import Z80, Estimate, Forecast
from paceline.units import format_durations, format_seconds, format_usd


@dataclass(frozen=True)
class Limits:
    """What a run may take at most: seconds and USD of wall time, of which the part `goodput` is training."""

    deadline: float | None
    budget_usd: float | None
    steps: int
    goodput: float = 1.0

    @property
    def stretch(self) -> float:
        """How much longer the run is than its training alone; infinity where failures leave it no time at all."""
        return 1 / self.goodput if self.goodput > 0 else math.inf

    @property
    def names(self) -> str:
        """The limits there are, in words."""
        stated = [format_seconds(self.deadline) + " deadline"] if self.deadline is not None else []
        stated += [f"{format_usd(self.budget_usd)} budget"] if self.budget_usd is not None else []
        return " and ".join(stated)

    def keeps(self, values: Values, cluster: Cluster) -> Flags:
        """Return which plans keep the limits, by their expected values.

        Raises ConfigError where a limit stands on a figure that is unknown of every plan.
        """
        kept = np.ones(len(values), dtype=bool)
        if self.deadline is not None:
            if len(values) and not np.isfinite(values.time).any():
                command = probe_command(cluster.device.kind, cluster.devices_per_node)
                raise ConfigError(
                    f"plan.deadline = '{format_seconds(self.deadline)}' cannot be checked",
                    f"the time of a step on {cluster.device.name} is unknown",
                    f"`{command}` on such a machine, or leave plan.deadline unset",
                )
            kept &= values.time * self.steps * self.stretch <= self.deadline
        if self.budget_usd is not None:
            if len(values) and not np.isfinite(values.money).any():
                raise ConfigError(
                    f"plan.budget_usd = {self.budget_usd:g} cannot be checked",
                    cluster.price_usd_per_device_hour.note or "the price of a device is unknown",
                    "--set cluster.price_usd_per_device_hour=2.5, or leave plan.budget_usd unset",
                )
            kept &= (values.money * self.stretch <= self.budget_usd) if self.goodput > 0 else False
        return kept

    def refusal(self, forecast: Forecast) -> str:
        """Return which limits a plan does not keep, in numbers."""
        broken = []
        losses = f" (goodput {self.goodput:.1%})" if self.goodput < 1 else ""
        if not self.goodput > 0:
            return f"never ends: failures leave it no time to train (goodput {self.goodput:.1%})"
        seconds, usd = forecast.run_seconds.value * self.stretch, forecast.usd.value * self.stretch
        if self.deadline is not None and not seconds <= self.deadline:
            takes, most = format_durations(seconds, self.deadline)
            broken.append(f"takes {takes}{losses}: the deadline is {most}")
        if self.budget_usd is not None and not usd <= self.budget_usd:
            steps = math.floor(self.steps * self.budget_usd / usd) if math.isfinite(usd) else 0
            pays = f"pays for {steps:,} of {self.steps:,} steps"
            broken.append(f"costs {format_usd(usd)}{losses}: the budget of {format_usd(self.budget_usd)} {pays}")
        return ", and ".join(broken)

    def fix(self, cluster: Cluster) -> str:
        """Return what to try where no plan keeps the limits."""
        if not self.goodput > 0:
            return "fewer devices, or machines that fail less often (cluster.reliability)"
        if cluster.paces:
            return "more or faster devices in cluster.groups, a later deadline or a larger budget"
        doubled = f"`paceline plan --devices {cluster.devices},{2 * cluster.devices},{4 * cluster.devices}`"
        if self.budget_usd is None:
            return f"more devices ({doubled} compares), or a later deadline"
        cheaper = "`paceline plan --device NAME,NAME` compares devices"
        if self.deadline is None:
            return f"fewer or cheaper devices ({cheaper}), an earlier task.stop, or a larger budget"
        return f"other devices ({cheaper}, {doubled} their number), a later deadline or a larger budget"


def chance_within(estimate: Estimate, limit: float, value: float | None = None) -> float:
    """Return the chance that an estimate's truth is at most `limit`, log-normal to either side by its 80 % interval.

    `value` is what the estimate's value has become since, with the same relative interval. NaN if it is unknown.
    """
    middle = estimate.value if value is None else value
    if math.isinf(middle):  # a run that never ends
        return 0.0
    if not (math.isfinite(middle) and math.isfinite(estimate.high)):
        return math.nan
    if middle <= 0:  # a run on devices that cost nothing
        return float(middle <= limit)
    later = middle <= limit
    width = math.log(estimate.high / estimate.value if later else estimate.value / estimate.low)
    if width <= 0:
        return float(later)
    return float(normal_tail(np.array(-math.log(limit / middle) / width * Z80)))
