"""Measure a task on the devices at hand: a few steps of its own blocks, in processes that end. Torch-free."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, DoesNotFit, PacelineError
from paceline.plan.cost.intervals import memory_estimate
from paceline.plan.cost.memory.usable import needed_terms, usable_bytes
from paceline.plan.cost.pricing import memory_of
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.explain.explain import measurement_text
from paceline.plan.learn.observation import machine_key
from paceline.plan.learn.task_measurement import (
    TaskMeasurement,
    measured_plan,
    measured_shapes,
    with_blocks,
    write_measurement,
)
from paceline.plan.planned import Planned
from paceline.run.process.handover import hand_over
from paceline.scratch import Scratch
from paceline.session.measure_device import request_of
from paceline.spec.load import Spec
from paceline.spec.model_folder import FRESH
from paceline.spec.optimizers import optimizer_key
from paceline.spec.profile import ModelProfile
from paceline.spec.task import ModelSpec
from paceline.supervise.supervisor import supervise
from paceline.task.models.sizes import is_named
from paceline.task.profile.plain import task_key
from paceline.units import format_sizes

SECONDS = 6.0  # of timing; with the import of torch and the building of the model some 15
LIMIT_SECONDS = 180.0
BUILT = 2  # repeated blocks of a built-in model: fewer are no chain


def measure_task(
    planned: Planned,
    say: Callable[[str], object] = print,
    seconds: float = SECONDS,
    limit_seconds: float = LIMIT_SECONDS,
) -> TaskMeasurement:
    """Measure the planned task at the plan's micro-batch and precision, keep the result and return it.

    All devices of the plan that are on this machine measure at once. Of a built-in model whose blocks are alike, two
    are built and one is timed. Raises ConfigError where the cluster is not this machine, DoesNotFit where the model
    does not fit one device, PacelineError where a process fails or the limit is reached.
    """
    cluster, plan = planned.cluster, measured_plan(planned.plan)
    if not cluster.host:
        because = f"the cluster is {cluster.devices} x {cluster.device.name}, and this is another machine"
        raise ConfigError("only this machine can be measured", because, 'cluster.device = "auto"')
    profile, spec, chosen = _reduced(planned)
    _check_fit(planned, profile, plan)
    devices = cluster.devices_per_node
    say(f"measure  {devices} x {cluster.device.kind} at micro-batch {plan.micro_batch} in {plan.precision}, some 15 s")
    with Scratch("measure") as name:
        folder = Path(name)
        request, result = folder / "request.json", folder / "result.json"
        kind, threads = cluster.device.kind, planned.threads
        request.write_text(json.dumps(request_of(hand_over(spec, folder), plan, chosen, kind, threads, seconds)))
        command = [sys.executable, "-m", "paceline.session.measure_device", str(request), str(result)]
        environ = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        outcome = supervise(command, devices, environ, limit_seconds)
        if outcome.error is not None or not result.exists():
            details = outcome.error or {"what": "a process ended", "because": f"its exit code is {outcome.exit_code}"}
            raise PacelineError("the task could not be measured", f"{details['what']}: {details['because']}",
                                str(details.get("try") or "plan without --measure"))  # fmt: skip
        found = json.loads(result.read_text())
    measurement = _measurement(planned, profile, found)
    write_measurement(measurement)
    say(f"         {measurement_text(measurement).partition(': ')[2]}")
    return measurement


def _reduced(planned: Planned) -> tuple[ModelProfile, Spec, list[int]]:
    """Return what is built to be measured, and which of its repeated blocks are timed: one of each shape."""
    profile, spec = planned.profile, planned.spec
    shapes = measured_shapes(profile)
    model = spec.task.model
    if (
        len(shapes) == 1
        and profile.repeated_blocks > BUILT
        and profile.source == "analytic"
        and isinstance(model, ModelSpec)
        and is_named(model.name)
    ):
        few = dataclasses.replace(model, layers=BUILT, weights=FRESH)
        task = dataclasses.replace(spec.task, model=few)
        return with_blocks(profile, BUILT), dataclasses.replace(spec, task=task), [0]
    repeated = [dataclasses.replace(block, name="") for block in profile.blocks if block.recomputable]
    return profile, spec, [repeated.index(shape) for shape in shapes]


def _check_fit(planned: Planned, profile: ModelProfile, plan: Any) -> None:
    """Raise DoesNotFit where the model that is measured does not fit one device whole."""
    context = PricedTask(profile, planned.cluster, plan.batch_samples, 1, optimizer_key(planned.spec.task.optimizer))
    peak = memory_estimate(
        tuple(needed_terms(context.cluster, memory_of(context, plan))), context.cluster, context.constants
    )
    usable = usable_bytes(planned.cluster)
    if peak.high > usable:
        because = "it needs up to {} of {} on one device, unsharded".format(*format_sizes(peak.high, usable))
        raise DoesNotFit("the model is too large to be measured", because, "plan without --measure")


def _measurement(planned: Planned, profile: ModelProfile, found: dict[str, Any]) -> TaskMeasurement:
    """Return the measurement: what the blocks by themselves do not explain of a whole pass is the rest."""
    repeated = [dataclasses.replace(block, name="") for block in profile.blocks if block.recomputable]
    by_shape = dict(zip(measured_shapes(profile), found["block_seconds"], strict=True))
    rest = found["whole_seconds"] - sum(by_shape[shape] for shape in repeated)
    optimizer = optimizer_key(planned.spec.task.optimizer)
    return TaskMeasurement(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=machine_key(planned.cluster),
        task=task_key(planned.profile, optimizer),
        name=planned.spec.task.name,
        precision=planned.plan.precision,
        micro_batch=planned.plan.micro_batch,
        devices=planned.cluster.devices_per_node,
        threads=planned.threads,
        block_seconds=tuple(found["block_seconds"]),
        rest_seconds=max(rest, 0.0),
        update_seconds=found["update_seconds"],
        update_parameters=found["parameters"],
        blocks=found["blocks"],
        repeats=found["repeats"],
        spread=found["spread"],
        tokens=found["tokens"],
        pairs=found["pairs"],
    )
