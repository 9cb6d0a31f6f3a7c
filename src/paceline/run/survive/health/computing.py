"""For how long a rank computes in a step by itself, on how many rows, and how the rank's machine does meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from paceline.run.loop.loader import StepBatch
from paceline.run.loop.step import StepStats
from paceline.run.loop.under_plan import UnderPlan
from paceline.run.observe.observing import device_name
from paceline.run.observe.sensors.gpu import GpuSensor
from paceline.run.observe.sensors.processes import number_in
from paceline.run.observe.sensors.sensor_reading import SeenRank, SensorReading
from paceline.run.observe.summed import outstanding
from paceline.spec.plan import Plan

PHASES = ("forward_backward", "reduce")  # whose waiting is known on a CPU
THERMAL = Path("/sys/class/thermal")
CLOCKS = Path("/sys/devices/system/cpu/cpu0/cpufreq")
TOLD_OF_GPU = ("celsius", "watts", "clock_hz", "clock_share", "throttled", "power_capped")
SLOW_CLOCK = 0.7  # of the highest: below it a device that computes is held back


def computed_seconds(stats: StepStats, passes_alone: bool) -> float | None:
    """Return for how long this rank computed in a step, apart from waiting for others; None where that is not known.

    A CPU's thread says when it did not run. On CUDA kernels of collectives wait for peers: what is known there is the
    time of passes without any, `passes_alone`.
    """
    if stats.waiting_seconds is not None:
        return sum(stats.seconds.get(phase, 0.0) for phase in PHASES) - stats.waiting_seconds
    return stats.seconds.get("forward_backward") if passes_alone else None


def passes_alone(under: UnderPlan | None) -> bool:
    """Return whether no collective is in a rank's passes: those of whole copies of the model, frozen weights too.

    Their gradients are summed on a stream of its own. All modules of the model are asked, which takes a while.
    """
    alone = under is not None and under.plan.frozen != "spread" and not under.plan.layout.is_sharded
    return alone and under is not None and not under.sees_whole_batch


def rows_computed(batch: StepBatch) -> int:
    """Return how many rows this rank's passes had, with those that only stood in."""
    return sum(max(1, len(micro.ids)) for micro in batch.micro_batches)


def planned_rows(plan: Plan) -> list[float]:
    """Return how many rows every rank's passes have under a plan, with those that only stand in."""
    parts = [len(plan.rows_of(plan.layout.data_rank(rank))) for rank in range(plan.layout.devices)]
    return [float(max(rows, plan.accumulation)) for rows in parts]


def device_facts(device: torch.device, nvml: object = None) -> dict[str, float]:
    """Return what a rank's machine and its GPU tell of temperature, clocks and throttling, as far as they do.

    `nvml` is NVIDIA's library as the module pynvml has it; None imports that.
    """
    found: dict[str, float] = {}
    try:
        zones = list(THERMAL.glob("thermal_zone*/temp"))
    except OSError:  # no descriptor may be left: what is told beside the numbers must not end a run
        zones = []
    temperatures = [value / 1000 for path in zones if (value := number_in(path)) is not None]
    if temperatures:
        found["hottest_celsius"] = max(temperatures)
    now, most = number_in(CLOCKS / "scaling_cur_freq"), number_in(CLOCKS / "cpuinfo_max_freq")
    if now is not None and most:
        found["clock_of_highest"] = now / most
    return {**found, **_of_gpu(device_name(device), nvml)}


def standing_out(facts: Mapping[str, float]) -> str:
    """Return what of a device's facts may make it slow, in words; empty where nothing does."""
    found = outstanding(facts)
    clock = facts.get("clock_share", facts.get("clock_of_highest", 1.0))
    if clock < SLOW_CLOCK:
        found.append(f"its clock at {clock:.0%} of its highest")
    return ", ".join(found)


def _of_gpu(name: str, nvml: object) -> dict[str, float]:
    if not name:
        return {}
    reading, sensor = SensorReading(), GpuSensor([SeenRank(0, 0, name)], nvml)
    sensor.read(reading, 0.0)
    sensor.close()
    return {what: value for what, value in reading.ranks.get(0, {}).items() if what in TOLD_OF_GPU}
