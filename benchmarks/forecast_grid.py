"""Forecasts against measurements on this machine: six tasks, every layout of 1, 2 and 4 processes.

    python benchmarks/forecast_grid.py [--quick] [--devices 1,2,4] [--rounds 3] [--steps 2] [--json OUT] [--save]

The machine is probed first, for each number of processes. Of every layout and ZeRO class, the plan that the planner
would choose for it is run: plans of one task take turns of a few steps. Two views: by the formulas alone, and after
learning from half of the rows, where every row is scored by what the other half taught. Regret is how much slower the
plan that is forecast to be fastest was than the fastest one, of one task on one number of processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, machine

from paceline.cluster.probe.probe import probe_machine
from paceline.errors import PacelineError
from paceline.plan.cost.columns import columns_of
from paceline.plan.learn.correct import Learnt, LearntRun
from paceline.plan.learn.observation import Observation, machine_key
from paceline.plan.learn.recall import forecast_runs
from paceline.plan.planned import Planned, plan_task
from paceline.run.process.handover import hand_over
from paceline.spec.load import load_spec
from paceline.spec.plan import Plan
from paceline.supervise.supervisor import supervise

HERE = Path(__file__).parent
TASKS = {
    "small decoder": ["task.model=llama-1m", "task.data.seq_len=128", "task.global_batch=16 samples"],
    "larger decoder": [
        "task.model=llama-1m", "task.model.hidden=320", "task.model.layers=6", "task.model.heads=8",
        "task.model.kv_heads=4", "task.model.ffn=896", "task.data.seq_len=128", "task.global_batch=8 samples",
    ],
    "mixture of experts": ["task.model=moe-2m", "task.data.seq_len=64", "task.global_batch=32 samples"],
    "long sequence": ["task.model=llama-1m", "task.data.seq_len=1024", "task.global_batch=4 samples"],
    "vision": [
        "task.model.name=digits_model:build", "task.model.arguments={ width = 256, depth = 6 }",
        "task.data.source=digits", "task.global_batch=512 samples",
    ],
    "user module": ["task.model.name=grid_models:encoder", "task.data.source=digits", "task.global_batch=32 samples"],
}  # fmt: skip
COMMON = ["cluster.device=cpu", "cluster.learn=false", "plan.precision=fp32", "plan.recompute=none",
          "task.stop=1000 steps"]  # fmt: skip
QUICK = ["task.data.seq_len=32", "task.global_batch=4 samples"]
LIMIT_SECONDS = 180.0  # of one task on one number of processes


@dataclass(frozen=True)
class Row:
    """One plan of one task: forecast by the formulas, after learning from the other half, and measured."""

    task: str
    devices: int
    plan: str
    measured_seconds: float
    forecast_seconds: float
    learnt_seconds: float
    measured_bytes: float
    forecast_bytes: float
    covered_80: bool
    learnt_covered_80: bool


def corpus(folder: Path) -> str:
    """Write a text with something to learn in it and return the override that names it."""
    path = folder / "numbers.txt"
    path.write_text(" ".join(f"{n} plus {n % 97} is {n + n % 97}." for n in range(20_000)))
    return f"task.data.source={path}"


def plans_of(planned: Planned, most: int) -> list[Plan]:
    """Return the best plan of every layout and class of sharding, spread evenly over their ranking where too many."""
    best: dict[object, Plan] = {}
    for candidate in planned.search.candidates:
        plan = candidate.plan
        best.setdefault((plan.layout, plan.zero if plan.layout.state_degree > 1 else 0, plan.schedule), plan)
    plans = list(best.values())
    places = sorted({round(place) for place in np.linspace(0, len(plans) - 1, min(most, len(plans)))})
    return [plans[place] for place in places]


def measure(planned: Planned, plans: Sequence[Plan], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return {seconds, peak_bytes} of each plan. Raises PacelineError where a process fails."""
    with tempfile.TemporaryDirectory(prefix="grid-") as name:
        folder = Path(name)
        request, result = folder / "request.json", folder / "result.json"
        request.write_text(json.dumps({
            "spec": str(hand_over(planned.spec, folder)), "plans": [asdict(plan) for plan in plans],
            "rounds": options.rounds, "steps": options.steps, "threads": planned.threads,
        }))  # fmt: skip
        command = [sys.executable, str(HERE / "grid_worker.py"), str(request), str(result)]
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


def halves(count: int) -> list[int]:
    """Return for each of so many rows which half it belongs to; the same ones in every run."""
    places = list(range(count))
    random.Random(0).shuffle(places)
    return [int(place < count // 2) for place in places]


def rows_of(runs: Sequence[LearntRun]) -> list[Row]:
    """Return the rows; each is forecast anew from what the half that it is not in has taught."""
    half = halves(len(runs))
    taught = [tuple(run for run, side in zip(runs, half, strict=True) if side != own) for own in (0, 1)]
    return [_row(run, taught[side]) for run, side in zip(runs, half, strict=True)]


def _row(run: LearntRun, others: tuple[LearntRun, ...]) -> Row:
    found = run.observation
    mean, spread = 0.0, run.time_spread
    if others:
        learnt = Learnt(found.task, others)
        means, spreads = learnt.correct_time(columns_of([found.plan]), np.array([run.time_spread]))
        mean, spread = float(means[0]), float(spreads[0])
    return Row(
        task=found.name, devices=found.devices, plan=str(found.plan), measured_seconds=found.step_seconds,
        forecast_seconds=run.forecast_seconds, learnt_seconds=run.forecast_seconds * math.exp(mean),
        measured_bytes=found.peak_bytes or math.nan, forecast_bytes=run.forecast_bytes,
        covered_80=abs(run.time_residual) <= 1.2816 * run.time_spread,
        learnt_covered_80=abs(run.time_residual - mean) <= 1.2816 * spread,
    )  # fmt: skip


def regrets(rows: Sequence[Row], field: str) -> list[float]:
    """Return the regret of the plan that `field` forecasts to be fastest, of each task and number of processes."""
    found = []
    for key in dict.fromkeys((row.task, row.devices) for row in rows):
        group = [row for row in rows if (row.task, row.devices) == key]
        if len(group) > 1:
            chosen = min(group, key=lambda row: getattr(row, field))
            found.append(chosen.measured_seconds / min(row.measured_seconds for row in group) - 1)
    return found


def score(rows: Sequence[Row]) -> dict[str, float]:
    """Return the errors and regrets of rows, as fractions."""

    def error(forecast: str, measured: str) -> float:
        return statistics.fmean(abs(getattr(row, forecast) / getattr(row, measured) - 1) for row in rows)

    return {
        "rows": len(rows),
        "time_mape": error("forecast_seconds", "measured_seconds"),
        "learnt_time_mape": error("learnt_seconds", "measured_seconds"),
        "covered_80": statistics.fmean(row.covered_80 for row in rows),
        "learnt_covered_80": statistics.fmean(row.learnt_covered_80 for row in rows),
        "regret_mean": statistics.fmean(regrets(rows, "forecast_seconds") or [math.nan]),
        "regret_worst": max(regrets(rows, "forecast_seconds"), default=math.nan),
        "learnt_regret_mean": statistics.fmean(regrets(rows, "learnt_seconds") or [math.nan]),
        "learnt_regret_worst": max(regrets(rows, "learnt_seconds"), default=math.nan),
        "memory_mape": error("forecast_bytes", "measured_bytes"),
    }


def table(rows: Sequence[Row]) -> list[str]:
    """Return the scores by task, by number of processes and of all, as Markdown."""
    head = ("rows of", "n", "time error", "after learning", "regret (worst)", "after learning", "memory error")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    groups = {task: [row for row in rows if row.task == task] for task in dict.fromkeys(row.task for row in rows)}
    for devices in dict.fromkeys(row.devices for row in rows):
        groups[f"{devices} process{'es' if devices > 1 else ''}"] = [row for row in rows if row.devices == devices]
    for name, members in {**groups, "all": list(rows)}.items():
        found = score(members)
        cells = [name, str(found["rows"]), _percent(found["time_mape"]), _percent(found["learnt_time_mape"])]
        for kind in ("regret", "learnt_regret"):
            cells.append(f"{_percent(found[f'{kind}_mean'])} ({_percent(found[f'{kind}_worst'])})")
        lines.append(f"| {' | '.join([*cells, _percent(found['memory_mape'])])} |")
    return lines


def _percent(share: float) -> str:
    return f"{share:.1%}" if math.isfinite(share) else "–"


def document(result: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the Markdown page of a result."""
    facts, whole = result["machine"], result["scores"]
    lines = [
        "# Forecasts of layouts on one machine", "",
        f"`python benchmarks/forecast_grid.py {' '.join(sys.argv[1:])}`", "",
        f"{facts['date']} · {facts['cpu']}, {facts['cores']} cores · torch {facts['torch']} · fp32 · medians over "
        f"{result['rounds']} rounds of {result['steps']} steps", "",
        *table(rows), "",
        "Errors are means of |forecast / measured - 1|. \"After learning\": every row as it is forecast once the half",
        "of the rows that it is not in has been learnt from. Regret: the plan forecast to be fastest against the",
        "fastest, of each task and number of processes. The 80 % intervals hold "
        f"{_percent(whole['covered_80'])} of the rows, {_percent(whole['learnt_covered_80'])} after learning.", "",
        "| task | processes | plan | measured | forecast | after learning | memory | forecast |", f"|{'---|' * 8}",
    ]  # fmt: skip
    for row in rows:
        times = (row.measured_seconds, row.forecast_seconds, row.learnt_seconds)
        sizes = (row.measured_bytes, row.forecast_bytes)
        cells = [*(f"{seconds * 1e3:.1f} ms" for seconds in times), *(f"{size / 2**20:.0f} MiB" for size in sizes)]
        lines.append(f"| {row.task} | {row.devices} | {row.plan} | {' | '.join(cells)} |")
    failed = [f"- {one['task']}, {one['devices']} processes: {one['because']}" for one in result["not_measured"]]
    return "\n".join([*lines, "", *(["Not measured:", "", *failed, ""] if failed else [])])


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="1,2,4", help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument("--layouts", type=int, default=10, help="most layouts of one task and number of processes")
    parser.add_argument("--tasks", default="", help="words of the tasks to run, such as small,vision")
    parser.add_argument("--probe-seconds", type=float, default=15.0, help="time for each probe")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that everything works")
    parser.add_argument("--json", metavar="OUT", help="also write the result as JSON")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/forecast_grid.md and .json")
    options = parser.parse_args(arguments)
    if options.quick:
        options.devices, options.tasks, options.layouts = "1,2", "small", 2
        options.rounds, options.steps, options.probe_seconds = 2, 2, 0.5
    return options


def main(arguments: list[str]) -> int:
    """Probe, measure and score; return 1 where nothing could be measured."""
    options = parse(arguments)
    sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
    words = [word.strip() for word in options.tasks.split(",") if word.strip()]
    chosen = {name: task for name, task in TASKS.items() if not words or any(word in name for word in words)}
    observations: list[Observation] = []
    clusters: dict[int, Any] = {}
    failed: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="grid-cache-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        text = corpus(Path(cache))
        for devices in map(int, options.devices.split(",")):
            probe_machine(devices, "cpu", say=lambda line: None, seconds_budget=options.probe_seconds)
            for name, task in chosen.items():
                data = [] if any("data.source" in value for value in task) else [text]
                asked = [*COMMON, *task, *data, *(QUICK if options.quick else []), f"cluster.devices={devices}"]
                planned = plan_task(load_spec(None, asked))
                plans = plans_of(planned, options.layouts)
                try:
                    measured = measure(planned, plans, options)
                except PacelineError as error:
                    failed.append({"task": name, "devices": devices, "because": f"{error.what}: {error.because}"})
                    print(f"{name}, {devices}: {error}", flush=True)
                    continue
                found = [observe(name, planned, plan, one) for plan, one in zip(plans, measured, strict=True)]
                clusters |= {id(one): planned.cluster for one in found}
                observations += found
                print(f"{name}, {devices}: {len(found)} plans measured", flush=True)
        runs = forecast_runs(observations, lambda one: clusters[id(one)])
    if not runs:
        return 1
    rows = rows_of(runs)
    result = {
        "machine": machine(), "rounds": options.rounds, "steps": options.steps, "scores": score(rows),
        "by_task": {name: score([row for row in rows if row.task == name]) for name in {row.task for row in rows}},
        "rows": [dataclasses.asdict(row) for row in rows], "not_measured": failed,
    }  # fmt: skip
    page = document(result, rows)
    print("\n".join(table(rows)))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "forecast_grid.md").write_text(page)
        (RESULTS / "forecast_grid.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
