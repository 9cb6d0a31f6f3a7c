"""What `plan --measure` found of a task on this machine: seconds of its own blocks, loss and update, kept by task.

Measured seconds take the place of the model's at the micro-batch they were measured at, as one factor for every shape
of block. Other micro-batches and layouts are priced by the same formulas as ever, times the factor of their blocks.
What one node measured is for every node of its kind: a cluster of the catalog takes what was measured on its device.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.store import cache_dir, safe_name, write_json
from paceline.plan.learn.observation import device_key, machine_key
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.profile import BlockProfile, Fill, ModelProfile

SCHEMA = 2


@dataclass(frozen=True)
class TaskMeasurement:
    """Seconds of parts of a task's step on one device of this machine, while as many others did the same."""

    date: str
    machine: str
    task: str
    name: str
    precision: str
    micro_batch: int
    devices: int  # that measured at once
    threads: int
    # Forward and backward of one repeated block on one micro-batch, for each shape in the order of the chain.
    block_seconds: tuple[float, ...]
    rest_seconds: float  # of everything outside the repeated blocks, loss included
    update_seconds: float  # norm, clipping and optimizer
    update_parameters: int  # that were updated
    blocks: int  # repeated blocks that were there
    repeats: int
    spread: float  # (90th - 10th percentile) / median of forward and backward
    # Where rows differ in length: the positions that were computed, and the pairs of them in one row, over those of a
    # micro-batch of the longest samples.
    tokens: float = 1.0
    pairs: float = 1.0

    def as_dict(self) -> dict[str, object]:
        """Return the measurement as plain data."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


def measured_shapes(profile: ModelProfile) -> tuple[BlockProfile, ...]:
    """Return the different shapes of a model's repeated blocks, in the order of the chain."""
    shapes = (dataclasses.replace(block, name="") for block in profile.blocks if block.recomputable)
    return tuple(dict.fromkeys(shapes))


def measured_profile(profile: ModelProfile, measurement: TaskMeasurement) -> ModelProfile:
    """Return a profile whose batches are as full as the one that was measured."""
    if not profile.fills:
        return profile
    full = Fill(measurement.micro_batch, measurement.tokens, measurement.pairs, None)
    return dataclasses.replace(profile, fills=(full,))


def measured_plan(plan: Plan) -> Plan:
    """Return the plan of one micro-batch on one device, in the precision of a plan."""
    return Plan(micro_batch=plan.micro_batch, batch_samples=plan.micro_batch, precision=plan.precision)


def with_blocks(profile: ModelProfile, blocks: int) -> ModelProfile:
    """Return a profile with the first so many of its repeated blocks."""
    kept, left = [], blocks
    for block in profile.blocks:
        if block.recomputable:
            left -= 1
        if not block.recomputable or left >= 0:
            kept.append(block)
    return dataclasses.replace(profile, blocks=tuple(kept))


def write_measurement(measurement: TaskMeasurement) -> Path:
    """Keep a measurement in place of an earlier one of the same task, precision and devices; return its file.

    Raises StorageError where the cache cannot be written.
    """
    found = measurement
    path = _folder(found.machine) / f"{found.task}-{found.precision}-{found.devices}x{found.threads}.json"
    write_json(found.as_dict(), path)
    return path


def read_measurements(task: str, cluster: Cluster) -> dict[str, TaskMeasurement]:
    """Return what was measured of a task on as many devices as a node has, by precision; the newest of each.

    Of this machine what it measured itself. Of a cluster of the catalog, which is elsewhere, what a machine of the same
    device measured that shares this cache: one of its nodes.
    """
    machine, found = machine_key(cluster), dict[str, TaskMeasurement]()
    folders = [_folder(machine)] if machine else _folder("any").parent.glob(f"*-{device_key(cluster)}")
    name = f"{task}-*-{cluster.devices_per_node}x{cluster.device.threads}.json"
    for path in sorted(path for folder in folders for path in folder.glob(name)):
        try:
            record = json.loads(path.read_text("utf-8"))
            if record.pop("schema") == SCHEMA:
                one = TaskMeasurement(**{**record, "block_seconds": tuple(record["block_seconds"])})
                if one.precision not in found or one.date >= found[one.precision].date:
                    found[one.precision] = one
        except (OSError, ValueError, TypeError, KeyError):
            continue  # another version's, or nobody can read it: as if there were none
    return found


def forget_measurements(machine: str) -> int:
    """Delete what was measured of tasks on a machine and return how many measurements there were."""
    files = list(_folder(machine).glob("*.json"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def _folder(machine: str) -> Path:
    return cache_dir() / "tasks" / safe_name(machine)
