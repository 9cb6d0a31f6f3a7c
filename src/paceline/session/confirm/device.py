"""A rank of the probe that tries micro-batches: `python -m paceline.session.confirm.device REQUEST RESULT`.

REQUEST is a JSON file of {spec: file of the spec, plan, kind, threads, sizes: micro-batches in rising order, samples,
seconds}. All ranks of the plan take part, and make steps that no run keeps. Rank 0 writes RESULT, which names the
micro-batch that is being tried, so that what ends the probe can be told.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from paceline.errors import OutOfMemory, exhausted_by, first_line
from paceline.launch.here import place_here
from paceline.launch.worker import guarded
from paceline.run.process.handover import take_over
from paceline.supervise.parent import end_with_parent

LEAST, MOST = 3, 20  # rounds that are timed


def main() -> int:
    """Try the micro-batches of the request and return the exit code."""
    end_with_parent()
    return guarded(lambda: _try(Path(sys.argv[1]), Path(sys.argv[2])))


def _try(request_path: Path, result_path: Path) -> None:
    import torch

    from paceline.run.process.world import join_world

    request = json.loads(request_path.read_text())
    world = join_world(request["kind"], threads=request["threads"], place=place_here(os.environ))
    try:
        _steps(request, result_path, world)
    except Exception as error:  # a user's model or data may raise anything
        if (exhausted := exhausted_by(error)) is None:
            raise
        what = f"out of memory on rank {world.rank} of a probe"
        raise OutOfMemory(what, first_line(exhausted)).naming_ranks() from error
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    world.wait()


def _steps(request: dict[str, Any], result_path: Path, world: Any) -> None:
    import torch

    from paceline.run.assemble import assemble
    from paceline.run.loop.loader import BatchStream
    from paceline.run.memory.spent import MemoryMeter
    from paceline.spec.plan import plan_from_dict
    from paceline.task.data.rows.packed import for_device
    from paceline.task.data.source import open_sources

    task, plan = take_over(Path(request["spec"])).task, plan_from_dict(request["plan"])
    meter = MemoryMeter(world.device)
    source, _ = open_sources(task.data, task.seed)
    built = assemble(task, plan, world, source, source.items_per_sample)
    read = for_device(source, world.device.type, task.model)
    samples, at_once = cut(task, source, request["samples"], request["sizes"])
    stream = BatchStream(read, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    on_cuda = world.device.type == "cuda"
    taken: dict[int, list[float]] = {size: [] for size in request["sizes"]}
    peaks: dict[int, float] = {}

    def one(size: int) -> float:
        batch = stream.at(0, 1, samples, at_once[size])
        world.wait()
        began = time.perf_counter()
        built.stepper.step(batch, lr=0.0)
        if on_cuda:
            torch.cuda.synchronize(world.device)
        (slowest,) = world.maximum([time.perf_counter() - began])
        return float(slowest)

    def tell(trying: int | None) -> None:
        if world.is_first:
            told = {"trying": trying, "seconds": taken, "peak_bytes": peaks}
            result_path.write_text(json.dumps(told))

    first = 0.0
    for size in request["sizes"]:
        tell(size)
        one(size)  # warms up
        meter.begin_anew()
        first += one(size)
        peak = meter.recent_bytes() if on_cuda else meter.peak_bytes()
        (peaks[size],) = world.maximum([float(peak)])
    tell(None)
    rounds = min(MOST, max(LEAST, math.floor(request["seconds"] / max(first, 1e-6))))
    for _ in range(rounds):
        for size in request["sizes"]:
            taken[size].append(one(size))
    tell(None)


def cut(task: Any, source: Any, asked: int, sizes: list[int]) -> tuple[int, dict[int, int]]:
    """Return the samples of a step of the probe, and for each micro-batch how many of them a rank passes at once.

    A budget of tokens takes as many of the run's first batch as make up the tokens of those asked for, as a run cuts
    them: of samples half as long as the longest, twice as many.
    """
    from paceline.task.data.order.budget import rows_of_task

    if (rows := rows_of_task(task, source, asked)) is None:
        return asked, {size: size for size in sizes}
    first = rows.at(1, 0)
    longest = int(rows.lengths_at(0, first).max(initial=1))
    at_once = {size: rows.passed_at_once(longest, size) for size in sizes}
    return min(first, asked * at_once[sizes[-1]] // sizes[-1]), at_once


def spread_of(seconds: list[float]) -> float:
    """Return how far the middle half of some repeats spreads, over their median."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
