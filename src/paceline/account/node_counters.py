"""Energy by the counters of a run's nodes: joules that GPUs, and processors with their memory, say they took.

It is of whole nodes: what others do on a node is in it too. Power supplies, fans and disks are not, where processors
have counters; where GPUs alone have, the power model says what the rest of the node takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.account.node_use import NodeUse
from paceline.history.records import number, table, text
from paceline.spec.journal.kinds import RunStarted
from paceline.spec.journal.rates import JOULES_PER_KWH
from paceline.spec.journal.watching import NodeSample

LEAST_SHARE = 0.8  # of a stretch's device-time that samples have to cover
NOT_SAMPLED = "(not sampled)"
COUNTERS = {"device_joules": "GPUs", "cpu_joules": "processors"}


@dataclass(frozen=True)
class MeteredRate:
    """Energy per device-second of a stretch of time, as counters say it, and what they do not see of the nodes."""

    kwh: float  # of both
    counters_kwh: float
    how: str  # which counters, and what was added


def measured_rate(
    samples: Sequence[NodeSample],
    began: float,
    ended: float,
    devices: int,
    cluster: Mapping[str, object],
    use: NodeUse | None = None,
) -> MeteredRate | None:
    """Return kWh per device-second of a stretch of time by the counters of the nodes of a `cluster`, and how.

    None where samples do not cover the stretch, or the devices themselves have no counter: then the power model is
    better than a part of the truth. What processors took is shared out by `use` among the runs that a node had at once.
    Where GPUs have counters and processors none, the rest of the node is the power model's, as in a forecast.
    """
    needed = "cpu_joules" if is_on_cpu(cluster) else "device_joules"
    within = [(each, overlap) for each in samples if (overlap := _within(each, began, ended)) > 0]
    joules = covered = unseen = 0.0
    seen: dict[str, None] = {}
    shares = device_shares([each for each, _ in within])
    for sample, seconds in within:
        own = {name: value for name in COUNTERS if (value := sample.host.get(name)) is not None}
        if needed not in own:
            continue
        of_run = 1.0 if use is None else use.share(sample)
        share = shares.get((sample.attempt, sample.node), 1.0)
        spent = sum(value * (of_run if name == "cpu_joules" else 1.0) for name, value in own.items())
        joules += spent * share * seconds / (sample.seconds or seconds)
        covered += seconds * len(sample.ranks or ())
        if "cpu_joules" not in own:
            unseen += seconds * share * len(sample.devices or sample.ranks or ())
        seen.update(dict.fromkeys(own))
    if covered <= 0 or covered < LEAST_SHARE * devices * (ended - began):
        return None
    counters = joules / covered / JOULES_PER_KWH
    watts = rest_of_node_watts(cluster)
    rest = watts * unseen / covered / JOULES_PER_KWH
    how = f"measured by the counters of {' and '.join(COUNTERS[name] for name in COUNTERS if name in seen)}"
    if rest > 0:
        how += f", and {watts:.0f} W a device for the rest of the node, as the forecast counts it"
    return MeteredRate(counters + rest, counters, how)


def device_shares(samples: Iterable[NodeSample]) -> dict[tuple[int | None, str], float]:
    """Return by start and node which part of its devices is the node's own, where devices are known by their UUIDs.

    Two nodes that share a device each have half of it: both read the same counter, and are one machine.
    """
    holders: dict[tuple[int | None, str], set[str]] = {}
    held: dict[tuple[int | None, str], set[str]] = {}
    for sample in samples:
        for device in sample.devices or ():
            holders.setdefault((sample.attempt, device), set()).add(sample.node)
            held.setdefault((sample.attempt, sample.node), set()).add(device)
    return {
        (attempt, node): math.fsum(1 / len(holders[attempt, device]) for device in own) / len(own)
        for (attempt, node), own in held.items()
    }


def rest_of_node_watts(cluster: Mapping[str, object]) -> float:
    """Return what a forecast counts for the node around a device that computes: its figure less what it may draw.

    The catalog's is the TDP times the host share of `cluster/catalog/power.py`. 0 where the two are not known apart.
    """
    whole = number(table(cluster.get("watts_per_device")).get("value"))
    device = number(table(cluster.get("device")).get("rated_watts"))
    return max(0.0, whole - device) if whole is not None and device is not None else 0.0


def is_on_cpu(cluster: Mapping[str, object]) -> bool:
    """Return whether a cluster's devices are CPUs."""
    device = table(cluster.get("device"))
    return text(device.get("kind")) == "cpu" or text(device.get("name")) == "cpu"


def _within(sample: NodeSample, began: float, ended: float) -> float:
    last = sample.time or 0.0
    return min(last, ended) - max(last - (sample.seconds or 0.0), began)


def node_shares(samples: Sequence[NodeSample], start: RunStarted, began: float, ended: float) -> dict[str, float]:
    """Return which part of a stretch's device-time each node has, by how many ranks its samples have; they add up to 1.

    Where nothing was sampled a run on one node is its host's, and nobody knows whose one on several is.
    """
    seconds: dict[str, float] = {}
    for sample in samples:
        if (within := _within(sample, began, ended)) > 0 and sample.ranks:
            seconds[sample.node] = seconds.get(sample.node, 0.0) + within * len(sample.ranks)
    total = sum(seconds.values())
    if total > 0:
        return {node: own / total for node, own in seconds.items()}
    count = number(table(table(start.spec.get("run")).get("nodes")).get("count")) or 1
    return {start.host if count == 1 and start.host else NOT_SAMPLED: 1.0}
