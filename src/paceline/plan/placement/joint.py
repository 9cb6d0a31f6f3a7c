"""Groups of different devices as one cluster: one layout over all groups, ranks numbered group by group.

The cluster has the slowest kind of device, the least memory and the narrowest link of any, and for every device a pace:
its time for the same work over the slowest one's. A step takes as long as the rank with the longest part of the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.cluster.groups import group_specs
from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.components import total
from paceline.plan.cost.pricing import forward_backward_components
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.placement.shares import share_out
from paceline.plan.search.search import choose_precision
from paceline.spec.cluster import Cluster, ClusterSpec, Figure
from paceline.spec.layout import Layout, data_rank_paces
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.profile import ModelProfile

MOST_ROWS = 64  # of a pass by which kinds of devices are held against each other


@dataclass(frozen=True)
class Joint:
    """The groups of a spec as one cluster, the precision that all of them compute in, and what is to be said of it."""

    cluster: Cluster
    precision: str
    remarks: tuple[str, ...]


def join_groups(spec: ClusterSpec, profile: ModelProfile, asked: PlanSpec, batch_samples: int) -> Joint:
    """Return the groups of `[cluster.groups]` as one cluster. Raises ConfigError as `resolve_groups`."""
    specs = group_specs(spec)
    members, remarks = _resolved(specs)
    counts = [cluster.devices for cluster in members.values()] if not _is_here(members) else [
        own.devices for own in specs.values()
    ]  # fmt: skip
    precision = _precision(profile, members.values(), asked.precision)
    rows = asked.asked_micro_batch or min(MOST_ROWS, -(-batch_samples // sum(counts)))
    seconds = [_row_seconds(profile, cluster, precision, rows) for cluster in members.values()]
    known = all(math.isfinite(each) for each in seconds)
    slowest = max(range(len(seconds)), key=lambda at: seconds[at]) if known else 0
    relative = [each / seconds[slowest] if known else 1.0 for each in seconds]
    if not known:
        remarks.append("the speed of some devices is unknown: all of them count alike, and get equal parts of a batch")
    paces = tuple(pace for pace, count in zip(relative, counts, strict=True) for _ in range(count))
    told = ", ".join(f"{name} {1 / pace:.2f}" for name, pace in zip(members, relative, strict=True))
    remarks.append(f"ranks stand group by group; speeds over the slowest device's: {told}")
    return Joint(_as_one(list(members.values()), counts, slowest, paces), precision, tuple(remarks))


def rows_by_pace(layout: Layout, batch_samples: int, paces: Sequence[float]) -> tuple[int, ...]:
    """Return the rows of each data rank in proportion to its speed, one at least."""
    return share_out(batch_samples, [1 / pace for pace in data_rank_paces(layout, paces)], least=1)


def _resolved(specs: dict[str, ClusterSpec]) -> tuple[dict[str, Cluster], list[str]]:
    """Return each group as a cluster; those of this machine as what all of them are together, since they share it."""
    found = {name: resolve_cluster(own) for name, own in specs.items()}
    if _is_here({name: cluster for name, (cluster, _) in found.items()}):
        devices = sum(own.devices for own in specs.values())
        together = {name: dataclasses.replace(own, devices=devices, devices_per_node=0) for name, own in specs.items()}
        found = {name: resolve_cluster(own) for name, own in together.items()}
    remarks = [f"{name}: {remark}" for name, (_, each) in found.items() for remark in each]
    return {name: cluster for name, (cluster, _) in found.items()}, remarks


def _is_here(members: dict[str, Cluster]) -> bool:
    """Return whether all groups are devices of this machine."""
    return all(cluster.host for cluster in members.values())


def _precision(profile: ModelProfile, clusters: Iterable[Cluster], asked: str) -> str:
    """Return the precision asked for, or bf16 where every kind of device computes faster in it."""
    chosen = {choose_precision(PricedTask(profile, cluster, 1, 1), asked)[0] for cluster in clusters}
    return chosen.pop() if len(chosen) == 1 else "fp32"


def _row_seconds(profile: ModelProfile, cluster: Cluster, precision: str, rows: int) -> float:
    """Return what a device takes for forward and backward of a row, in passes of `rows`."""
    plan = Plan(micro_batch=rows, batch_samples=rows, precision=precision)
    busy, inside = forward_backward_components(PricedTask(profile, cluster, rows, 1).sheet(plan))
    return float(total([*busy, *inside])[0]) / rows


def _as_one(members: list[Cluster], counts: list[int], slowest: int, paces: tuple[float, ...]) -> Cluster:
    """Return the members' devices as one cluster, of the kind of the slowest."""
    base, devices = members[slowest], sum(counts)
    memory = min((cluster.device.memory_bytes for cluster in members), key=_value)
    hosts = {cluster.host for cluster in members}

    def mean(figure_of: Callable[[Cluster], Figure | None]) -> Figure:
        each = [figure_of(cluster) or cluster.watts_per_device for cluster in members]
        value = math.fsum(count * figure.value for count, figure in zip(counts, each, strict=True)) / devices
        return Figure(value, each[slowest].source, "mean over groups")

    return dataclasses.replace(
        base,
        device=dataclasses.replace(base.device, memory_bytes=memory),
        devices=devices,
        devices_per_node=devices if hosts != {""} and len(hosts) == 1 else math.gcd(
            *(cluster.devices_per_node for cluster in members)
        ),
        links=min((cluster.links for cluster in members), key=lambda links: _value(links[-1].bytes_per_second)),
        price_usd_per_device_hour=mean(lambda cluster: cluster.price_usd_per_device_hour),
        watts_per_device=mean(lambda cluster: cluster.watts_per_device),
        waiting_watts_per_device=mean(lambda cluster: cluster.waiting_watts_per_device),
        host=hosts.pop() if len(hosts) == 1 else "",
        paces=paces,
    )  # fmt: skip


def _value(figure: Figure) -> float:
    return figure.value if math.isfinite(figure.value) else math.inf
