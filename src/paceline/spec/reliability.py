"""Reliability: how often the machines of a cluster fail, and what an interruption takes. What is unset is published
for the device, assumed (and says so), or unknown."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option

STUDIES = ("llama3", "meta-rsc1", "meta-rsc2", "opt-175b", "bloom")


@dataclass(frozen=True)
class ReliabilitySpec(Declared, table="cluster.reliability"):
    """The `[cluster.reliability]` table of a spec. Only forecasts of whole runs and simulations read it."""

    failures: str = option(
        "auto",
        "which published failure rates hold: 'auto' takes the device's own, where there are any",
        choices=("auto", "none", *STUDIES),
    )
    mtbf_hours_per_device: float | None = option(
        None, "mean hours between unexpected interruptions by one device; overrides the published rate", above=0.0
    )
    detection: float = option(
        300.0, "from a failure to knowing which node to leave out", quantity="duration", minimum=0.0
    )
    restart: float = option(
        300.0, "from there to processes that are ready to load a checkpoint", quantity="duration", minimum=0.0
    )
    repair: float = option(86400.0, "mean time until a failed node is back", quantity="duration", above=0.0)
    spare_nodes: int | None = option(
        None, "nodes kept ready; unset: as many as nodes in repair exceed in 1 % of the time only", minimum=0
    )
    storage_bytes_per_second_per_node: float = option(
        1e9, "rate at which a node writes and reads checkpoints", above=0.0
    )
    host_bytes_per_second_per_device: float = option(
        10e9, "rate at which a device's state is copied to host memory", above=0.0
    )
    preemption_hours_per_node: float | None = option(
        None, "mean hours until a spot node is taken away; unset: never", above=0.0
    )
    preemption_notice: float = option(120.0, "warning before a spot node is taken", quantity="duration", minimum=0.0)
    preemption_return: float = option(3600.0, "mean time until a taken node is back", quantity="duration", above=0.0)
    slow_hours_per_device: float | None = option(
        None, "mean hours until a device becomes slow without failing; unset: never", above=0.0
    )
    slow_factor: float = option(1.5, "how much longer a step takes with a slow device in it", minimum=1.0)
    slow_detection: float = option(
        3600.0, "until a slow device is found, and its node replaced", quantity="duration", minimum=0.0
    )
