"""Recall: the finished runs of this machine, forecast again with today's figures, as what a plan learns from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from paceline.cluster.resolve import resolve_cluster
from paceline.errors import ConfigError
from paceline.plan.cost.columns import COMMON
from paceline.plan.cost.components import total
from paceline.plan.cost.pricing import held_components, time_components
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.learnt import host_shares, memory_spread, time_spread
from paceline.plan.learn.correct import Learnt, LearntRun
from paceline.plan.learn.observation import Observation, machine_key
from paceline.plan.learn.store import read_observations
from paceline.plan.learn.task_measurement import read_measurements
from paceline.spec.cluster import Cluster, ClusterSpec
from paceline.spec.profile import ModelProfile
from paceline.task.profile.plain import task_key

ClusterOf = Callable[[Observation], Cluster | None]


def recall(profile: ModelProfile, optimizer: str, cluster: Cluster, spec: ClusterSpec) -> Learnt | None:
    """Return what finished runs on this machine say of a task; None where there are none, or learning is off."""
    machine = machine_key(cluster)
    if not spec.learn or not machine:
        return None
    known: dict[tuple[int, int], Cluster | None] = {(cluster.devices, cluster.devices_per_node): cluster}

    def cluster_of(one: Observation) -> Cluster | None:
        key = (one.devices, one.devices_per_node)
        if key not in known:
            known[key] = _resolved(dataclasses.replace(spec, devices=key[0], devices_per_node=key[1]))
        return known[key]

    return learn(read_observations(machine), task_key(profile, optimizer), cluster_of)


def learn(observations: Sequence[Observation], task: str, cluster_of: ClusterOf) -> Learnt | None:
    """Return what observations say of a task, each forecast anew on `cluster_of` it; None where they say nothing.

    Runs on clusters that are no more, and those whose forecast is unknown, are left out.
    """
    found = forecast_runs(observations, cluster_of)
    usable = tuple(run for run in found if math.isfinite(run.time_residual) and math.isfinite(run.time_spread))
    return Learnt(task, usable) if usable else None


def forecast_runs(observations: Sequence[Observation], cluster_of: ClusterOf) -> list[LearntRun]:
    """Return every run whose cluster is known with what the formulas say of it, learning aside, in their order."""
    groups: dict[tuple[object, ...], list[tuple[Observation, Cluster]]] = {}
    for one in observations:
        cluster = cluster_of(one)
        if cluster is not None:
            # What is priced together is one task on one cluster, and agrees in what columns hold for all plans.
            common = tuple(getattr(one.plan, name) for name in COMMON)
            key = (one.task, one.profile.fills, one.staged, id(cluster), *common)
            groups.setdefault(key, []).append((one, cluster))
    found = {id(run.observation): run for group in groups.values() for run in _forecast(group)}
    return [found[id(one)] for one in observations if id(one) in found]


def _forecast(group: Sequence[tuple[Observation, Cluster]]) -> list[LearntRun]:
    """Return runs of one task, cluster and batch with what the formulas say of them, learning aside."""
    first, cluster = group[0]
    measured = read_measurements(first.task, cluster)
    context = PricedTask(
        first.profile, cluster, first.plan.batch_samples, 1, first.optimizer, measured=measured, stages=first.staged
    )
    sheet = context.sheet(*(one.plan for one, _ in group))
    time, memory = time_components(sheet), held_components(sheet)
    hosts = host_shares(sheet, time)
    figures = (total(time), time_spread(sheet, time), total(memory), memory_spread(sheet), hosts)
    return [LearntRun(one, *(float(values[place]) for values in figures)) for place, (one, _) in enumerate(group)]


def _resolved(spec: ClusterSpec) -> Cluster | None:
    try:
        return resolve_cluster(spec)[0]
    except ConfigError:  # this machine has fewer devices now
        return None
