"""Outcome: what a simulated run came to, and what many of them say together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.simulate.events import KINDS, LOST, PRODUCTIVE, Instant, Stretch


@dataclass(frozen=True)
class RunOutcome:
    """One simulated run. `seconds` holds where its wall time went, kind by kind; they add up to `wall_seconds`."""

    wall_seconds: float
    finished: bool
    seconds: Mapping[str, float]
    interruptions: Mapping[str, int]  # by cause; those that stopped the job
    planned_stops: int
    held_node_seconds: float  # paid for: active and spare nodes, not those in repair
    busy_node_seconds: float  # computing or saving
    spans: tuple[Stretch, ...] = ()
    instants: tuple[Instant, ...] = ()

    @property
    def goodput(self) -> float:
        """The part of wall time that training would have taken at full speed without any interruption."""
        return self.seconds[PRODUCTIVE] / self.wall_seconds if self.wall_seconds else 1.0

    @property
    def failures(self) -> int:
        """Unexpected interruptions of all causes."""
        return sum(self.interruptions.values())


@dataclass(frozen=True)
class Spread:
    """A quantity over many simulated runs: mean, standard deviation, and the 10th, 50th and 90th percentile."""

    mean: float
    deviation: float
    p10: float
    p50: float
    p90: float


def spread(values: Sequence[float]) -> Spread:
    """Return what the values look like together; NaN throughout where one is unknown."""
    if not all(math.isfinite(value) for value in values):
        return Spread(math.nan, math.nan, math.nan, math.nan, math.nan)
    ordered = sorted(values)
    import statistics  # every plan loads this module, and few simulate

    deviation = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
    p10, p50, p90 = (_quantile(ordered, share) for share in (0.1, 0.5, 0.9))
    return Spread(statistics.fmean(ordered), deviation, p10, p50, p90)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, between two of them in proportion."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class NodeCosts:
    """What a node costs an hour, and what it draws while its job computes and while it waits; NaN where unknown."""

    usd_per_hour: float = math.nan
    computing_watts: float = math.nan
    waiting_watts: float = math.nan


@dataclass(frozen=True)
class PolicySummary:
    """What many runs of one policy say together."""

    runs: int
    finished: int
    wall_seconds: Spread
    goodput: Spread
    interruptions: Spread
    lost_seconds: Spread
    usd: Spread
    kwh: Spread
    seconds: Mapping[str, float]  # mean seconds of each kind
    by_cause: Mapping[str, float]  # mean interruptions of each cause, most frequent first


def summarise(outcomes: Sequence[RunOutcome], costs: NodeCosts) -> PolicySummary:
    """Return the runs' spread; money and energy are NaN where price or power are.

    Nodes are paid for while they are held, spares included, and draw power for computing or for waiting. Those in
    repair are neither.
    """
    causes = sorted({name for outcome in outcomes for name in outcome.interruptions})
    import statistics

    mean = {name: statistics.fmean(outcome.interruptions.get(name, 0) for outcome in outcomes) for name in causes}
    return PolicySummary(
        runs=len(outcomes),
        finished=sum(outcome.finished for outcome in outcomes),
        wall_seconds=spread([outcome.wall_seconds for outcome in outcomes]),
        goodput=spread([outcome.goodput for outcome in outcomes]),
        interruptions=spread([outcome.failures for outcome in outcomes]),
        lost_seconds=spread([outcome.seconds[LOST] for outcome in outcomes]),
        usd=spread([outcome.held_node_seconds / 3600 * costs.usd_per_hour for outcome in outcomes]),
        kwh=spread([_joules(outcome, costs) / 3.6e6 for outcome in outcomes]),
        seconds={kind: statistics.fmean(outcome.seconds[kind] for outcome in outcomes) for kind in KINDS},
        by_cause=dict(sorted(mean.items(), key=lambda item: -item[1])),
    )


def _joules(outcome: RunOutcome, costs: NodeCosts) -> float:
    waiting = outcome.held_node_seconds - outcome.busy_node_seconds
    return outcome.busy_node_seconds * costs.computing_watts + waiting * costs.waiting_watts
