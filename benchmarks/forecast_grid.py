"""Forecasts against measurements on this machine: ten tasks, every layout of 1, 2 and 4 processes.

    python benchmarks/forecast_grid.py --work FOLDER [--minutes 20] [--tasks small,moe] [--save] [--score]

The machine is probed first, for each number of processes. Of every layout, ZeRO class and schedule, the plan that the
planner would choose for it is run: plans of one task take turns of a few steps, a few plans at a time. FOLDER keeps the
probes and a line for every plan that was measured, so the next call goes on where this one stopped; the scores are of
all that it holds. With `--score` nothing is measured, and what FOLDER holds is forecast anew, from its probes. Two
views: by the formulas alone, and after learning from half of the rows, where every row is scored by what the other half
taught (grid/scores.py). Where the machine's speed changed since the probe, both are made again (grid/pace.py).

Some tasks are those where copies of the model lose or do not fit: little memory (nine tenths of what copies are
forecast to need), a slow network (worlds/slow_network.py, which the probe measures as well), long sequences, experts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import keep, machine, strict_json
from grid.pace import TRIES, is_steady, pace_of, pace_of_waits
from grid.scores import document, parts_of, rows_of, score, table
from worlds import slow_network

from paceline.cluster.probe.probe import probe_machine
from paceline.errors import DoesNotFit, PacelineError
from paceline.plan.learn.observation import Observation, machine_key, observation_from_dict
from paceline.plan.learn.recall import forecast_runs
from paceline.plan.planned import Planned, plan_task
from paceline.run.process.handover import hand_over
from paceline.spec.load import load_spec
from paceline.spec.plan import Plan
from paceline.supervise.supervisor import supervise

HERE = Path(__file__).parent
LARGER = ["task.model=llama-1m", "task.model.hidden=320", "task.model.layers=6", "task.model.heads=8",
          "task.model.kv_heads=4", "task.model.ffn=896", "task.data.seq_len=128",
          "task.global_batch=8 samples"]  # fmt: skip
TASKS = {
    "small decoder": ["task.model=llama-1m", "task.data.seq_len=128", "task.global_batch=16 samples"],
    "larger decoder": LARGER,
    "mixture of experts": ["task.model=moe-2m", "task.data.seq_len=64", "task.global_batch=32 samples"],
    "long sequence": ["task.model=llama-1m", "task.data.seq_len=1024", "task.global_batch=4 samples"],
    "vision": [
        "task.model.name=digits_model:build", "task.model.arguments={ width = 256, depth = 6 }",
        "task.data.source=digits", "task.global_batch=512 samples",
    ],
    "user module": ["task.model.name=grid.models:encoder", "task.data.source=digits", "task.global_batch=32 samples"],
    # Two samples a step: four copies of the model have nothing to read.
    "few long samples": ["task.model=llama-1m", "task.data.seq_len=2048", "task.global_batch=2 samples"],
    "slow network": LARGER,
    "little memory": LARGER,
    "experts in little memory": ["task.model=moe-2m", "task.data.seq_len=64", "task.global_batch=32 samples"],
}  # fmt: skip
SLOW = {"slow network": {"SLOW_BYTES_PER_SECOND": "125e6", "SLOW_SECONDS": "2e-4"}}  # a gigabit, and 0.2 ms
LITTLE = (0.9, 0.95, 1.0)  # of what copies are forecast to need, headroom aside: the least in which any plan fits
COMMON = ["cluster.device=cpu", "cluster.learn=false", "plan.precision=fp32", "plan.recompute=none",
          "task.stop=1000 steps", "run.checkpoints.asynchronous=off"]  # the worker saves nothing  # fmt: skip
QUICK = ["task.data.seq_len=32", "task.global_batch=4 samples"]
LIMIT_SECONDS = 180.0  # of a few plans of one task on one number of processes
TOGETHER = 8  # plans that take turns


@dataclass(frozen=True)
class Case:
    """One task on one number of processes: its plan, the plans to be measured, and the memory of a device."""

    task: str
    planned: Planned
    plans: tuple[Plan, ...]
    limit_bytes: float

    def todo(self, done: Sequence[dict[str, Any]]) -> list[Plan]:
        """Return the plans that no line is of."""
        known = {line["plan"] for line in done if (line["task"], line["devices"]) == (self.task, self.devices)}
        return [plan for plan in self.plans if str(plan) not in known]

    @property
    def devices(self) -> int:
        """The number of processes."""
        return self.planned.cluster.devices


def corpus(folder: Path) -> str:
    """Write a text with something to learn in it and return the override that names it."""
    path = folder / "numbers.txt"
    path.write_text(" ".join(f"{n} plus {n % 97} is {n + n % 97}." for n in range(20_000)))
    return f"task.data.source={path}"


def plans_of(planned: Planned, most: int) -> list[Plan]:
    """Return the best plan of every layout, class of sharding and schedule; `most` of them spread evenly, 0: all."""
    best: dict[object, Plan] = {}
    for candidate in planned.search.candidates:
        plan = candidate.plan
        best.setdefault((plan.layout, plan.zero if plan.layout.state_degree > 1 else 0, plan.schedule), plan)
    plans = list(best.values())
    if not most or len(plans) <= most:
        return plans
    return [plans[place * (len(plans) - 1) // max(1, most - 1)] for place in range(most)]


@contextlib.contextmanager
def environment(work: Path, task: str) -> Iterator[None]:
    """Run what stands inside with the cache and the network of a task."""
    slow = SLOW.get(task)
    home = work / ("slow-home" if slow else "home")
    asked = {"XDG_CACHE_HOME": str(home), **({"LD_PRELOAD": str(slow_network.build(work)), **slow} if slow else {})}
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def case_of(task: str, devices: int, work: Path, options: argparse.Namespace) -> Case:
    """Return a task on so many processes, planned on what was probed; this is probed where it was not before."""
    kept, probes = kept_probe(work, task, devices), Path(os.environ["XDG_CACHE_HOME"]) / "paceline" / "probes"
    if kept.exists():  # the one that this task's rows were measured with
        probes.mkdir(parents=True, exist_ok=True)
        shutil.copy(kept, probes / json.loads(kept.read_text())["file"])
    elif not (marker := probe_marker(devices)).exists():
        probe_machine(devices, "cpu", say=lambda line: None, seconds_budget=options.probe_seconds)
        marker.touch()
    given = TASKS[task]
    data = [] if any("data.source" in value for value in given) else [corpus(work)]
    asked = [*COMMON, *given, *data, *(QUICK if options.quick else []), f"cluster.devices={devices}"]
    planned, limit = plan_task(load_spec(None, asked)), 0.0
    if "little memory" in task:
        planned, limit = in_little_memory(planned, asked)
    return Case(task, planned, tuple(plans_of(planned, options.layouts)), limit)


def probe_marker(devices: int) -> Path:
    """Return the file that says that so many processes were probed in the current cache."""
    return Path(os.environ["XDG_CACHE_HOME"]) / f"probed-{devices}"


def kept_probe(work: Path, task: str, devices: int) -> Path:
    """Return where the probe is kept that a task's rows are forecast with; another task may have made a later one."""
    return work / "probes" / f"{task.replace(' ', '-')}-{devices}.json"


def keep_probe(work: Path, task: str, devices: int) -> None:
    """Keep the probe that the current cache holds as that of a task's rows."""
    (path,) = (Path(os.environ["XDG_CACHE_HOME"]) / "paceline" / "probes").glob(f"*-cpu-{devices}x*.json")
    kept = kept_probe(work, task, devices)
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps({**json.loads(path.read_text()), "file": path.name}))


def in_little_memory(planned: Planned, asked: Sequence[str]) -> tuple[Planned, float]:
    """Return the task planned on devices that cannot hold copies, and their bytes. Raises DoesNotFit where none fits.

    Of a small model most of the memory is the runtime's, which no layout makes less, so a fixed share of what copies
    need may leave no plan.
    """
    devices = planned.cluster.devices
    copies = next(one for one in planned.search.candidates if one.plan.layout.dp_replicate == devices)
    for share in LITTLE:
        limit = share * copies.forecast.peak_bytes.value
        try:
            return plan_task(load_spec(None, [*asked, f"cluster.memory_per_device={limit:.0f} B"])), limit
        except DoesNotFit as error:
            refused = error
    raise refused


def measure(planned: Planned, plans: Sequence[Plan], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what each plan took, as grid/worker.py writes it. Raises PacelineError where a process fails."""
    with tempfile.TemporaryDirectory(prefix="grid-") as name:
        folder = Path(name)
        request, result = folder / "request.json", folder / "result.json"
        request.write_text(json.dumps({
            "spec": str(hand_over(planned.spec, folder)), "plans": [asdict(plan) for plan in plans],
            "rounds": options.rounds, "steps": options.steps, "threads": planned.threads,
            "memory_seconds": options.memory_seconds,
        }))  # fmt: skip
        command = [sys.executable, str(HERE / "grid" / "worker.py"), str(request), str(result)]
        environ = {**os.environ, "OMP_NUM_THREADS": str(planned.threads)}
        outcome = supervise(command, planned.cluster.devices, environ, LIMIT_SECONDS)
        if outcome.error is not None or not result.exists():
            details = outcome.error or {"what": "a process ended", "because": f"exit code {outcome.exit_code}"}
            raise PacelineError(str(details["what"]), str(details["because"]), "run the plans by themselves")
        measured: list[dict[str, Any]] = json.loads(result.read_text())
        return measured


def observe(name: str, planned: Planned, plan: Plan, measured: dict[str, Any]) -> Observation:
    """Return a measured plan as what a finished run leaves."""
    seconds = statistics.median(measured["seconds"])
    quartiles = statistics.quantiles(measured["seconds"], n=4, method="inclusive")
    return Observation(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), run="", name=name,
        machine=machine_key(planned.cluster), profile=planned.profile, optimizer=planned.spec.task.optimizer.name,
        plan=plan, devices=planned.cluster.devices, devices_per_node=planned.cluster.devices_per_node,
        steps=len(measured["seconds"]), step_seconds=seconds, spread=(quartiles[2] - quartiles[0]) / 1.349 / seconds,
        peak_bytes=measured["peak_bytes"],
    )  # fmt: skip


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of measured plans; one that a stopped call tore is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


UNSTEADY = "the machine's speed is not that of its probe"


def go_on(
    case: Case, lines: list[dict[str, Any]], path: Path, options: argparse.Namespace, until: float, last: bool = True
) -> str:
    """Measure the case's plans that are not measured yet, until the time is up; return why one failed, or nothing.

    Unless it is the `last` try, plans are not kept whose fixed step or all-reduce shows another machine than probed.
    """
    todo = case.todo(lines)
    for at in range(0, len(todo), TOGETHER):
        if time.monotonic() > until:
            return ""
        plans = todo[at : at + TOGETHER]
        try:
            measured = measure(case.planned, plans, options)
        except PacelineError as error:
            return f"{error.what}: {error.because}"
        pace = pace_of(case.planned.cluster, measured[0].get("fixed_seconds", ()))
        waits = pace_of_waits(case.planned.cluster, measured[0].get("wait_seconds", ()))
        if not is_steady(pace, waits) and not last:
            print(f"{case.task}, {case.devices}: pace {pace:.2f}, waits {waits:.2f}: once more", flush=True)
            return UNSTEADY
        made = [
            {"task": case.task, "devices": case.devices, "plan": str(plan), "limit_bytes": case.limit_bytes,
             "pace": pace, "waits": waits, "early_bytes": one.get("early_bytes"),
             "observation": observe(case.task, case.planned, plan, one).as_dict()}
            for plan, one in zip(plans, measured, strict=True)
        ]  # fmt: skip
        lines += made
        is_torn = path.exists() and not path.read_text().endswith("\n")
        with path.open("a") as out:
            out.write("\n" * is_torn + "".join(json.dumps(line) + "\n" for line in made))
        told = f"{len(made)} plans measured, pace {pace:.2f}, waits {waits:.2f}"
        print(f"{case.task}, {case.devices}: {told}", flush=True)
    return ""


def tried(
    task: str, devices: int, work: Path, lines: list[dict[str, Any]], options: argparse.Namespace, until: float
) -> tuple[Case, str]:
    """Return a task on so many processes with all its plans measured, and why one failed, or nothing.

    Probe and plans are made again where the machine's speed has changed between them, a few times at most.
    """
    because = ""
    for left in reversed(range(1 if options.quick else TRIES)):
        case = case_of(task, devices, work, options)
        is_begun = len(case.todo(lines)) < len(case.plans)
        because = go_on(case, lines, work / "rows.jsonl", options, until, last=is_begun or not left)
        if because != UNSTEADY:
            break
        probe_marker(devices).unlink(missing_ok=True)
        kept_probe(work, task, devices).unlink(missing_ok=True)
    if not kept_probe(work, task, devices).exists():
        keep_probe(work, task, devices)
    return case, because


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", metavar="FOLDER", help="where probes and measured plans are kept; none: for this call"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no more plans after so long")
    parser.add_argument("--devices", default="1,2,4", help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument(
        "--layouts", type=int, default=0, help="most layouts of one task and number of processes; 0: all"
    )
    parser.add_argument("--tasks", default="", help="words of the tasks to run, such as small,vision")
    parser.add_argument(
        "--memory-seconds", type=float, default=3.0, help="steps that a plan makes before its memory is read"
    )
    parser.add_argument("--probe-seconds", type=float, default=15.0, help="time for each probe")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that everything works")
    parser.add_argument("--score", action="store_true", help="measure nothing: forecast anew what the folder holds")
    parser.add_argument("--json", metavar="OUT", help="also write the result as JSON")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/forecast_grid.md, and figures/forecast_grid.json"
    )
    options = parser.parse_args(arguments)
    if options.score and not options.work:
        parser.error("--score needs --work, the folder whose rows are to be forecast anew")
    if options.quick:
        options.devices, options.tasks, options.layouts = "1,2", options.tasks or "small", 2
        options.rounds, options.steps, options.probe_seconds, options.memory_seconds = 2, 2, 0.5, 0.2
    return options


def main(arguments: list[str]) -> int:
    """Probe, measure what is not measured yet, and score all; return 1 where nothing could be measured."""
    options = parse(arguments)
    sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
    until = time.monotonic() + 60 * options.minutes
    words = [word.strip() for word in options.tasks.split(",") if word.strip()]
    chosen = [name for name in TASKS if not words or any(word in name for word in words)]
    with contextlib.ExitStack() as kept:
        work = Path(options.work or kept.enter_context(tempfile.TemporaryDirectory(prefix="grid-work-")))
        work.mkdir(parents=True, exist_ok=True)
        lines, failed, cases = read_lines(work / "rows.jsonl"), list[dict[str, Any]](), dict[tuple[str, int], Case]()
        for devices in map(int, options.devices.split(",")):
            for task in chosen:
                if devices == 1 and (task in SLOW or "little memory" in task):
                    continue  # one process has no network, and no other layout
                if options.score and not kept_probe(work, task, devices).exists():
                    continue
                with environment(work, task):
                    if options.score:
                        case, because = case_of(task, devices, work, options), ""
                    else:
                        case, because = tried(task, devices, work, lines, options, until)
                cases[task, devices] = case
                if because:
                    failed.append({"task": task, "devices": devices, "because": because})
                    print(f"{task}, {devices}: {because}", flush=True)
    mine = [line for line in lines if (line["task"], line["devices"]) in cases]
    observations = [observation_from_dict(line["observation"]) for line in mine]
    runs = forecast_runs(observations, lambda one: cases[one.name, one.devices].planned.cluster)
    if not runs:
        return 1
    known = {id(one): line for one, line in zip(observations, mine, strict=True)}
    rows = rows_of(runs, [known[id(run.observation)] for run in runs])
    result = {
        "machine": machine(), "rounds": options.rounds, "steps": options.steps, "scores": score(rows),
        "asked": len(mine) if options.score else sum(len(case.plans) for case in cases.values()),
        "by_task": {name: score(members) for name, members in parts_of(rows).items()},
        "rows": [dataclasses.asdict(row) for row in rows], "not_measured": failed,
    }  # fmt: skip
    told = ["FOLDER" if word == options.work else word for word in arguments if word != "--score"]
    page = document(result, rows, f"python benchmarks/forecast_grid.py {' '.join(told)}".strip())
    print("\n".join(table(rows)))
    if options.json:
        Path(options.json).write_text(strict_json(result))
    if options.save:
        keep("forecast_grid", result, page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
