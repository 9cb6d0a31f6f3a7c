"""One rank of the forecast grid: runs many plans of one task in turns and writes what they took.

    python benchmarks/grid/worker.py REQUEST RESULT

REQUEST is a JSON file of {spec, plans, rounds, steps, threads, memory_seconds}. Every plan is assembled once and makes
steps for `memory_seconds`, in which its memory is measured, after two of them and at the end: the C library's heap goes
on growing for some hundred steps of a run, as blocks of other sizes come free. Then plans take turns of a few steps, so
that what else the machine does hits all alike. A fixed step and an all-reduce take their turns with them (pace.py).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from grid.pace import FixedStep
from paceline.cluster.here.imported import TORCH_OF_A_RANK
from paceline.launch.here import place_here
from paceline.launch.worker import guarded
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.process.handover import take_over
from paceline.run.process.world import World, join_world
from paceline.spec.plan import plan_from_dict
from paceline.supervise.parent import end_with_parent
from paceline.task.data.source import open_sources

WARM_SECONDS = 0.5
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Turn:
    """A plan, assembled: makes steps and says how long they took on the slowest rank."""

    def __init__(self, task: Any, plan: Any, world: World, source: Any) -> None:
        self.world, self.position, self.batch = world, 0, plan.batch_samples
        self.stepper = assemble(task, plan, world, source, source.items_per_sample).stepper
        self.stream = BatchStream(source, task.seed, plan, plan.layout.data_rank(world.rank), world.device)

    def step(self) -> float:
        """Make one step, the reading of its batch included, and return the seconds."""
        self.world.wait()
        begin = time.perf_counter()
        self.stepper.step(self.stream.at(self.position), lr=1e-4)
        self.position += self.batch
        return self.world.maximum([time.perf_counter() - begin])[0]

    def go_on(self, seconds: float) -> None:
        """Make steps for so long."""
        taken = 0.0
        while taken < seconds:
            taken += self.step()

    def steady(self, steps: int) -> list[float]:
        """Return the seconds of so many steps, or of half a second of them, made after half a second of others.

        A plan whose turn begins finds caches and threads as the plan before left them: the first steps of 0.1 s took
        up to 40 % longer than those of a run.
        """
        self.go_on(WARM_SECONDS)
        taken: list[float] = []
        while len(taken) < steps or sum(taken) < WARM_SECONDS:
            taken.append(self.step())
        return taken


def resident(field: str) -> int:
    """Return VmRSS, VmHWM or RssFile of this process in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def measure(request_path: Path, result_path: Path) -> None:
    """Run all plans of the request and write what each took, and {fixed_seconds, wait_seconds} of the turns between."""
    request = json.loads(request_path.read_text())
    world = join_world("cpu", threads=request["threads"], place=place_here(os.environ))
    task = take_over(Path(request["spec"])).task
    # As a run's ranks do: else the first plan that needs a module would hold it, and the others not.
    for name in TORCH_OF_A_RANK:
        import_module(name)
    base = resident("VmRSS") - resident("RssFile")
    source, _ = open_sources(task.data, task.seed)
    turns: list[Turn] = []
    peaks: list[float] = []  # of all steps
    early: list[float] = []  # of the first two
    for plan in map(plan_from_dict, request["plans"]):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        RESET.write_text("5")  # the high-water mark starts anew
        held = resident("VmRSS") - resident("RssFile")
        turn = Turn(task, plan, world, source)
        turn.step(), turn.step()
        for of in (early, peaks):
            own = resident("VmHWM") - resident("RssFile") - held
            of.append(world.maximum([float(base + own)])[0])
            if of is early:
                turn.go_on(request["memory_seconds"])
        turns.append(turn)
    seconds: list[list[float]] = [[] for _ in turns]
    fixed, fixed_seconds, wait_seconds = FixedStep(world), [], []
    for number in range(request["rounds"]):
        fixed_seconds.append(fixed.seconds())
        wait_seconds.append(fixed.wait_seconds())
        for place in range(len(turns)):
            at = (place + number) % len(turns)
            seconds[at] += turns[at].steady(request["steps"])
    fixed_seconds.append(fixed.seconds())
    wait_seconds.append(fixed.wait_seconds())
    if world.is_first:
        rows = [
            {"seconds": taken, "peak_bytes": peak, "early_bytes": first, "fixed_seconds": fixed_seconds,
             "wait_seconds": wait_seconds}
            for taken, peak, first in zip(seconds, peaks, early, strict=True)
        ]  # fmt: skip
        result_path.write_text(json.dumps(rows))
    world.wait()


if __name__ == "__main__":
    end_with_parent()
    code = guarded(lambda: measure(Path(sys.argv[1]), Path(sys.argv[2])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
