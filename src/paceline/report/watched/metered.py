"""The energy of a run by the counters of nodes, where counters cover all starts of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.account.node_counters import measured_rate
from paceline.history.phases import Start
from paceline.history.records import Records, number, table
from paceline.report.format import quantity
from paceline.spec.journal.watching import NodeSample


@dataclass(frozen=True)
class MeteredEnergy:
    """What a run took, in kWh at the meter of the building, and how that is known."""

    kwh: float
    how: str
    is_estimate: bool  # whether a part of it is the power model's


def metered_energy(
    records: Records, nodes: Sequence[NodeSample], starts: Sequence[Start], devices: float | None
) -> MeteredEnergy | None:
    """Return the energy of a run's starts; None where the counters of one of them miss a part of its time.

    `nodes` are the samples of all nodes; `devices` is how many a start had that does not say so.
    """
    whole, counted, hows = [], [], dict[str, None]()
    for start in starts:
        held, cluster = start.world_size or int(devices or 0), records.start(start.number).cluster
        if start.started is None or start.ended is None or not start.seconds:
            continue
        found = measured_rate(nodes, start.started, start.ended, held, cluster)
        if found is None:
            return None
        building = number(table(cluster.get("pue")).get("value")) or 1.0
        spent = start.seconds * held * building
        whole.append(found.kwh * spent)
        counted.append(found.counters_kwh * spent)
        hows[found.how] = None
    if not whole:
        return None
    kwh, by_counters = math.fsum(whole), math.fsum(counted)
    added = kwh > by_counters
    told = f" ({quantity(by_counters, 'kWh')} by counters)" if added else ""
    return MeteredEnergy(kwh, "; ".join(hows) + told, added)
