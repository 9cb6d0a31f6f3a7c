"""A node's sample made of what its sensors read: the ranks' numbers as least, median and most. Torch-free.

A record has the same size however many ranks there are; numbers of single ranks are kept of those that stand out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from paceline.run.observe.sensors.sensor_reading import SensorReading
from paceline.spec.journal.watching import NodeSample

HOT_CELSIUS = 87.0  # from which on GPUs of data centres begin to cut their clocks
FULL_SHARE = 0.97  # of a device's memory, or of the host's
MOST_DETAILED = 8  # ranks that stand out whose numbers one record keeps


def node_sample(
    reading: SensorReading,
    node: str,
    ranks: Sequence[int],
    step: int,
    seconds: float,
    detail: bool,
    devices: Sequence[str] = (),
) -> NodeSample:
    """Return the record of what was read of a node since the sample before; `devices` are the UUIDs of its GPUs."""
    names = dict.fromkeys(name for own in reading.ranks.values() for name in own)
    signals = {name: over_ranks({rank: own[name] for rank, own in reading.ranks.items() if name in own})
               for name in names}  # fmt: skip
    said = {rank: words for rank, own in reading.ranks.items() if (words := outstanding(own))}
    host = outstanding_host(reading.host)
    kept = reading.ranks if detail else {rank: reading.ranks[rank] for rank in list(said)[:MOST_DETAILED]}
    return NodeSample(
        step=step,
        node=node,
        seconds=seconds,
        ranks=tuple(ranks),
        signals=signals,
        host=dict(reading.host),
        absent=dict(reading.absent),
        flagged=(*host, *(f"rank {rank} {word}" for rank, words in said.items() for word in words)),
        detail={str(rank): _short(own) for rank, own in kept.items()} or None,
        devices=tuple(devices) or None,
    )


def over_ranks(values: Mapping[int, float]) -> dict[str, object]:
    """Return the least, the median and the most of the ranks' values, and the rank of the most."""
    worst = max(values, key=lambda rank: values[rank])
    each = list(values.values())
    return _short({"min": min(each), "median": statistics.median(each), "max": values[worst], "rank": worst})


def outstanding(own: Mapping[str, float]) -> list[str]:
    """Return what stands out of one rank's numbers, in words."""
    found = []
    if own.get("throttled"):
        found.append("throttled")
    if own.get("celsius", 0.0) >= HOT_CELSIUS:
        found.append(f"hot ({own['celsius']:.0f} °C)")
    if own.get("memory_share", 0.0) >= FULL_SHARE:
        found.append(f"nearly full ({own['memory_share']:.0%} of the device's memory)")
    return found


def outstanding_host(host: Mapping[str, float]) -> list[str]:
    """Return what stands out of the node's own numbers, in words."""
    found = ["processor throttled"] if host.get("throttled") else []
    whole, free = host.get("memory_bytes"), host.get("memory_available_bytes")
    if whole and free is not None and 1 - free / whole >= FULL_SHARE:
        found.append(f"memory nearly full ({1 - free / whole:.0%} in use)")
    return found


def _short(values: Mapping[str, float]) -> dict[str, object]:
    """Return numbers with as many digits as sensors have: the journal is read by people too."""
    return {name: value if isinstance(value, int) else float(f"{value:.6g}") for name, value in values.items()}
