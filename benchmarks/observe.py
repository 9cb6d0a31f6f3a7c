"""What watching a run costs: a step with everything on against everything off, a health sample, a scalar, records.

    python benchmarks/observe.py [--quick] [--rounds 40] [--json OUT]

Steps of both kinds take turns in one process, a few at a time, on the same model and rows; the figure is the median
over the rounds of the time with everything on over the time with everything off in the same round. "off again" is a
second run without: how far its ratio is from 1 is what the measurement cannot see. A health sample's share is its time
over that of the steps between two samples. A scalar's microseconds are CPU time of the journal's writer. The size of
records against ranks is that of the records themselves, made of simulated readings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import TokenRows, machine

from paceline.run.observe.health.judge import HealthJudge
from paceline.run.observe.health.run_health import TrainingHealth
from paceline.run.observe.node import NodeSampler, SamplesOfFirst, sensors_of
from paceline.run.observe.sensors.sensor_reading import SeenRank, SensorReading
from paceline.run.observe.summed import node_sample
from paceline.run.process.spread import spread_of_numbers
from paceline.run.process.world import World
from paceline.run.record.journal import Journal
from paceline.spec.journal.kinds import RanksRecord, StepRecord
from paceline.spec.journal.line import line_of
from paceline.spec.journal.record import read
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec, Task
from paceline.spec.watch.observe import ObserveSpec
from paceline.units import Amount

RANKS = (1, 8, 64, 1024, 16_384)
STEPS_OF_A_TURN = 5
SEQ_LEN, BATCH = 16, 16


class Contender:
    """Makes steps of a small decoder, watched or not."""

    def __init__(self, watched: bool, every: int) -> None:
        from paceline.run.assemble import assemble
        from paceline.run.loop.loader import BatchStream

        model = ModelSpec("llama-1m", hidden=256, layers=6, heads=8, kv_heads=4, ffn=704, vocab=512)
        batch = Amount(BATCH, "samples")
        task = Task(name="watched", model=model, data=TokenRows(1000, SEQ_LEN, 61), global_batch=batch)
        plan = Plan(layout=Layout(), micro_batch=BATCH // 2, accumulation=2, batch_samples=BATCH)
        self.world = World(0, 1, 0, torch.device("cpu"))
        self.stepper = assemble(task, plan, self.world, task.data, SEQ_LEN).stepper
        self.stream = BatchStream(task.data, task.seed, plan, 0, self.world.device)
        self.batch, self.done = plan.batch_samples, 0
        self.health = TrainingHealth(every, HealthJudge()) if watched else None
        if self.health is not None:
            self.health.of(self.stepper, self.world)

    def turn(self, steps: int) -> float:
        """Make some steps and return the seconds that they took."""
        began = time.perf_counter()
        for _ in range(steps):
            self.done += 1
            stats = self.stepper.step(self.stream.at((self.done - 1) * self.batch), 1e-4)
            if self.health is not None:
                self.health.after(stats)
        return time.perf_counter() - began


def steps_cost(rounds: int) -> dict[str, float]:
    """Return how much longer steps take that are watched, and what one measurement takes of its interval."""
    observe = ObserveSpec()
    every = round(observe.health_every.value)
    entries = {"off": Contender(False, every), "on": Contender(True, every), "off again": Contender(False, every),
               "each step measured": Contender(True, 1)}  # fmt: skip
    for entry in entries.values():
        entry.turn(STEPS_OF_A_TURN)
    seen = [SeenRank(0, 1)]
    ratios: dict[str, list[float]] = {name: [] for name in entries}
    seconds = []
    order = list(entries)
    for number in range(rounds):
        took = {}
        for name in order[number % len(order) :] + order[: number % len(order)]:
            sampler = None
            if name == "on":  # the node's thread belongs to what is on by default
                sampler = NodeSampler("here", seen, sensors_of(seen), SamplesOfFirst(), observe.every)
                sampler.start()
            took[name] = entries[name].turn(STEPS_OF_A_TURN)
            if sampler is not None:
                sampler.close()
        for name, value in took.items():
            ratios[name].append(value / took["off"])
        seconds.append(took["off"] / STEPS_OF_A_TURN)
    found = {f"{name}: ratio": statistics.median(values) for name, values in ratios.items()}
    found["step seconds"] = statistics.median(seconds)
    # Measuring every step adds its share to each; by default it is one in so many.
    found["health sample, share of its interval"] = (found["each step measured: ratio"] - 1.0) / every
    found["all on, by its parts: ratio"] = (
        1.0 + found["health sample, share of its interval"] + sample_seconds() / observe.every
    )
    return found


def sample_seconds(count: int = 50) -> float:
    """Return the CPU seconds of one sample of this node."""
    seen = [SeenRank(rank, rank + 1) for rank in range(8)]
    sampler = NodeSampler("here", seen, sensors_of(seen), SamplesOfFirst(), 10.0)
    began = time.process_time()
    for _ in range(count):
        sampler.sample()
    return (time.process_time() - began) / count


def scalar_microseconds(steps: int) -> float:
    """Return the CPU microseconds of each number that a step's record holds, written to the journal."""
    record = read(StepRecord, {
        "step": 1, "position_before": 0, "position_after": 16, "loss": 2.5, "weight": 2048.0, "grad_norm": 1.0,
        "lr": 1e-3, "tokens_per_second": 2e4, "peak_bytes": 2**30, "waiting_seconds": 0.01,
        "seconds": {"total": 0.1, "data": 0.01, "forward_backward": 0.07, "reduce": 0.01, "optimizer": 0.01,
                    "other": 0.0},
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        began = time.process_time()
        for _ in range(steps):
            journal.write(record)
        spent = time.process_time() - began
        journal.close()
    return spent / steps / 15 * 1e6


def record_bytes() -> dict[str, dict[str, int]]:
    """Return how large records are of so many ranks."""
    found = {}
    for ranks in RANKS:
        names = ("total", "data", "forward_backward", "reduce", "optimizer", "computing", "waiting")
        values = [0.1 + 1e-9 * rank for rank in range(ranks)]
        over = spread_of_numbers(values)
        assert over is not None
        told = RanksRecord(100, 100, ranks, "cuda", {name: over.told() for name in names})
        reading = SensorReading()
        for rank in range(ranks):  # as if all of them were of one node
            for name in ("celsius", "watts", "utilisation", "memory_bytes", "joules"):
                reading.of_rank(rank, name, 50.0 + rank % 13)
        sample = node_sample(reading, "node", range(min(ranks, 8)), 100, 10.0, detail=False)
        found[str(ranks)] = {"ranks": len(line_of(told)), "node": len(line_of(sample))}
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it runs")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds, steps = (4, 500) if options.quick else (options.rounds, 20_000)
    found: dict[str, Any] = {"machine": machine(), "rounds": rounds, **steps_cost(rounds)}
    found["scalar, CPU microseconds"] = scalar_microseconds(steps)
    found["node sample, CPU seconds"] = sample_seconds()
    found["record bytes by ranks"] = record_bytes()
    for name, value in found.items():
        print(f"{name:<42} {value if not isinstance(value, float) else format(value, '.5g')}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
