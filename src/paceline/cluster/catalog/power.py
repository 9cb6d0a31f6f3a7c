"""Power: what a device and its share of the node draw, by how busy the device is, and how that was fitted.

    watts at the node's meter, per device = TDP x (host share + waiting share + (1 - waiting share) x busy)

`busy` is the part of the time in which the device computes; waiting for links, for other pipeline stages or for the
host is the rest. A device that computes draws its thermal design power, no more: wide products run into that limit. The
host share is processors, memory, fans, adapters and the power supplies' losses. Power usage effectiveness comes on top.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.document import packaged_toml

# Quantiles of Student's t for two-sided 80 and 95 %, by degrees of freedom: kinds of nodes are few.
STUDENT_80 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397)
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)


@dataclass(frozen=True)
class PowerSample:
    """One configuration that was measured: its power per device over the TDP, and how busy its devices were."""

    accelerator: str
    over_tdp: float
    busy: float


@dataclass(frozen=True)
class PowerModel:
    """Shares of the TDP, and half-widths of the intervals as ratios: (value / ratio, value * ratio)."""

    host_share: float
    waiting_share: float
    ratio80: float
    ratio95: float
    source: str = ""
    samples: int = 0
    several_nodes_busy: float = 1.0  # median over samples of several nodes; 1 where there is none

    def over_tdp(self, busy: float) -> float:
        """Return watts per device at the node's meter over the TDP."""
        return self.host_share + self.waiting_share + (1 - self.waiting_share) * busy


@functools.cache
def power_model() -> PowerModel:
    """Return the fitted model of power.toml."""
    values = packaged_toml("paceline.cluster.catalog", "power.toml")
    names = ("host_share", "waiting_share", "ratio80", "ratio95", "source", "samples", "several_nodes_busy")
    return PowerModel(**{name: values[name] for name in names})


def fit_power(samples: Sequence[PowerSample]) -> PowerModel:
    """Return the shares with the least squared relative error, and intervals from what is left.

    Linear least squares in the two shares. Nodes of one accelerator are alike, so the interval has as many degrees of
    freedom as there are accelerators, less one. Raises ValueError for one accelerator alone, or equally busy ones.
    """
    import statistics  # for a fit alone: every plan loads this module

    rows = [(1 / one.over_tdp, (1 - one.busy) / one.over_tdp, 1 - one.busy / one.over_tdp) for one in samples]
    aa, ab, bb = (math.fsum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ac, bc = (math.fsum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    freedom = len({one.accelerator for one in samples}) - 1
    if freedom < 1 or determinant < 1e-12 * max(1e-12, aa * bb):
        raise ValueError("two accelerators, and two different shares of busy time, are the least that can be fitted")
    host, waiting = (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant
    model = PowerModel(host, waiting, 1.0, 1.0)
    left = [math.log(model.over_tdp(one.busy) / one.over_tdp) for one in samples]
    spread = math.sqrt(math.fsum(value * value for value in left) / max(1, len(left) - 2))
    at = min(freedom, len(STUDENT_80)) - 1
    several = [one.busy for one in samples if one.busy < 1]
    return PowerModel(
        host, waiting, math.exp(STUDENT_80[at] * spread), math.exp(STUDENT_95[at] * spread), samples=len(samples),
        several_nodes_busy=statistics.median(several),
    )  # fmt: skip


def samples_of(rows: Iterable[Mapping[str, str]], tdp_watts: Mapping[str, float]) -> list[PowerSample]:
    """Return one sample per system and benchmark from rows of MLPerf power logs (the schema of mlperf_power.csv).

    Medians over the repeats, at the AC side. One node computes all the time; the same benchmark on n nodes of the
    devices is busy for what one node took over n times what n nodes took. `tdp_watts` is by the table's accelerator.
    """
    import statistics

    groups: dict[tuple[str, str, str, int], list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        if row["measurement_type"] == "AC":
            groups[row["accelerator"], row["system"], row["benchmark"], int(row["nodes_measured"])].append(row)

    def median(key: tuple[str, str, str, int], column: str) -> float:
        return statistics.median(float(row[column]) for row in groups[key])

    samples = []
    for accelerator, system, benchmark, nodes in groups:
        key = (accelerator, system, benchmark, nodes)
        alone = [other for other in groups if (other[0], other[2], other[3]) == (accelerator, benchmark, 1)]
        if nodes > 1 and not alone:
            continue  # nothing says how busy its devices were
        busy = 1.0 if nodes == 1 else median(alone[0], "window_s") / (nodes * median(key, "window_s"))
        watts = median(key, "node_steady_w_per_device")
        samples.append(PowerSample(accelerator, watts / tdp_watts[accelerator], min(1.0, busy)))
    return samples


def fit_file(path: Path, tdp_watts: Mapping[str, float]) -> str:
    """Return power.toml's text as fitted on an MLPerf power table: shares, intervals and where they are from."""
    import csv
    import hashlib

    raw = path.read_bytes()
    model = fit_power(samples_of(csv.DictReader(raw.decode("utf-8").splitlines()), tdp_watts))
    lines = [
        "# Fitted by paceline.cluster.catalog.power.fit_file; edit nothing by hand.",
        f"host_share = {model.host_share:.4f}",
        f"waiting_share = {model.waiting_share:.4f}",
        f"ratio80 = {model.ratio80:.4f}",
        f"ratio95 = {model.ratio95:.4f}",
        f"samples = {model.samples}",
        f"several_nodes_busy = {model.several_nodes_busy:.4f}",
        f'source = "MLPerf Training 4.0 and 5.0 power logs, AC side: {path.name}"',
        f'sha256 = "{hashlib.sha256(raw).hexdigest()}"',
    ]
    return "\n".join(lines) + "\n"
