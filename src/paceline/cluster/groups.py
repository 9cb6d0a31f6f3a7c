"""Groups of different devices: `[cluster.groups.NAME]` tables, each a cluster with the options around the table."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.resolve import resolve_cluster
from paceline.config import build, shape
from paceline.config.document import KeyPath
from paceline.config.values import toml_key
from paceline.errors import ConfigError
from paceline.spec.cluster import Cluster, ClusterSpec
from paceline.units import plural

SHARED = ("groups", "region", "carbon_g_per_kwh", "pue", "catalog")  # hold for the whole cluster


@dataclass(frozen=True)
class Group:
    """One kind of devices of a cluster, and remarks on what was chosen or assumed of it."""

    name: str
    cluster: Cluster
    remarks: tuple[str, ...]


def resolve_groups(spec: ClusterSpec, probes: Path | None = None) -> tuple[Group, ...]:
    """Return the groups of a spec in its order; what a group leaves out is as in `[cluster]`.

    Raises ConfigError for options that a group does not have, for a single group, and for devices beside groups.
    """
    groups = []
    for name, own in group_specs(spec).items():
        cluster, remarks = resolve_cluster(own, probes)
        groups.append(Group(name, cluster, tuple(f"{name}: {remark}" for remark in remarks)))
    return tuple(groups)


def group_specs(spec: ClusterSpec) -> dict[str, ClusterSpec]:
    """Return every group as a cluster of its own; ConfigError as `resolve_groups`."""
    if len(spec.groups) < 2:
        what = f"cluster.groups has {plural(len(spec.groups), 'group')}"
        fix = "device and devices in [cluster] for one kind"
        raise ConfigError(what, "different devices are two kinds at least", fix)
    stated = ClusterSpec()
    if (spec.device, spec.devices) != (stated.device, stated.devices):
        raise ConfigError("cluster.device or cluster.devices beside cluster.groups", "groups state their own devices",
                          "leave them to the groups")  # fmt: skip
    return {name: _group_spec(spec, name, values) for name, values in spec.groups.items()}


@functools.cache
def _table() -> shape.ShapedTable:
    return shape.table_of(ClusterSpec, "cluster")


def _group_spec(spec: ClusterSpec, name: str, values: object) -> ClusterSpec:
    place = f"cluster.groups.{toml_key(name)}"
    if not isinstance(values, dict):
        raise ConfigError(f"{place} is not a table", "a group states its device and how many there are",
                          f'[{place}] with device = "h100-sxm" and devices = 8')  # fmt: skip
    shared = [option for option in values if option in SHARED]
    if shared:
        raise ConfigError(f"{place}.{shared[0]} is not for a group", "it holds for the whole cluster",
                          f"cluster.{shared[0]}")  # fmt: skip
    missing = [option for option in ("device", "devices") if option not in values]
    if missing:
        raise ConfigError(f"{place} lacks {' and '.join(missing)}", "a group states its devices",
                          f'device = "h100-sxm", devices = 8 in [{place}]')  # fmt: skip

    def where(key: KeyPath) -> str:
        return ".".join([place, *key[:1]])

    layer = build.mapping_layer(_table(), values, where)
    own, _ = build.build(_table(), layer)
    given = {key[0]: getattr(own, key[0]) for key in layer}
    return dataclasses.replace(spec, groups={}, **given)
