"""What was seen of a run's nodes and of its training's health, as the report's lines say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.account.node_counters import device_shares
from paceline.spec.journal.rates import JOULES_PER_KWH
from paceline.spec.journal.watching import HealthSample, NodeSample
from paceline.units import format_bytes, format_count, plural


@dataclass(frozen=True)
class NodesSeen:
    """The peaks of all samples of all nodes in one line; `sensed` where a sensor gave heat or energy."""

    text: str = ""
    sensed: bool = False


def nodes_seen(samples: Sequence[NodeSample]) -> NodesSeen:
    """Return what samples of nodes had at most; without samples there is no text."""
    hottest, watts, joules, throttled, count = 0.0, 0.0, 0.0, 0, 0
    measured, resident, nodes = False, 0.0, set()
    shares = device_shares(samples)
    for sample in samples:
        count += 1
        nodes.add(sample.node)
        heat = [_most(sample, "celsius"), sample.host.get("celsius", 0.0)]
        hottest, watts = max(hottest, *heat), max(watts, _most(sample, "watts"))
        resident = max(resident, _most(sample, "resident_bytes"))
        throttled += bool(_most(sample, "throttled") or sample.host.get("throttled"))
        spent = [sample.host[name] for name in ("cpu_joules", "device_joules") if name in sample.host]
        measured, joules = measured or bool(spent), joules + sum(spent) * shares.get((sample.attempt, sample.node), 1.0)
    if not count:
        return NodesSeen()
    parts = [f"{format_bytes(resident)} resident in the largest rank"]
    parts += [f"{hottest:.0f} °C at most"] if hottest else []
    parts += [f"{watts:.0f} W at most in a device"] if watts else []
    parts += [f"{joules / JOULES_PER_KWH:.3g} kWh measured"] if measured else []
    parts += [f"throttled in {throttled} of {format_count(count)} samples"] if throttled else []
    return NodesSeen(f"{plural(len(nodes), 'node')}: {', '.join(parts)}", bool(hottest) or measured)


def health_lines(samples: Sequence[HealthSample], most: int = 3) -> list[str]:
    """Return what stood out of training, the last first; how often, where that is more than `most`."""
    told = [(sample.step, each) for sample in samples for each in sample.told]
    lines = [
        f"{each.get('detector')}{' in ' + str(each['block']) if each.get('block') else ''} in step {step}: "
        f"{each.get('evidence')}; try: {each.get('advice')}"
        for step, each in told[::-1][:most]
    ]
    return [*lines, f"and {len(told) - most} more: kind `health` of the journal"] if len(told) > most else lines


def _most(sample: NodeSample, name: str) -> float:
    value = (sample.signals.get(name) or {}).get("max")
    return float(value) if isinstance(value, int | float) else 0.0
