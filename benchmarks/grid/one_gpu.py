"""How far the forecast of one GPU is from what its steps take, layout by layout: seconds and bytes.

    python benchmarks/grid/one_gpu.py [--rows llama-1b,...] [--until SECONDS] [--probe] [--json OUT] [--save]
    python benchmarks/grid/one_gpu.py --device cpu --quick

Each row is a model and one way to train it on one device. It is priced before it runs, from the catalog's published
figures, and with --probe once more from what the probe measures; then it trains a few steps in a process of its own.
Nothing of a row is fitted on it. The null forecast prices every row at the median rate of all rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.plan.planned import plan_task
from paceline.spec.arguments import make_spec
from paceline.spec.forecast import Forecast, Term
from paceline.spec.plan import Plan
from paceline.task.models.sizes import NAMED_SIZES

sys.path.insert(0, str(Path(__file__).parents[1]))  # what benchmarks share
from common import keep, machine, strict_json
from gpu import Job, alone, with_paceline


@dataclasses.dataclass(frozen=True)
class Row:
    """A model and a way to train it."""

    model: str
    layers: int  # 0: all of them
    seq_len: int
    micro_batch: int
    accumulation: int = 1
    precision: str = "bf16"
    recompute: str = "none"
    compile: bool = False
    offload: str = "none"

    @property
    def name(self) -> str:
        """Return what tells this row from the others."""
        layers = f" ({self.layers} layers)" if self.layers else ""
        parts = [self.precision, f"{self.micro_batch} x {self.accumulation} x {self.seq_len}"]
        parts += [f"{self.recompute} recompute"] if self.recompute != "none" else []
        parts += ["compiled"] if self.compile else []
        parts += [f"{self.offload} on the host"] if self.offload != "none" else []
        return f"{self.model}{layers}, {', '.join(parts)}"


# In the order in which they are measured: where time runs out, the first ones have been.
ROWS = (
    Row("llama-1b", 0, 4096, 4, 2, recompute="selective"),
    Row("llama-1b", 0, 4096, 2),
    Row("llama-8b", 12, 4096, 2, recompute="full"),
    Row("llama-124m", 0, 1024, 32),
    Row("llama-1b", 0, 4096, 8, recompute="selective", compile=True),
    Row("llama-3b", 0, 2048, 4, 2),
    Row("llama-350m", 0, 2048, 8, precision="fp32"),
    Row("deepseek-moe-16b", 5, 4096, 2, recompute="selective"),
    Row("llama-1b", 0, 16384, 1, recompute="full"),
    Row("llama-30m", 0, 512, 64),
    Row("llama-1b", 0, 4096, 4, offload="optimizer"),
    Row("llama-350m", 0, 2048, 16, compile=True),
    Row("llama-8b", 8, 8192, 1, 4),
    Row("llama-124m", 0, 1024, 4, 8),
)
QUICK = (Row("llama-1m", 0, 32, 4), Row("llama-1m", 0, 32, 2, 2, "fp32", "full"))


def forecasts_of(rows: list[Row], options: argparse.Namespace) -> list[dict[str, Any] | str]:
    """Return the forecast of each row on this machine's device, as it is kept, or why there is none."""
    found = list[dict[str, Any] | str]()
    for row in rows:
        try:
            found.append(told(forecast_of(row, options), options.device))
        except PacelineError as error:
            found.append(f"not planned: {error}".splitlines()[0])
    return found


def forecast_of(row: Row, options: argparse.Namespace) -> Forecast:
    """Return the forecast of a row on this machine's device."""
    constraints = {"micro_batch": row.micro_batch, "precision": row.precision, "recompute": row.recompute,
                   "compile": row.compile, "offload": row.offload}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="gpu-grid-") as folder:
        cluster = {"device": options.device, "devices": 1, "learn": False, "probe": False}
        planned = plan_task(make_spec(_job(row, options).task(), constraints, cluster, {"dir": folder}))
    return next(each for each in planned.search.candidates if each.plan.micro_batch == row.micro_batch).forecast


def _job(row: Row, options: argparse.Namespace) -> Job:
    batch = row.micro_batch * row.accumulation
    plan = Plan(
        micro_batch=row.micro_batch, accumulation=row.accumulation, batch_samples=batch, precision=row.precision,
        recompute=row.recompute, compile=row.compile, offload=row.offload,
    )  # fmt: skip
    layers = row.layers or NAMED_SIZES[row.model].layers
    return Job(row.model, layers, row.seq_len, batch, plan, options.device, options.steps, options.warm_up)


def told(forecast: Forecast, device: str) -> dict[str, Any]:
    """Return a forecast as what is kept of it. On CUDA its bytes are of tensors; `beside` is all else of a process."""
    driver = sum(term.value for term in forecast.memory if term.kind == "runtime") if device == "cuda" else 0.0
    step, peak = forecast.step_seconds, forecast.peak_bytes
    return {
        "seconds": step.value, "low": step.low, "high": step.high,
        "bytes": peak.value - driver, "low_bytes": peak.low - driver, "high_bytes": peak.high - driver,
        "beside": driver,
        "time": _terms(forecast.time), "memory": _terms(forecast.memory), "flops": forecast.model_flops_per_step,
    }  # fmt: skip


def _terms(terms: tuple[Term, ...]) -> dict[str, float]:
    return {term.name: term.value for term in terms if term.value}


def measured(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a row's steps take, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="gpu-grid-") as folder:
        took = alone(with_paceline, _job(row, options), folder)
    found = {"seconds": took.step_seconds, "bytes": took.peak_bytes, "reserved": took.reserved_bytes}
    return {**found, "beside": took.beside_bytes}


def scored(rows: list[dict[str, Any]], which: str) -> dict[str, Any]:
    """Return how far a forecast is from what was measured, over the rows that have both."""
    held = [row for row in rows if row.get(which) and row.get("measured")]
    if not held:
        return {}
    off = [row[which]["seconds"] / row["measured"]["seconds"] - 1 for row in held]
    rate = statistics.median(row[which]["flops"] / row["measured"]["seconds"] for row in held)
    null = [row[which]["flops"] / rate / row["measured"]["seconds"] - 1 for row in held]
    apart = [row[which]["bytes"] / row["measured"]["bytes"] - 1 for row in held]
    return {
        "rows": len(held),
        "time": statistics.median(map(abs, off)), "worst_time": max(off, key=abs),
        "memory": statistics.median(map(abs, apart)), "worst_memory": max(apart, key=abs),
        "null": statistics.median(map(abs, null)),
        "holds": sum(row[which]["low"] <= row["measured"]["seconds"] <= row[which]["high"] for row in held) / len(held),
        "holds_memory": sum(
            row[which]["low_bytes"] <= row["measured"]["bytes"] <= row[which]["high_bytes"] for row in held
        ) / len(held),
    }  # fmt: skip


def page(result: dict[str, Any]) -> str:
    """Return the result as a page."""
    facts = result["machine"]
    lines = [
        "# The forecast of one GPU", "",
        f"{facts['gpu'] or facts['cpu']}, torch {facts['torch']}, {facts['date']}; `benchmarks/grid/one_gpu.py`. Each"
        " row was priced before it ran; no constant is fitted on it.", "",
    ]  # fmt: skip
    for which, score in result["scores"].items():
        if score:
            lines += [
                f"**{which.capitalize()} figures**, {score['rows']} rows: time off by {score['time']:.1%} in the median"
                f" ({score['worst_time']:+.0%} at worst; {score['null']:.1%} by one rate for all), 80 % intervals hold"
                f" {score['holds']:.0%}; memory off by {score['memory']:.1%} ({score['worst_memory']:+.0%} at worst),"
                f" intervals hold {score['holds_memory']:.0%}.", "",
            ]  # fmt: skip
    kinds = [which for which, score in result["scores"].items() if score]
    lines += [f"| row | measured | {' | '.join(kinds)} | GiB | {' | '.join(f'{kind}, GiB' for kind in kinds)} |",
              "|---" * (3 + 2 * len(kinds)) + "|"]  # fmt: skip
    for row in result["rows"]:
        if not row.get("measured"):
            lines.append(f"| {row['name']} | {row['because']} |" + " |" * (1 + 2 * len(kinds)))
            continue
        seconds, held = row["measured"]["seconds"], row["measured"]["bytes"]
        times = [f"{row[kind]['seconds']:.4g} s ({row[kind]['seconds'] / seconds - 1:+.0%})" for kind in kinds]
        sizes = [f"{row[kind]['bytes'] / 2**30:.2f} ({row[kind]['bytes'] / held - 1:+.0%})" for kind in kinds]
        cells = [row["name"], f"{seconds:.4g} s", *times, f"{held / 2**30:.2f}", *sizes]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", default="", help="only rows whose name has one of these, separated by ;")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the clock starts")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds after which no further row is begun")
    parser.add_argument("--probe", action="store_true", help="probe the device, and price the rows by that too")
    parser.add_argument("--quick", action="store_true", help="llama-1m, to see that everything works")
    parser.add_argument("--json", metavar="OUT", help="also write the result as JSON")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/gpu_forecast.md and its figures")
    parser.add_argument("--page", metavar="JSON", help="measure nothing: write the page of an earlier result")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not options.page and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --device cpu --quick shows that the benchmark works")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all rows, priced and measured."""
    began, wanted = time.monotonic(), [part for part in options.rows.split(";") if part]
    chosen = [
        row for row in (QUICK if options.quick else ROWS) if not wanted or any(part in row.name for part in wanted)
    ]
    rows: list[dict[str, Any]] = [{"name": row.name} for row in chosen]
    _price(chosen, rows, "published", options)
    for row, found in zip(chosen, rows, strict=True):
        if time.monotonic() - began > options.until:
            found["because"] = "no time was left for it"
            continue
        try:
            found["measured"] = measured(row, options)
            print(f"{row.name}: {found['measured']}", file=sys.stderr, flush=True)
        except (PacelineError, RuntimeError) as error:
            found["because"] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{row.name}: {found['because']}", file=sys.stderr, flush=True)
    if options.probe:
        subprocess.run(
            [sys.executable, "-m", "paceline", "probe", "--kind", options.device, "--devices", "1"], check=True
        )
        _price(chosen, rows, "probed", options)
    facts = alone(machine)
    scores = {which: scored(rows, which) for which in ("published", "probed")}
    return {"machine": facts, "options": vars(options), "scores": scores, "rows": rows}


def _price(chosen: list[Row], rows: list[dict[str, Any]], which: str, options: argparse.Namespace) -> None:
    for found, forecast in zip(rows, alone(forecasts_of, chosen, options), strict=True):
        found["because" if isinstance(forecast, str) else which] = forecast


def main(arguments: list[str]) -> int:
    """Measure, print, and write what was asked for."""
    options = parse(arguments)
    result = json.loads(Path(options.page).read_text("utf-8")) if options.page else measure(options)
    print(page(result), end="")
    if options.json:
        Path(options.json).write_text(strict_json(result))
    if options.save:
        keep("gpu/grid", result)
        keep("gpu_forecast", page=page(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
