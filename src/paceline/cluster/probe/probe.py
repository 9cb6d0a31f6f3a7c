"""Probe: measure this machine as training will use it, and keep the result for the forecaster.

The measuring is done by child processes, one per device and all at once, so the caller never imports torch.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from paceline.cluster.here.heap import joined_heap
from paceline.cluster.here.waiting import waiting
from paceline.cluster.machine import read_machine, threads_per_device, torch_without_cuda, visible_gpus
from paceline.cluster.probe.busy import busy_text, look_around, reasons_of
from paceline.cluster.probe.duration import BUDGET_SECONDS, probe_seconds
from paceline.cluster.probe.passes import PASSES
from paceline.cluster.probe.records import (
    CollectiveRates,
    GroupTimes,
    LaunchTimes,
    LinkRates,
    MeasuredMachine,
    ProbeRecord,
    ProbeRequest,
    RankProbe,
    StepTimes,
    SubgroupRates,
    TimedRate,
)
from paceline.cluster.store import SCHEMAS, hold_writable, probe_path, write_probe
from paceline.errors import ConfigError, PacelineError
from paceline.foreign_errors import tells_of_lost_peer
from paceline.patience import Patience
from paceline.scratch import Scratch
from paceline.system.end_of_parent import PARENT_VARIABLE
from paceline.units import format_bytes, format_rate, format_seconds, plural

TRIAL_SECONDS = 1.0  # a budget below is for trying the probe out
BUSY_SHARE = 3  # of its time that a probe takes on a busy machine, whose figures will not count for long: a third


def probe_machine(
    devices: int,
    kind: str = "cpu",
    say: Callable[[str], object] = print,
    seconds_budget: float = BUDGET_SECONDS,
    most_seconds: float | None = None,
) -> ProbeRecord:
    """Measure `devices` devices of one kind at once, store the record in the user's cache and return it.

    Takes about `seconds_budget` seconds of what a device does by itself, the import of torch included, on an idle
    machine, and a third of that on a busy one, whose figures are marked. Several devices take longer, and a GPU
    (`probe_seconds`). It is given up after `most_seconds` of the clock. `kind` is "cpu" or "cuda".
    Raises ConfigError where the machine has no such devices, PacelineError where a measuring process fails.
    """
    host = read_machine()
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"cannot probe '{kind}'", "a probe measures this machine's 'cpu' or 'cuda'", "--kind cpu")
    devices = devices or (len(visible_gpus()) if kind == "cuda" else 1)
    if kind == "cuda" and (not devices or devices > len(visible_gpus()) or torch_without_cuda()):
        gpus = plural(len(visible_gpus()), "GPU")
        seen = "this torch is a CPU-only build" if torch_without_cuda() else f"{gpus} can be seen"
        wanted = plural(devices, "CUDA device") if devices else "any CUDA device"
        raise ConfigError(f"cannot probe {wanted}", seen, "probe 'cpu', or fewer devices")
    threads = threads_per_device(host.cores, devices) if kind == "cpu" else 0
    path = probe_path(host.name, kind, devices, threads)
    hold_writable(path)  # before anything is measured
    busy = look_around()
    if busy:
        seconds_budget /= BUSY_SHARE
        say(f"busy     {', '.join(busy)}: figures will be marked, and count for an hour")
    passes = 1 if busy or seconds_budget < TRIAL_SECONDS else PASSES
    about = f"about {probe_seconds(kind, seconds_budget, devices, passes):.0f} s"
    say(f"probing  {devices} x {kind} on {host.name}, {about}; all devices measure at once")
    begin = time.monotonic()
    fair_share = min(1.0, host.cores / devices) if kind == "cpu" else 1.0  # of a core for each thread
    request: ProbeRequest = {
        "devices": devices, "kind": kind, "threads": threads or 1, "seconds_budget": seconds_budget,
        "fair_share": fair_share, "passes": passes,
    }  # fmt: skip
    results = _run_workers(request, timeout_seconds=120 + 6 * seconds_budget, most_seconds=most_seconds)
    record: ProbeRecord = {
        "schema": SCHEMAS[kind],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": host.name,
        "processor": host.processor,
        "kind": kind,
        "devices": devices,
        "threads": threads,
        "seconds": time.monotonic() - begin,
        **combine(results),
        "busy": busy,
    }
    write_probe(record, path)
    for line in probe_lines(record):
        say(line)
    say(f"stored   {path} ({record['seconds']:.1f} s)")
    return record


def _run_workers(request: ProbeRequest, timeout_seconds: float, most_seconds: float | None = None) -> list[RankProbe]:
    with Scratch("probe") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request), "utf-8")
        threads, parent = {"OMP_NUM_THREADS": str(request["threads"])}, {PARENT_VARIABLE: str(os.getpid())}
        environment = {**waiting(os.environ), **os.environ, **joined_heap(os.environ), **threads, **parent}
        workers = []
        try:
            for rank in range(request["devices"]):
                with (folder / f"stderr-{rank}").open("wb") as stderr:
                    command = [sys.executable, "-m", "paceline.cluster.probe.worker", str(folder / "request.json")]
                    command.append(str(rank))
                    workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr))
            _wait(workers, folder, timeout_seconds, most_seconds)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
        return [json.loads((folder / f"result-{rank}.json").read_text("utf-8")) for rank in range(len(workers))]


def _wait(
    workers: list[subprocess.Popen[bytes]], folder: Path, timeout_seconds: float, most_seconds: float | None = None
) -> None:
    """Wait for all workers. Raises as soon as one fails, for its peers would wait for it in a collective."""
    patience, began = Patience(timeout_seconds), time.monotonic()
    while any(worker.poll() is None for worker in workers):
        failed = [rank for rank, worker in enumerate(workers) if worker.poll() not in (None, 0)]
        if patience.is_over:
            break
        if most_seconds is not None and time.monotonic() - began > most_seconds:
            because = f"it has {most_seconds:.0f} s where something waits for it, and the machine is busy"
            raise PacelineError("the probe did not finish", because, "`paceline probe` on an idle machine")
        if failed:  # a moment for the peers to say why they failed
            patience = Patience(min(2, patience.left_seconds()))
        time.sleep(0.02)
    failures = []
    for rank, worker in enumerate(workers):
        if worker.poll() not in (None, 0):
            lines = (folder / f"stderr-{rank}").read_text("utf-8", errors="replace").strip().splitlines()
            because = lines[-1] if lines else f"it ended with status {worker.returncode} and no message"
            failures.append((rank, because))
    if failures:  # a process that lost its peer only says so; the peer says why
        rank, because = next((item for item in failures if not tells_of_lost_peer(item[1])), failures[0])
        raise PacelineError(f"the probe's process {rank} failed", because, "plan without a probe, or fewer devices")
    if any(worker.poll() is None for worker in workers):
        raise PacelineError(
            "the probe did not finish",
            f"its processes ran for more than {timeout_seconds:.0f} s, not counting those that other programs took",
            "probe an idle machine, or fewer devices",
        )


def combine(results: list[RankProbe]) -> MeasuredMachine:
    """Return one record from all ranks' results: the slowest rank counts, since the others wait for it."""
    ranks = len(results)
    record: MeasuredMachine = {
        "torch": results[0]["torch"],
        "matmul": _slowest_points([result["matmul"] for result in results]),
        "attention": _slowest_points([result["attention"] for result in results]),
        "attention_narrow": _slowest_points([result["attention_narrow"] for result in results]),
        "head_widths": results[0]["head_widths"],
        "memory": {
            "triad": min(result["memory"]["triad"]["bytes_per_second"] for result in results),
            "elementwise": min(result["memory"]["elementwise"]["bytes_per_second"] for result in results),
            "picked": min(result["memory"]["picked"]["bytes_per_second"] for result in results),
        },
        "launch_seconds": max(_start(result["launch"]) for result in results),
        "launch_plain_seconds": max(result["launch"]["plain"]["seconds"] for result in results),
        "optimizer_bytes_per_second": min(result["optimizer"]["bytes_per_second"] for result in results),
        "runtime_bytes": max(result["runtime_bytes"] for result in results),
        "calibration": [
            max((result["blocks"][index] for result in results), key=lambda block: block["seconds"])
            for index in range(min(len(result["blocks"]) for result in results))
        ],
        "core_share": min(result["core_share"] for result in results),
        "refused": max(result["refused"] for result in results),
        "relative_spread": statistics.median(
            max(block["spread"], block.get("drift", 0.0)) for result in results for block in result["blocks"]
        ),
    }
    if ranks > 1:
        record["link"] = _link(results, ranks)
    if "device_name" in results[0]:
        record["device_name"] = results[0]["device_name"]
        record["device_memory_bytes"] = results[0]["device_memory_bytes"]
    return record


def _start(launch: LaunchTimes) -> float:
    """Return the seconds of one operator's start: what of a step is left on no rows, at least that on a few tokens."""
    passes = launch.get("passes")
    if passes is None:
        return launch["autograd"]["seconds"]
    few, by_rows = passes["few_tokens"]["seconds"], passes["all_and_half"]
    if by_rows is None:
        return few
    whole, half = (each["seconds"] for each in by_rows)
    return max(few, min(half, 2 * half - whole))  # more rows never take less time: that was another program's doing


def _slowest_points(ranks: list[dict[str, list[TimedRate]]]) -> dict[str, list[list[float]]]:
    """Return per precision the points (size, FLOP/s) of the slowest rank."""
    return {
        precision: [
            [point["at"], min(rank[precision][index]["flops"] for rank in ranks)] for index, point in enumerate(points)
        ]
        for precision, points in ranks[0].items()
    }


def _link(results: list[RankProbe], ranks: int) -> LinkRates:
    """Return what collectives over all ranks gave, and those of smaller groups."""
    found = [result["collectives"] for result in results if result["collectives"]]
    groups: list[SubgroupRates] = [
        {"size": int(size), **_rates([of_rank["groups"][size] for of_rank in found], int(size))}
        for size in found[0]["groups"]
    ]
    rates: LinkRates = {**_rates([*found], ranks), "groups": groups}
    steps = [result["steps"] for result in results if result["steps"]]
    return {**rates, **_beyond(steps, rates, ranks)} if steps else rates


class Beyond(TypedDict):
    """What a step pays beyond its collectives."""

    unit_seconds: float
    least_unit_seconds: float
    kept_unit_seconds: float
    move_seconds: float
    work_seconds: float


def _beyond(steps: list[StepTimes], link: LinkRates, ranks: int) -> Beyond:
    """Return what a sharded unit and a collective between layers add to a step beyond the collectives' own seconds.

    Example: 4 units make a step 60 ms longer; each has two gathers of 3 ms and a reduce-scatter of 4 ms, so that
    5 ms are left of its 15. The slowest rank counts. No more than what a layer computes is taken for either: cores that
    are shared with one other can at most be half as fast, and more than that was another program's doing. A unit that
    computes next to nothing adds no more than one that computes, and one that keeps its gradients no more than that.
    """
    own = {
        name: {
            size: link["all_reduce_latency_seconds"] + (ranks - 1) / ranks * steps[0][size] / rate
            for size in ("unit_bytes", "move_bytes")
        }
        for name, rate in link["bytes_per_second"].items()
    }
    gather, scatter = own["all_gather"], own["reduce_scatter"]
    sharded = max(step["sharded_seconds"] - step["plain_seconds"] for step in steps) / steps[0]["units"]
    moved = max(step["moved_seconds"] - step["plain_seconds"] for step in steps) / steps[0]["moves"]
    unit = sharded - 2 * gather["unit_bytes"] - scatter["unit_bytes"]
    move = moved - (gather["move_bytes"] + scatter["move_bytes"]) / 2
    most = max(step["plain_seconds"] for step in steps)
    unit = min(max(0.0, unit), most / steps[0]["units"])
    few = max(step["few_sharded_seconds"] - step["few_plain_seconds"] for step in steps) / steps[0]["units"]
    least = min(max(0.0, few - 2 * gather["unit_bytes"] - scatter["unit_bytes"]), unit)
    kept = max(step["few_kept_seconds"] - step["few_plain_seconds"] for step in steps) / steps[0]["units"]
    return {
        "unit_seconds": unit,
        "least_unit_seconds": least,
        "kept_unit_seconds": min(max(0.0, kept), least),
        "move_seconds": min(max(0.0, move), most / steps[0]["moves"]),
        "work_seconds": max(step["work_seconds"] for step in steps),
    }


def _rates(results: list[GroupTimes], ranks: int) -> CollectiveRates:
    """Return latency per ring hop and bytes per second per collective, in the terms of ring algorithms.

    A ring all-reduce moves 2 (n - 1) / n of the buffer; gather and scatter half of that. What all three wait for is to
    be scheduled and for each other, which an all-reduce does no more often: n - 1 hops are taken for each.
    """
    latency = max(result["latency"]["seconds"] for result in results)
    hop = latency / (ranks - 1)
    rates: dict[str, list[float]] = {}
    for index, row in enumerate(results[0]["sizes"]):
        seconds = max(result["sizes"][index]["seconds"] for result in results)
        passes = 2 if row["collective"] == "all_reduce" else 1
        moved = passes * (ranks - 1) / ranks * row["bytes"]
        # A transfer takes a third of the time at least: it guards against a noisy latency.
        wire_seconds = max(seconds - latency, seconds / 3)
        rates.setdefault(row["collective"], []).append(moved / wire_seconds)
    return {
        "all_reduce_latency_seconds": latency,
        "hop_seconds": hop,
        "bytes_per_second": {name: statistics.geometric_mean(values) for name, values in rates.items()},
    }


def probe_lines(record: ProbeRecord) -> list[str]:
    """Return the record as a table for people."""
    lines = []
    matmul, attention = record["matmul"], record["attention"]
    for rates, name, unit in ((matmul, "matrix products", "width"), (attention, "causal attention", "sequence")):
        for precision, points in rates.items():
            cells = "  ".join(f"{size:.0f}: {flops / 1e9:,.1f}" for size, flops in points)
            lines.append(f"  {name} {precision}  GFLOP/s by {unit}  {cells}")
    memory = record["memory"]
    lines.append(
        f"  memory                 {format_rate(memory['triad'], 'B')} triad · "
        f"{format_rate(memory['elementwise'], 'B')} operator with a new output"
    )
    lines.append(
        f"  operator               {format_seconds(record['launch_plain_seconds'])} plain · "
        f"{format_seconds(record['launch_seconds'])} in a training step, for each of its passes"
    )
    lines.append(f"  fused AdamW            {format_rate(record['optimizer_bytes_per_second'], 'B')}")
    lines.append(f"  process before tensors {format_bytes(record['runtime_bytes'])}")
    if "link" in record:
        lines.append(f"  between devices        {_collectives_text(record['link'])}")
        for group in record["link"].get("groups", ()):
            name = f"groups of {group['size']}"
            lines.append(f"  {name:23}{_collectives_text(group)}")
    if busy := reasons_of(record):
        lines.append(f"  ! {busy_text(busy)}")
    if seconds := record.get("link", {}).get("unit_seconds"):
        move = record["link"]["move_seconds"]
        lines.append(
            f"  beyond collectives     {format_seconds(seconds)} a sharded unit, "
            f"{format_seconds(record['link']['least_unit_seconds'])} of few tokens · {format_seconds(move)} a "
            "collective between layers"
        )
    for step in record["calibration"]:
        rate = format_rate(3 * (step["matmul_flops"] + step["attention_flops"]) / step["seconds"], "FLOP")
        lines.append(
            f"  training step {step['precision']}     width {step['width']}: {format_seconds(step['seconds'])}, {rate}"
            f", repeats within {100 * step['spread']:.0f} %"
        )
    return lines


def _collectives_text(link: CollectiveRates) -> str:
    rates = (f"{name.replace('_', '-')} {format_rate(rate, 'B')}" for name, rate in link["bytes_per_second"].items())
    latency = format_seconds(link["all_reduce_latency_seconds"])
    return f"{latency} all-reduce of one number · {' · '.join(rates)}"
