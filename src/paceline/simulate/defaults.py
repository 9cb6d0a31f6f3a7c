"""Defaults: the built-in policies, with times that follow from a scenario.

Times of saving follow from bytes and rates. The fixed parts are published for other systems and assumed here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError, suggestion
from paceline.simulate.failures import FailureRates
from paceline.simulate.interval import daly_interval
from paceline.simulate.policy import Policy, duration_text
from paceline.simulate.scenario import Scenario
from paceline.spec.optimizers import state_values
from paceline.spec.reliability import ReliabilitySpec

SAVE_SECONDS = 1.0  # a save's halt besides the copy: below 1 s with pinned memory (torchtitan, pull request 3393)
COPY_SECONDS = 0.2  # the same for a copy in memory: 0.2 s, 65B parameters on 1,536 H800 (DLRover's flash checkpoint)
SPARES_ENOUGH = 0.99  # of the time, nodes in repair are no more than the spares

POLICIES: Mapping[str, str] = {
    "spares": "asynchronous checkpoints; spare nodes replace lost ones",
    "blocking": "as spares, but training halts until a checkpoint is written",
    "memory": "as spares, with copies in other hosts' memory between checkpoints",
    "shrink": "asynchronous checkpoints, no spares: goes on with fewer copies of the model, and grows back",
    "wait": "asynchronous checkpoints, no spares: waits for repairs",
}
COMPARED = ("spares", "blocking", "memory", "shrink")


@dataclass(frozen=True)
class Saving:
    """What saving takes, from the bytes of a checkpoint and the machines' rates; all in seconds."""

    state_bytes: float
    write: float  # to storage, and from it
    copy: float  # of every device's share to its host's memory


def saving_of(parameters: int, optimizer: str, nodes: int, devices: int, reliability: ReliabilitySpec) -> Saving:
    """Return what saving a model's weights and optimizer state takes when all nodes write their parts at once.

    `parameters` are those that are trained: frozen ones are written once, and linked from then on.
    """
    state = 4 * parameters * (1 + state_values(optimizer))  # fp32 weights, and fp32 state
    return Saving(
        state,
        state / (reliability.storage_bytes_per_second_per_node * nodes),
        state / (reliability.host_bytes_per_second_per_device * devices),
    )


def make_policy(
    name: str,
    scenario: Scenario,
    saving: Saving,
    reliability: ReliabilitySpec,
    step_seconds: float = 0.0,
    settings: Mapping[str, float | int] | None = None,
) -> Policy:
    """Return a built-in policy for a scenario, with settings of one's own; intervals that are left open are Daly's.

    An interval is never shorter than a step, nor than writing the checkpoint before. Raises ConfigError for unknown
    names.
    """
    if name not in POLICIES:
        raise ConfigError(
            f"unknown policy '{name}'", "there is no built-in one of that name", suggestion(name, POLICIES)
        )
    blocking, spares = name == "blocking", 0
    if name not in ("shrink", "wait"):
        spares = enough_spares(scenario) if reliability.spare_nodes is None else reliability.spare_nodes
    stall = SAVE_SECONDS + (saving.write if blocking else saving.copy)
    values: dict[str, float | int | str] = {
        "stall": stall, "write": 0.0 if blocking else saving.write, "restore": saving.write,
        "detection": reliability.detection, "restart": reliability.restart, "spares": spares,
        "on_loss": "shrink" if name == "shrink" else "replace",
    }  # fmt: skip
    if name == "memory":
        copied = COPY_SECONDS + saving.copy
        values |= {
            "memory_stall": copied, "memory_restore": saving.copy, "memory_survives": surviving_share(scenario.rates),
            "memory_every": max(step_seconds, daly_interval(copied, scenario.mtbf_seconds)),
        }  # fmt: skip
    values |= settings or {}
    if "every" not in values:
        misses = 1 - float(values.get("memory_survives", 0.0))
        mtbf = scenario.mtbf_seconds / misses if misses else math.inf
        values["every"] = max(step_seconds, float(values["write"]), daly_interval(float(values["stall"]), mtbf))
    label = ", ".join([name, *(f"{key} {_shown(key, value)}" for key, value in (settings or {}).items())])
    return Policy(name=label, **values)  # type: ignore[arg-type]


def _shown(key: str, value: float | int) -> str:
    return f"{value:g}" if key in ("spares", "memory_survives") else duration_text(value)


def enough_spares(scenario: Scenario) -> int:
    """Return how many spare nodes cover those in repair for 99 % of the time: a quantile of Poisson's distribution.

    Nodes in repair are Poisson distributed with the rate of failures times the mean time of a repair (Palm's theorem),
    however long single repairs take.
    """
    mean = scenario.evictions_per_second * scenario.repair_seconds
    probability = covered = math.exp(-mean)
    if not probability:  # beyond some 700 nodes in repair at once, the normal distribution is as good
        return math.ceil(mean + 2.326 * math.sqrt(mean))
    spares = 0
    while covered < SPARES_ENOUGH:
        spares += 1
        probability *= mean / spares
        covered += probability
    return spares


def surviving_share(rates: FailureRates) -> float:
    """Return the part of unexpected interruptions that copies in two hosts' memory outlive: all but the network's.

    Assumed: only a switch takes both hosts, and copies are kept by a process that outlives the job's.
    """
    total = rates.unexpected_per_device_hour
    network = sum(cause.per_device_hour for cause in rates.causes if cause.component == "network")
    return 1 - network / total if total else 1.0


def with_every(policy: Policy, every: float) -> Policy:
    """Return the policy with another interval between checkpoints."""
    return dataclasses.replace(policy, every=every)
