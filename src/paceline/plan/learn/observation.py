"""Observation: what one finished run took, and all facts that are needed to forecast the same run again.

The forecast that the run had is not what is learnt from: the machine may have been probed anew since, or the formulas
may have changed. Profile and plan are kept instead, and priced with today's figures.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paceline.spec.cluster import Cluster
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan, plan_from_dict
from paceline.spec.profile import ModelProfile
from paceline.task.profile.plain import pack_profile, task_key, unpack_profile

SCHEMA = 1


@dataclass(frozen=True)
class Observation:
    """One run on one machine under one plan. Times are seconds per step, memory bytes on the fullest device."""

    date: str  # when the run ended, ISO 8601
    run: str  # its directory
    machine: str  # `machine_key` of its cluster
    name: str  # the task's
    profile: ModelProfile
    optimizer: str
    plan: Plan
    devices: int
    devices_per_node: int
    steps: int  # that the step time is the median of
    step_seconds: float
    spread: float  # relative standard deviation of those steps, from their quartiles
    peak_bytes: float | None = None
    staged: bool = False  # whether the peak holds a copy of the state that saves beside training are made from
    # Of its computing time, the part in which a lone process had its core: less where others were at work too.
    core_share: float | None = None
    forecast: dict[str, float] = field(default_factory=dict)  # seconds per step by term, as they were announced
    measured: dict[str, float] = field(default_factory=dict)  # seconds per step by what the run's clocks measure
    versions: dict[str, str] = field(default_factory=dict)

    @cached_property
    def task(self) -> str:
        """What the task is known by."""
        return task_key(self.profile, self.optimizer)

    @property
    def layout(self) -> tuple[Layout, str]:
        """The degrees of all axes and the class of sharding."""
        return self.plan.layout, self.plan.class_text if self.plan.layout.state_degree > 1 else ""

    def as_dict(self) -> dict[str, object]:
        """Return the observation as plain data."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {"profile": pack_profile(self.profile), "plan": dataclasses.asdict(self.plan)}
        return {"schema": SCHEMA, **fields, **plain}


def observation_from_dict(record: dict[str, Any]) -> Observation:
    """Return the observation that `as_dict` made plain.

    Raises KeyError, TypeError or ValueError for what another version wrote.
    """
    if record["schema"] != SCHEMA:
        raise ValueError(f"schema {record['schema']}")
    fields = {name: value for name, value in record.items() if name != "schema"}
    if "staged" not in fields and _is_of_cpu(fields["machine"]):  # which did not say what peaks hold
        fields["peak_bytes"] = None
    plain = {"profile": unpack_profile(record["profile"]), "plan": plan_from_dict(record["plan"])}
    return Observation(**{**fields, **plain})


def machine_key(cluster: Cluster) -> str:
    """Return what this machine is known by, whatever part of it a task uses; empty for machines elsewhere."""
    return f"{cluster.host}-{device_key(cluster)}" if cluster.host else ""


def device_key(cluster: Cluster) -> str:
    """Return what machines of the cluster's device have in common, whichever they are: how their keys end."""
    return f"{cluster.device.kind}-{hashlib.sha256(cluster.device.name.encode()).hexdigest()[:8]}"


def _is_of_cpu(machine: str) -> bool:
    """Return whether a machine's key, which ends as `device_key` does, is of CPUs."""
    return machine.split("-")[-2:-1] == ["cpu"]
