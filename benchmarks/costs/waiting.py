"""What a step on a CPU takes by how threads wait for each other: by spinning, for how long, or asleep.

    python benchmarks/costs/waiting.py [--quick] [--rounds 5] [--seconds 2] [--beside 0,1,2] [--priority N] [--json F]

A process trains a small model with a thread for each core, once for each policy, beside none and beside some other
processes that compute all the time. Policies take turns within a round; a figure is the median over the rounds of a
policy's time for a step over that of libgomp's own default in the same round. `ours` is what Paceline gives the
processes it starts (paceline/cluster/here/waiting.py). With `--priority` the measured process alone runs before
everything else on the machine (SCHED_RR; needs rights), so that "beside none" is as on idle cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.cluster.here.waiting import CHOSEN_BY_USER, waiting

sys.path.insert(0, str(Path(__file__).parents[1]))  # what benchmarks share
from common import machine, median_of

POLICIES: dict[str, dict[str, str]] = {
    "the default": {},
    "ours": waiting({}),
    "1,000 turns": {"GOMP_SPINCOUNT": "1000"},
    "10,000 turns": {"GOMP_SPINCOUNT": "10000"},
    "asleep": {"OMP_WAIT_POLICY": "passive"},
    "the default again": {},
}
MODELS = {"llama-1m": 8, "llama-3m": 4}  # micro-batch, in samples of 128 tokens


def step_here(model: str, rows: int, seconds: float, priority: int) -> None:
    """Train for some seconds in this process, and print the seconds of each step."""
    if priority:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))
    import torch
    from common import TokenRows

    from paceline.run.assemble import assemble
    from paceline.run.loop.loader import BatchStream
    from paceline.run.process.world import World
    from paceline.spec.layout import Layout
    from paceline.spec.plan import Plan
    from paceline.spec.task import ModelSpec, Task

    samples, world = TokenRows(4096, 128, 257), World(0, 1, 0, torch.device("cpu"))
    task = Task(name="waiting", model=ModelSpec(model, vocab=257), data=samples, seed=7)
    plan = Plan(Layout(), micro_batch=rows, accumulation=1, batch_samples=rows)
    built, stream = assemble(task, plan, world, samples, 128), BatchStream(samples, task.seed, plan, 0, world.device)
    took: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(took) < 5:
        before = time.perf_counter()
        built.stepper.step(stream.at(len(took) * rows), 1e-3)
        took.append(time.perf_counter() - before)
    print(json.dumps(took[2:]))  # first steps make the optimizer's state


def step_seconds(model: str, added: dict[str, str], options: argparse.Namespace) -> float:
    """Return the median seconds of a step in a process of its own, with these additions to its environment."""
    clean = {name: value for name, value in os.environ.items() if name not in CHOSEN_BY_USER}
    command = [sys.executable, __file__, "--step", model, "--seconds", str(options.seconds)]
    done = subprocess.run(
        [*command, "--priority", str(options.priority)],
        env={**clean, **added}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return statistics.median(json.loads(done.stdout))


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Have some processes compute all the time while what stands inside runs.

    Each has a session of its own, as programs of others do: Linux shares cores out by session first.
    """
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command, start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(model: str, beside: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each policy of one model beside so many busy processes."""
    ratios: dict[str, list[float]] = {name: [] for name in POLICIES}
    seconds: dict[str, list[float]] = {name: [] for name in POLICIES}
    for number in range(options.rounds):
        names = list(POLICIES)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with busy(beside):
                seconds[name].append(step_seconds(model, POLICIES[name], options))
        for name in names:
            ratios[name].append(seconds[name][-1] / seconds["the default"][-1])
    return [
        {"model": model, "beside": beside, "policy": name, "ratio": vars(median_of(ratios[name])),
         "seconds": statistics.median(seconds[name])}
        for name in POLICIES
    ]  # fmt: skip


def main(arguments: list[str]) -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="for which each process trains")
    parser.add_argument("--beside", default="0,1,2", help="numbers of busy processes")
    parser.add_argument("--priority", type=int, default=0, help="of the measured process alone, as SCHED_RR; 0: as any")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--quick", action="store_true", help="one short round of the small model")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--step", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.step:
        step_here(options.step, MODELS[options.step], options.seconds, options.priority)
        return
    if options.quick:
        options.models, options.rounds, options.seconds, options.beside = "llama-1m", 1, 0.2, "0"
    print("| model | beside | policy | over the default | a step, ms |\n|---|---:|---|---:|---:|")
    rows = []
    for model in options.models.split(","):
        for beside in (int(number) for number in options.beside.split(",")):
            for row in measure(model, beside, options):
                rows.append(row)
                ratio = row["ratio"]
                print(f"| {model} | {beside} | {row['policy']} | {ratio['median']:.3f} ({ratio['low']:.3f} to"
                      f" {ratio['high']:.3f}) | {row['seconds'] * 1e3:.1f} |", flush=True)  # fmt: skip
    if options.json:
        result = {"machine": machine(), "rounds": options.rounds, "priority": options.priority, "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
