"""Energy by the counters of a run's nodes: joules that GPUs, and processors with their memory, say they took.

It is of whole nodes: what others do on a node is in it too. Power supplies, fans and disks are not.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.account.node_use import NodeUse
from paceline.report.records import number, table
from paceline.spec.journal.kinds import RunStarted
from paceline.spec.journal.rates import JOULES_PER_KWH
from paceline.spec.journal.watching import NodeSample

LEAST_SHARE = 0.8  # of a stretch's device-time that samples have to cover
NOT_SAMPLED = "(not sampled)"
COUNTERS = {"device_joules": "GPUs", "cpu_joules": "processors"}


def measured_rate(
    samples: Sequence[NodeSample], began: float, ended: float, devices: int, on_cpu: bool, use: NodeUse | None = None
) -> tuple[float, str] | None:
    """Return kWh per device-second of a stretch of time, and which counters say so.

    None where samples do not cover the stretch, or the devices themselves have no counter: then the power model is
    better than a part of the truth. What processors took is shared out by `use` among the runs that a node had at once.
    """
    needed = "cpu_joules" if on_cpu else "device_joules"
    joules = covered = 0.0
    seen: dict[str, None] = {}
    for sample in samples:
        seconds, last = sample.seconds or 0.0, sample.time or 0.0
        within = min(last, ended) - max(last - seconds, began)
        if within <= 0 or sample.host.get(needed) is None:
            continue
        own = {name: value for name in COUNTERS if (value := sample.host.get(name)) is not None}
        whole = 1.0 if use is None else use.share(sample)
        spent = sum(value * (whole if name == "cpu_joules" else 1.0) for name, value in own.items())
        joules += spent * within / seconds
        covered += within * len(sample.ranks or ())
        seen.update(dict.fromkeys(own))
    if covered <= 0 or covered < LEAST_SHARE * devices * (ended - began):
        return None
    counters = " and ".join(COUNTERS[name] for name in COUNTERS if name in seen)
    return joules / covered / JOULES_PER_KWH, f"measured by the counters of {counters}"


def node_shares(samples: Sequence[NodeSample], start: RunStarted, began: float, ended: float) -> dict[str, float]:
    """Return which part of a stretch's device-time each node has, by how many ranks its samples have; they add up to 1.

    Where nothing was sampled a run on one node is its host's, and nobody knows whose one on several is.
    """
    seconds: dict[str, float] = {}
    for sample in samples:
        last = sample.time or 0.0
        within = min(last, ended) - max(last - (sample.seconds or 0.0), began)
        if within > 0 and sample.ranks:
            seconds[sample.node] = seconds.get(sample.node, 0.0) + within * len(sample.ranks)
    total = sum(seconds.values())
    if total > 0:
        return {node: own / total for node, own in seconds.items()}
    count = number(table(table(start.spec.get("run")).get("nodes")).get("count")) or 1
    return {start.host if count == 1 and start.host else NOT_SAMPLED: 1.0}
