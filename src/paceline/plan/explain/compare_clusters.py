"""Compare: a task on several clusters, the best plan of each cluster, and the Pareto front among these plans."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.cluster.catalog.devices import find_entry
from paceline.cluster.catalog.file import load_catalog
from paceline.cluster.resolve import resolve_cluster
from paceline.errors import ConfigError, DoesNotFit, PacelineError
from paceline.plan.planned import Planned, plan_prepared
from paceline.plan.prepare import prepare_task
from paceline.plan.search.limits import chance_within
from paceline.plan.search.pareto import pareto_front
from paceline.plan.search.values import over_least
from paceline.spec.cluster import HERE, OF_ONE_DEVICE, ClusterSpec
from paceline.spec.load import Spec
from paceline.spec.plan import QUANTITIES
from paceline.units import format_seconds


@dataclass(frozen=True)
class ClusterRow:
    """A cluster with its best plan, or the reason why it has none.

    `finish_seconds` are those of the whole run, failures included where they are known of all clusters. `score` is 1
    for a cluster that is best in all that the goal asks for, NaN where that is unknown.
    """

    device: str
    devices: int
    planned: Planned | None
    because: str
    finish_seconds: float = math.nan
    memory_bytes: float = math.nan
    usd: float = math.nan
    kwh: float = math.nan
    carbon_g: float = math.nan
    score: float = math.nan
    on_front: bool = False
    keeps_deadline: float = math.nan  # the chance to
    keeps_budget: float = math.nan


@dataclass(frozen=True)
class Comparison:
    """Clusters in the order asked for. `best` is the place of the one that serves the goal best.

    `front` are the quantities that the Pareto front weighs, `with_failures` whether failures are counted in.
    """

    rows: tuple[ClusterRow, ...]
    best: int
    front: tuple[str, ...]
    with_failures: bool


FIELDS = {
    "time": "finish_seconds",
    "memory": "memory_bytes",
    "money": "usd",
    "energy": "kwh",
    "carbon": "carbon_g",
}


def compare_clusters(
    spec: Spec, devices: Sequence[str], counts: Sequence[int], *, say: Callable[[str], None] | None = None
) -> Comparison:
    """Return the task's best plan on every combination of devices and counts; an empty list keeps the spec's.

    Options of the spec that speak of one kind of device hold for the spec's own alone. Raises DoesNotFit where no
    cluster has a plan, and ConfigError for unknown devices and for goals of which nothing is known.
    """
    if spec.cluster.groups:
        raise ConfigError("cluster.groups with several clusters", "each that is compared has one kind of devices",
                          "the devices of one group in [cluster]")  # fmt: skip
    catalog = load_catalog(spec.cluster.catalog)
    for name in devices:
        if name not in HERE:
            find_entry(name, catalog)
    prepared, rows = prepare_task(spec, say=say), []
    for name, count in itertools.product(devices or [spec.cluster.device], counts or [spec.cluster.devices]):
        cluster = cluster_spec(spec.cluster, name, count)
        there = dataclasses.replace(prepared, spec=dataclasses.replace(spec, cluster=cluster))
        try:
            resolved, remarks = resolve_cluster(cluster)
            planned = plan_prepared(there, resolved, tuple(remarks))
            rows.append(ClusterRow(name, resolved.devices, planned, ""))
        except (DoesNotFit, ConfigError) as error:
            rows.append(ClusterRow(name, count, None, _because(error)))
    if all(row.planned is None for row in rows):
        raise DoesNotFit(
            f"no plan on any of {len(rows)} clusters",
            "; ".join(f"{row.devices} x {row.device}: {row.because}" for row in rows),
            "more or other devices, a smaller model, or wider limits of [plan]",
        )
    return _judged(rows, spec.plan.goal.weights)


def cluster_spec(cluster: ClusterSpec, device: str, devices: int) -> ClusterSpec:
    """Return a spec's cluster with another device and number of devices."""
    if device == cluster.device:
        return dataclasses.replace(cluster, devices=devices)
    fresh = ClusterSpec()
    kept = {name: getattr(fresh, name) for name in OF_ONE_DEVICE}
    return dataclasses.replace(cluster, **kept, device=device, devices=devices)


def stated_text(cluster: ClusterSpec) -> str:
    """Return which options of a spec's cluster hold for its own kind of device alone, or ""."""
    fresh = ClusterSpec()
    stated = [f"cluster.{name}" for name in OF_ONE_DEVICE if getattr(cluster, name) != getattr(fresh, name)]
    return f"{', '.join(stated)} of the spec: for device = '{cluster.device}' alone" if stated else ""


def _because(error: PacelineError) -> str:
    return f"{error.what}: {error.because}" if error.because else error.what


def _judged(rows: Sequence[ClusterRow], weights: dict[str, float]) -> Comparison:
    """Return the rows with what they take, their scores and the front."""
    plans = [row.planned for row in rows if row.planned is not None]
    with_failures = all(math.isfinite(planned.expected.goodput) for planned in plans)
    taken = [row if row.planned is None else _with_amounts(row, row.planned, with_failures) for row in rows]
    places = [place for place, row in enumerate(taken) if row.planned is not None]
    values = {name: np.array([getattr(taken[place], FIELDS[name]) for place in places]) for name in QUANTITIES}
    scores = np.zeros(len(places))
    for name, weight in weights.items():
        if np.isnan(values[name]).all():
            raise ConfigError(
                f"plan.goal has {name}, which is unknown of every cluster",
                plans[0].forecast.bill[("money", "energy", "carbon").index(name)].formula if name != "time" else "",
                f'another goal, such as plan.goal = "{"memory" if name == "time" else "time"}"',
            )
        scores += weight * np.where(np.isnan(values[name]), np.nan, over_least(np.nan_to_num(values[name], nan=np.inf)))
    finite = np.where(np.isfinite(scores), scores, np.inf)
    best = np.lexsort((values["time"], finite))[0]  # of clusters that serve the goal alike, the fastest
    front = tuple(name for name in ("time", "money", "energy", "carbon") if np.isfinite(values[name]).all())
    on_front: set[int] = set()
    if front:
        on_front = {places[at] for at in pareto_front(np.stack([values[name] for name in front], axis=1))}
    score_of = dict(zip(places, scores, strict=True))
    done = tuple(
        dataclasses.replace(row, score=float(score_of.get(place, math.nan)), on_front=place in on_front)
        for place, row in enumerate(taken)
    )
    return Comparison(done, places[int(best)], front, with_failures)


def _with_amounts(row: ClusterRow, planned: Planned, with_failures: bool) -> ClusterRow:
    """Return a row with what its run takes. Failures stretch time, money, energy and carbon alike."""
    forecast, limits = planned.forecast, planned.spec.plan
    goodput = planned.expected.goodput if with_failures else 1.0
    stretch = 1 / goodput if goodput > 0 else math.inf  # a run that never ends
    wall = planned.expected.wall_seconds if with_failures else forecast.run_seconds
    usd = forecast.usd.value * stretch
    return dataclasses.replace(
        row,
        finish_seconds=wall.value,
        memory_bytes=forecast.peak_bytes.value,
        usd=usd,
        kwh=forecast.kwh.value * stretch,
        carbon_g=forecast.carbon_g.value * stretch,
        keeps_deadline=math.nan if limits.deadline is None else chance_within(wall, limits.deadline),
        keeps_budget=math.nan if limits.budget_usd is None else chance_within(forecast.usd, limits.budget_usd, usd),
    )


def _cell(show: Callable[[float], str], value: float) -> str:
    """Return an amount under the head that names it, which "unknown" need not do again."""
    return show(value) if math.isfinite(value) else "unknown"


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the comparison as rows of text, a head first."""
    from paceline.plan.explain.headline import carbon_text, energy_text
    from paceline.plan.explain.money import money_text
    from paceline.units import format_bytes

    head = ["", "cluster", "time", "money", "energy", "carbon", "step", "memory", "plan"]
    chances = any(math.isfinite(row.keeps_deadline) or math.isfinite(row.keeps_budget) for row in comparison.rows)
    lines = [(*head[:6], *(["kept"] if chances else []), *head[6:])]
    for place, row in enumerate(comparison.rows):
        mark = ("*" if place == comparison.best else "") + ("front" if row.on_front else "")
        name = f"{row.devices} x {row.device}"
        if row.planned is None:
            lines.append((mark, name, *[""] * (len(lines[0]) - 3), f"none: {row.because}"))
            continue
        kept = min(chance for chance in (row.keeps_deadline, row.keeps_budget, 1.0) if math.isfinite(chance))
        forecast, plan = row.planned.forecast, row.planned.plan
        lines.append((
            mark, name, "never" if math.isinf(row.finish_seconds) else format_seconds(row.finish_seconds),
            _cell(money_text, row.usd), _cell(energy_text, row.kwh),
            _cell(carbon_text, row.carbon_g), *([f"{kept:.0%}"] if chances else []),
            format_seconds(forecast.step_seconds.value), format_bytes(forecast.peak_bytes.value), str(plan),
        ))  # fmt: skip
    return lines
