"""Sensitivity: what would change the choice. Each figure is varied alone, up to four times either way.

A kind of plan is a layout, a schedule, a mode of recompute and a ZeRO class. Of every kind that fits, the plan with
the best micro-batch takes part; of every kind that does not fit, the plan that needs the least memory. `elsewhere`
varies the number of devices, the batch and the length of samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from paceline.cluster.vary import varied_figures
from paceline.plan.choice import Choice
from paceline.plan.cost.columns import AXES, Columns, Flags, Floats, Ints
from paceline.plan.cost.memory.usable import usable_bytes
from paceline.plan.cost.pricing import memory_widths_of, needed_bytes
from paceline.plan.cost.rates import Rates
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.risk.chance import margin
from paceline.plan.risk.choice_switches import WIDEST, Sensitivity, Switch
from paceline.plan.risk.other_sizes import searched_switches
from paceline.plan.search.found import SearchResult
from paceline.plan.search.values import TIE_RATIO, Values, goal_values, values_of
from paceline.spec.cluster import FUSED_ADAMW_BYTES, Cluster, Device, Figure
from paceline.units import format_bytes

PRECISE = 1.1  # how closely the factor at which the choice changes is found
NEAR = 1.25  # times the best: a plan so near, now or at an end of a figure's range, may be best in between
HALVINGS = math.ceil(math.log2(math.log(WIDEST) / math.log(PRECISE)))
MEMORY_HALVINGS = 12  # more: to ask whether plans fit takes less time than to price them


@dataclass(frozen=True)
class Lineup:
    """Plans compared while a figure varies, the chosen one first, and the goal they are compared by."""

    context: PricedTask
    columns: Columns
    peaks: Floats
    weights: dict[str, float]
    risk: float

    def take(self, chosen: Flags) -> Lineup:
        """Return the plans that a mask chooses; the first is always kept."""
        kept = chosen.copy()
        kept[0] = True
        return dataclasses.replace(self, columns=self.columns.take(kept), peaks=self.peaks[kept])

    def values(self, cluster: Cluster) -> Values:
        """Return what the plans take on a cluster."""
        context = dataclasses.replace(self.context, cluster=cluster)
        return values_of(context, self.columns, self.peaks, usable_bytes(cluster))

    def fits(self, cluster: Cluster) -> Flags:
        """Return which plans fit a cluster's devices."""
        needed = self.peaks * np.exp(margin(self.risk, *memory_widths_of(self.context, self.columns)))
        return ~(needed > usable_bytes(cluster))

    def scores(self, values: Values, fits: Flags) -> Floats:
        """Return how well plans serve the goal, 1 being the best there could be; infinity for those that do not fit."""
        scores = np.full(len(values), np.inf)
        if fits.any():
            scores[fits] = goal_values(values.take(fits), self.weights)
        return scores


def sensitivity(planned: Choice) -> Sensitivity:
    """Return what would change the choice of a plan."""
    found, switches, steady = planned.search, [], []
    lineup = _lineup(found, planned.spec.plan.goal.weights, planned.spec.plan.memory_risk)
    for name, ends in (*_rates(lineup), *_memory(lineup), *searched_switches(planned)):
        switches += ends
        steady += [] if ends else [name]
    return Sensitivity(tuple(switches), tuple(steady))


def _lineup(found: SearchResult, weights: dict[str, float], risk: float) -> Lineup:
    context, fitting, large = found.candidates.context, found.candidates.columns, found.refused.too_large
    columns = fitting.take(_first_of_kinds(fitting)).joined(large.take(_first_of_kinds(large)))
    return Lineup(context, columns, needed_bytes(context, columns), weights, risk)


def _first_of_kinds(columns: Columns) -> Ints:
    fields = [getattr(columns, axis) for axis in AXES]
    fields += [columns.schedule, columns.virtual_stages, columns.recompute, columns.budget, columns.zero]
    fields.append(columns.whole_gradients)
    keys = np.zeros(len(columns), dtype=np.int64)
    for field in fields:  # numbers of a mixed base: unique over one column is fast
        different, which = np.unique(field, return_inverse=True)
        keys = keys * max(1, len(different)) + which
    return np.sort(np.unique(keys, return_index=True)[1])


def _rates(lineup: Lineup) -> Iterator[tuple[str, list[Switch]]]:
    """Yield what each rate of the cluster changes, among the plans that fit."""
    cluster = lineup.context.cluster
    here = lineup.scores(lineup.values(cluster), lineup.fits(cluster))
    among = lineup.take(here <= WIDEST * here[0])  # one rate makes no plan more than so many times faster than another
    here = here[here <= WIDEST * here[0]]
    for varied in varied_figures(cluster, lineup.columns.precision):

        def at(factor: float, lineup: Lineup = among, changed: Callable[[float], Cluster] = varied.cluster) -> Floats:
            other = calibrated_as(changed(factor), cluster.device)
            return lineup.scores(lineup.values(other), np.ones(len(lineup.peaks), dtype=bool))

        ends = []
        for end in (WIDEST, 1 / WIDEST):
            scores = at(end)
            if _keeps(scores):
                continue
            # Between here and there, none wins that is far behind at both ends.
            few = among.take((scores <= NEAR * np.min(scores)) | (here <= NEAR * here[0]))
            factor = _tipping(lambda factor, few=few: at(factor, few), end)  # type: ignore[misc]
            winner = int(np.argmin(at(factor, few)))
            gain = 1 - float(np.min(scores) / scores[0])
            plan = lineup.context.plan_of(few.columns, winner)
            ends.append(Switch(varied.name, factor, varied.text(factor), plan, gain, end))
        yield varied.name, ends


def _memory(lineup: Lineup) -> Iterator[tuple[str, list[Switch]]]:
    """Yield what more or less memory per device changes. Times do not depend on it, so that they are priced once."""
    cluster = lineup.context.cluster
    size = cluster.device.memory_bytes
    if not math.isfinite(size.value):
        return
    values = lineup.values(cluster)

    def at(factor: float) -> Floats:
        device = dataclasses.replace(cluster.device, memory_bytes=Figure(size.value * factor, size.source, size.note))
        other = dataclasses.replace(cluster, device=device)
        return lineup.scores(values, lineup.fits(other))

    ends = []
    for end in (WIDEST, 1 / WIDEST):
        scores = at(end)
        if _keeps(scores):
            continue
        factor = _tipping(at, end, MEMORY_HALVINGS)
        there = at(factor)
        plan = lineup.context.plan_of(lineup.columns, int(np.argmin(there))) if np.isfinite(there).any() else None
        gain = 1 - float(np.min(scores) / scores[0]) if np.isfinite(scores[0]) else None
        ends.append(Switch("memory of a device", factor, format_bytes(size.value * factor), plan, gain, end))
    yield "memory of a device", ends


def _keeps(scores: Floats) -> bool:
    """Return whether the chosen plan, the first, is still within a tie of the best."""
    return bool(np.isfinite(scores[0]) and scores[0] <= TIE_RATIO * np.min(scores))


def _tipping(at: Callable[[float], Floats], end: float, halvings: int = HALVINGS) -> float:
    """Return the factor nearest to 1 at which the chosen plan is no longer among the best, which it is not at `end`."""
    inside, outside = 0.0, math.log(end)
    for _ in range(halvings):
        middle = (inside + outside) / 2
        if _keeps(at(math.exp(middle))):
            inside = middle
        else:
            outside = middle
    return math.exp(outside)


def calibrated_as(cluster: Cluster, device: Device) -> Cluster:
    """Return the cluster with measured steps that depart from the sum of their parts as they did on `device`.

    A probe's steps hold at its rates: left alone they would take back what was varied.
    """
    if not device.calibration:
        return cluster
    steps = []
    for step in device.calibration:
        before, after = Rates(device, step.precision), Rates(cluster.device, step.precision)
        update = FUSED_ADAMW_BYTES * step.parameters / after.optimizer_rate.value
        modelled = (step.seconds - update) / after.ratio_of(step)
        steps.append(dataclasses.replace(step, seconds=before.ratio_of(step) * modelled + update))
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, calibration=tuple(steps)))
