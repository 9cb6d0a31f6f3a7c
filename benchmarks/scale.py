"""What bookkeeping takes against the number of ranks: simulated up to 16,384, and in real processes up to 64.

    python benchmarks/scale.py [--quick] [--simulated 16,64] [--ranks 2,4,8] [--with FILE] [--save]

Simulated are the objects of one rank, and those of rank 0, in a world of N (worlds/simulated_world.py): no processes
and no tensors. Real are N processes of a
tiny decoder on this machine, forked from one: more processes than cores wait for each other, so what counts is the CPU
time of one rank. The exponent is the slope of a least-squares line through log cost over log N: 0 for what does not
grow, 1 for what grows like the number of ranks.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import keep, machine
from worlds.simulated_world import simulated

SIMULATED = (16, 64, 256, 1024, 4096, 16384)
REAL = (2, 4, 8, 16, 32, 64)
BYTES_OF_A_PROCESS = 80e6  # of its own, as measured; what forked processes share does not count
STEPS = 5


@dataclass(frozen=True)
class Row:
    """One cost at every number of ranks, and how it grows."""

    what: str
    whose: str  # "a rank" or "rank 0"
    unit: str
    costs: dict[int, float]

    @property
    def exponent(self) -> float:
        """Return the slope of log cost over log N; 0 for what costs nothing anywhere."""
        points = [(math.log(ranks), math.log(cost)) for ranks, cost in self.costs.items() if cost > 0]
        if len(points) < 2:
            return 0.0
        x, y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
        return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


# ---- real processes --------------------------------------------------------------------------------------------------


def real(ranks: int) -> dict[tuple[str, str, str], float]:
    """Return what start, step, check, save and load take in so many processes: the mean of their CPU time, and wall."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, __file__, "--processes", str(ranks), str(out)], check=True, env=environ)
        costs: dict[str, list[float]] = json.loads(out.read_text())
    found = {}
    for what, (cpu, wall) in costs.items():
        if what in ("descriptors", "memory of its own"):
            found[what, "a rank", {"descriptors": "open"}.get(what, "MB")] = cpu
        else:
            found[what, "a rank", "ms of CPU"] = 1e3 * cpu
            found[what, "all", "s"] = wall
    return found


def start_processes(ranks: int, out: Path) -> int:
    """Fork the processes from this one, which has imported all that they need, and wait for their end."""
    import torch

    import paceline.run.assemble  # noqa: F401
    from paceline.launch.worker import guarded
    from paceline.supervise.forked import fork
    from paceline.supervise.supervisor import explain, supervise_started

    torch.set_num_threads(1)
    work = functools.partial(guarded, functools.partial(be_a_rank, out, time.time()))
    outcome = supervise_started(functools.partial(fork, work), ranks, os.environ, 240.0)
    explain(outcome)
    return outcome.exit_code


def be_a_rank(out: Path, began: float) -> None:
    """Start, make steps, check, save twice and load, as one of the ranks; rank 0 writes what they took."""
    from common import TokenRows

    from paceline.checkpoint import KeptPlan, load_checkpoint, save_checkpoint, training_state
    from paceline.launch.here import place_here
    from paceline.run.assemble import assemble
    from paceline.run.loop.loader import BatchStream
    from paceline.run.numerics.invariants import check_agreement, numbers_of
    from paceline.run.process.spread import spread_over
    from paceline.run.process.world import join_world
    from paceline.spec.layout import Layout
    from paceline.spec.plan import Plan
    from paceline.spec.task import ModelSpec, Task
    from paceline.units import Amount

    world = join_world("cpu", threads=1, place=place_here(os.environ))
    layout = Layout(dp_replicate=2, dp_shard=world.size // 2)
    costs: dict[str, list[float]] = {}
    cpu, wall = 0.0, began

    def note(what: str, times: int = 1) -> None:
        nonlocal cpu, wall
        used = time.process_time() - cpu
        mean = world.sum([used])[0] / world.size
        costs[what] = [mean / times, (time.time() - wall) / times]
        world.wait()
        cpu, wall = time.process_time(), time.time()

    note("joining the world")
    source = TokenRows(4 * world.size, 32, 128)
    task = Task(
        name="scale", data=source, global_batch=Amount(world.size, "samples"), stop=Amount(STEPS, "steps"),
        model=ModelSpec("llama-1m", hidden=64, layers=2, heads=4, kv_heads=4, ffn=64, vocab=128),
    )  # fmt: skip
    plan = Plan(layout=layout, micro_batch=1, accumulation=1, batch_samples=world.size)
    built = assemble(task, plan, world, source, source.items_per_sample)
    stream = BatchStream(source, task.seed, plan, layout.data_rank(world.rank), world.device)
    note("building the model")
    stats = built.stepper.step(stream.at(0, 1), 1e-3)
    note("the first step")
    for step in range(1, STEPS + 1):
        stats = built.stepper.step(stream.at(step * world.size % (3 * world.size), step + 1), 1e-3)
    note("a step", STEPS)
    for _ in range(STEPS):
        check_agreement(built.model, numbers_of(stats, None), 1, world, layout)
    note("a check that copies agree", STEPS)
    for few, what in ((world.size, "means of 20 parts of a step, gathered"), (0, "means of 20 parts, by sums")):
        for _ in range(STEPS):
            spread_over(world, [float(world.rank % 7) + part for part in range(20)], few)
        note(what, STEPS)
    state, kept, root = training_state(built.model, built.optimizer), KeptPlan(), out.parent / "checkpoints"
    for step, what in enumerate(("the first save", "a save like the last"), 1):
        info = save_checkpoint(root, step, state, {}, keep_last=2, kept=kept)
        note(what)
    load_checkpoint(info.path, state)
    note("a load")
    own = [line.split()[1] for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Private" in line]
    used = [float(len(list(Path("/proc/self/fd").iterdir()))), sum(map(int, own)) / 1e3]
    for what, most in zip(("descriptors", "memory of its own"), world.maximum(used), strict=True):
        costs[what] = [most, 0.0]
    if world.is_first:
        out.write_text(json.dumps(costs))
    world.wait()


def fits(ranks: int) -> bool:
    """Return whether this machine has the memory for so many processes, with as much again to spare."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return 2 * ranks * BYTES_OF_A_PROCESS < available


# ---- tables ----------------------------------------------------------------------------------------------------------


def rows_of(costs: dict[int, dict[tuple[str, str, str], float]]) -> list[Row]:
    """Return one row per cost, in the order of the first number of ranks."""
    keys = dict.fromkeys(itertools.chain.from_iterable(costs.values()))
    return [Row(*key, {ranks: found[key] for ranks, found in costs.items() if key in found}) for key in keys]


def rows_in(told: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of a result in JSON."""
    return [Row(each["what"], each["whose"], each["unit"], {int(n): cost for n, cost in each["costs"].items()})
            for each in told]  # fmt: skip


def numbers_in(text: str | None, otherwise: Sequence[int]) -> Sequence[int]:
    """Return the numbers of a list with commas, others where there is none."""
    return otherwise if text is None else [int(number) for number in text.split(",") if number]


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown."""
    ranks = list(dict.fromkeys(itertools.chain.from_iterable(row.costs for row in rows)))
    lines = [
        f"| what | of | in | {' | '.join(f'N = {n:,}' for n in ranks)} | exponent |",
        f"|---|---|---|{'---:|' * (len(ranks) + 1)}",
    ]
    for row in rows:
        cells = [f"{row.costs[n]:,.3g}" if row.costs.get(n, 0) < 1000 else f"{row.costs[n]:,.0f}" for n in ranks]
        lines.append(f"| {row.what} | {row.whose} | {row.unit} | {' | '.join(cells)} | {row.exponent:.2f} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure, print the tables, and write them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few numbers of ranks, to see that it works")
    parser.add_argument("--ranks", metavar="N,N", help="numbers of real processes; empty for none")
    parser.add_argument("--simulated", metavar="N,N", help="numbers of ranks of simulated worlds; empty for none")
    parser.add_argument("--with", dest="earlier", type=Path, metavar="FILE", help="JSON of a run that made "
                        "what this one leaves out")  # fmt: skip
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/scale.md, and figures/scale.json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--processes", nargs=2, metavar=("N", "FILE"), help="be the real processes")
    options = parser.parse_args(arguments)
    if options.processes:
        return start_processes(int(options.processes[0]), Path(options.processes[1]))
    worlds = numbers_in(options.simulated, SIMULATED[:3] if options.quick else SIMULATED)
    counts = numbers_in(options.ranks, REAL[:2] if options.quick else REAL)
    before = os.getloadavg()[0]
    made = {
        "simulated": rows_of({n: simulated(n) for n in worlds}),
        "processes": rows_of({n: real(n) for n in counts if fits(n)}),
    }
    earlier: dict[str, Any] = json.loads(options.earlier.read_text()) if options.earlier else {}
    loads = [*earlier.get("load", ()), before, os.getloadavg()[0]]
    result: dict[str, Any] = {
        "machine": machine(),
        "load": [min(loads), max(loads)],
        "left_out": [n for n in counts if not fits(n)],
    }
    tables = []
    for name, rows in made.items():
        facts = result["machine"] if rows else earlier.get(f"machine of {name}") or earlier.get("machine", {})
        rows = rows or rows_in(earlier.get(name, ()))
        result[name] = [{**asdict(row), "exponent": row.exponent} for row in rows]
        result[f"machine of {name}"] = facts
        if rows:
            where = f"{facts['date']} · {facts['cpu']}, {facts['cores']} cores · torch {facts['torch']}"
            tables.append(f"{where}\n\n{table(rows)}")
    printed = "\n\n".join(tables)
    print(printed)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.save:
        head = "# Costs against the number of ranks\n\n`python benchmarks/scale.py --save`"
        keep("scale", result, f"{head}\n\nLoad average {min(loads):.0f} to {max(loads):.0f}.\n\n{printed}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
