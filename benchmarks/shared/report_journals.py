"""Made-up journals, for tests, a benchmark of the live page and its picture: what a run writes, without the run."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

Record = dict[str, Any]
START = 1_772_323_200.0  # 2026-03-01 00:00:00 UTC
GIB = 2**30


def estimate(value: float, width: float = 0.06, source: str = "measured") -> Record:
    return {"value": value, "low": value * (1 - width), "high": value * (1 + width), "source": source}


def term(name: str, kind: str, clock: str, value: float, formula: str, source: str = "measured") -> Record:
    return {"name": name, "value": value, "formula": formula, "source": source, "kind": kind, "clock": clock}


def figure(value: Any, source: str, note: str = "") -> Record:
    return {"value": value, "source": source, "note": note}


def forecast(steps: int = 300, step_seconds: float = 1.92) -> Record:
    run_seconds = steps * step_seconds
    return {
        "step_seconds": estimate(step_seconds),
        "time": [
            term("products, forward", "products", "forward_backward", 0.44, "forward FLOPs / (rate × efficiency)"),
            term("products, backward", "products", "forward_backward", 0.88, "2 × forward"),
            term(
                "memory-bound operators",
                "elementwise",
                "forward_backward",
                0.31,
                "elements moved × 2 B / memory bandwidth",
            ),
            term("gradient reduction", "sync", "reduce", 0.12, "2(n-1)/n × bytes / link bandwidth + 2(n-1) × latency"),
            term("parameter gathering", "sync", "reduce", 0.08, "(n-1)/n × bytes / link bandwidth", "assumed"),
            term("optimizer", "update", "optimizer", 0.09, "16 B × parameters / memory bandwidth"),
        ],
        "peak_bytes": estimate(0.61 * GIB, 0.1),
        "memory": [
            term("weights", "weights", "none", 0.021 * GIB, "4 B × parameters / dp_shard", "published"),
            term("gradients", "gradients", "none", 0.021 * GIB, "4 B × parameters / dp_shard", "published"),
            term("optimizer state", "optimizer", "none", 0.042 * GIB, "8 B × parameters / dp_shard", "published"),
            term("activations", "activations", "none", 0.286 * GIB, "saved elements × 2 B × micro-batch"),
            term("weight copies", "buffers", "none", 0.03 * GIB, "two blocks in bf16"),
            term("runtime", "runtime", "none", 0.21 * GIB, "resident memory after start"),
        ],
        "tokens_per_second": 131072 / step_seconds,
        "steps": steps,
        "run_seconds": estimate(run_seconds, 0.08),
        "usd": estimate(2 * 0.05 * run_seconds / 3600, 0.08, "published"),
        "kwh": estimate(2 * 12.0 * run_seconds / 3.6e6, 0.2, "assumed"),
        "carbon_g": {"value": "nan", "low": "nan", "high": "nan", "source": "unknown"},
        "model_flops_per_step": 9.2e12,
        "mfu": 0.40,
    }


def cluster() -> Record:
    return {
        "device": {
            "name": "cpu, 1 core",
            "kind": "cpu",
            "memory_bytes": figure(8 * GIB, "measured"),
            "memory_bytes_per_second": figure(11e9, "measured", "triad over 256 MiB"),
            "matmul_flops": {"bf16": [[256, 98e9], [1024, 121e9]]},
            "matmul_source": "measured",
            "peak_flops": {"bf16": 6e12},
            "launch_seconds": figure(4e-6, "measured"),
            "runtime_bytes": figure(0.21 * GIB, "measured"),
        },
        "devices": 2,
        "devices_per_node": 2,
        "links": [
            {
                "level": "process",
                "latency_seconds": figure(61e-6, "measured"),
                "bytes_per_second": figure(2.9e9, "measured"),
            }
        ],
        "price_usd_per_device_hour": figure(0.05, "published", "list price"),
        "watts_per_device": figure(12.0, "assumed"),
        "carbon_g_per_kwh": figure("nan", "unknown"),
        "date": "2026-03-01",
        "host": "node-1",
    }


def run_started(attempt: int, time: float, step: int = 0, steps: int = 300, **changes: Any) -> Record:
    return {
        "schema": 1,
        "kind": "run_started",
        "time": time,
        "attempt": attempt,
        "resumed_from": f"runs/demo/checkpoints/step-{step:08d}" if step else None,
        "position": step * 512,
        "step": step,
        "spec": {
            "task": {
                "name": "stdlib-code",
                "model": {"name": "llama-11m", "arguments": {}, "tied": None},
                "data": {"source": "stdlib", "seq_len": 256, "include": ["*.py"]},
                "optimizer": {"name": "adamw", "lr": 0.001},
                "global_batch": "131072 tokens",
                "stop": f"{steps} steps",
                "seed": 7,
            },
            "cluster": {"device": "auto", "devices": 2},
            "plan": {"dp_shard": 0, "precision": "auto"},
            "run": {"dir": "runs/demo", "checkpoint_every": "100 steps"},
        },
        "provenance": {"task.seed": "default", "task.optimizer.lr": "--set", "cluster.devices": "examples/x.toml:9"},
        "cluster": cluster(),
        "plan": {
            "layout": {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 1},
            "zero": 3,
            "micro_batch": 8,
            "accumulation": 4,
            "batch_samples": 512,
            "recompute": "none",
            "precision": "bf16",
            "compile": False,
        },
        "plan_text": "dp_shard=2 · ZeRO-3 · micro-batch 8 x 4 accumulation · bf16 · no recompute",
        "forecast": forecast(steps),
        "facts": {
            "description": "24.1 MB of Python source",
            "samples": 94000,
            "items_per_sample": 256,
            "unit": "tokens",
            "unigram_loss": 3.12,
            "fingerprint": "sha256:9f2c41d0",
        },
        "parameters": 11_272_448,
        "world_size": 2,
        "versions": {"paceline": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "host": "node-1",
        "command": ["paceline", "train", "examples/stdlib-code.toml", "--set", "task.optimizer.lr=1e-3"],
        "headline": [
            "task     llama-11m on 24.1 MB of Python source · 131,072 tokens/step · 300 steps · seed 7",
            "cluster  this machine: 2 x cpu · 121 GFLOP/s bf16 · 11 GB/s memory (probed)",
            "plan     dp_shard=2 · micro-batch 8 x 4 accumulation · bf16 · no recompute",
        ],
        **changes,
    }


def step(attempt: int, number: int, time: float, rng: random.Random, seconds: float = 1.95) -> Record:
    noise = seconds * (1 + rng.gauss(0, 0.012))
    parts = {"data": 0.01, "reduce": 0.09, "optimizer": 0.1, "other": 0.02}
    return {
        "schema": 1,
        "kind": "step",
        "time": time,
        "attempt": attempt,
        "step": number,
        "position_before": (number - 1) * 512,
        "position_after": number * 512,
        "loss": 1.35 + 4.2 * math.exp(-number / 35) + 0.6 * math.exp(-number / 400) + rng.gauss(0, 0.035),
        "weight": 131072,
        "grad_norm": 0.3 + 4 * math.exp(-number / 20) + abs(rng.gauss(0, 0.05)),
        "lr": 1e-3 * min(number / 30, 0.55 + 0.45 * math.cos(math.pi * number / 300)),
        "seconds": {"total": noise, **parts, "forward_backward": noise - sum(parts.values())},
        "tokens_per_second": 131072 / noise,
        "peak_bytes": 0.597 * GIB,
    }


class Writer:
    """Writes records with a clock of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.records: list[Record] = []
        self.time, self.attempt, self.rng = START, 0, random.Random(seed)

    def begin(self, step_done: int = 0, gap: float = 0.0, steps: int = 300, **changes: Any) -> None:
        self.attempt, self.time = self.attempt + 1, self.time + gap
        self.records.append(run_started(self.attempt, self.time, step_done, steps, **changes))
        self.time += 6.0

    def add(self, kind: str, seconds: float = 0.0, **fields: Any) -> None:
        self.time += seconds
        base = {"schema": 1, "kind": kind, "time": self.time, "attempt": self.attempt}
        self.records.append({**base, **({"seconds": seconds} if seconds else {}), **fields})

    def steps(self, first: int, last: int, save_every: int = 100, evaluate_every: int = 50) -> None:
        for number in range(first, last + 1):
            record = step(self.attempt, number, 0.0, self.rng, 7.4 if number == first else 1.95)
            self.time += record["seconds"]["total"]
            self.records.append({**record, "time": self.time})
            if number == first:
                self.memory(number)
            if number % evaluate_every == 0:
                self.add("evaluation", 1.1, step=number, loss=record["loss"] + 0.08, weight=16384)
            if number % save_every == 0:
                path = f"runs/demo/checkpoints/step-{number:08d}"
                self.add("checkpoint", 0.8, step=number, path=path, bytes=135_000_000)

    def memory(self, number: int) -> None:
        sizes = {
            "weights": 0.021,
            "gradients": 0.021,
            "optimizer": 0.042,
            "activations_and_buffers": 0.3,
            "runtime": 0.213,
        }
        self.add("memory", step=number, components={name: size * GIB for name, size in sizes.items()})


def complete(steps: int = 300) -> list[Record]:
    """A run that finished at the first start."""
    out = Writer()
    out.begin(steps=steps)
    changed: dict[str, Any] = {"from": "auto", "to": "bf16", "evidence": {"bf16": 121e9, "fp32": 64e9}}
    out.add("decision", what="precision", **changed, because="bf16 121 GFLOP/s beats fp32 64")
    differences = {"loss": 0.0, "grad_norm": 3e-8, "gradients": 2e-7, "weights": 1e-7}
    text = "loss 0, grad norm 3e-8, weights 1e-7"
    out.add("verify", 2.1, equal=True, differences=differences, dtype="fp32", text=text)
    out.steps(1, steps)
    out.add("run_ended", status="complete", exit_code=0, error=None, step=steps)
    return out.records


def resumed() -> list[Record]:
    """A run killed after step 137, resumed from step 100, asked to stop after 220, and finished at the third start."""
    out = Writer(1)
    out.begin()
    out.steps(1, 137)
    out.begin(100, gap=14.0)
    out.add("fault", what="rank 1 was killed", because="signal 9", rank=1, signal=9)
    out.add(
        "decision", what="resume", **{"from": 137, "to": 100}, because="the newest complete checkpoint is of step 100"
    )
    out.steps(101, 220)
    out.add("checkpoint", 0.8, step=220, path="runs/demo/checkpoints/step-00000220", bytes=135_000_000)
    out.add("run_ended", status="requeue", exit_code=75, error=None, step=220)
    out.begin(220, gap=40.0)
    out.steps(221, 300)
    out.add("run_ended", status="complete", exit_code=0, error=None, step=300)
    return out.records


def failed() -> list[Record]:
    """A run whose loss became NaN at step 41."""
    out = Writer(2)
    out.begin()
    out.steps(1, 40)
    bad = step(1, 41, out.time + 2, out.rng)
    out.records.append({**bad, "loss": "nan", "grad_norm": "inf"})
    out.time += 2
    error = {"what": "the loss of step 41 is not a number", "because": "the gradient norm was <1e9> & rising",
             "try": "a lower task.optimizer.lr or bf16"}  # fmt: skip
    out.add("fault", what=error["what"], because=error["because"], rank=0)
    out.add("run_ended", status="failed", exit_code=6, error=error, step=41)
    return out.records


def one_step() -> list[Record]:
    """A run of a single step."""
    out = Writer(3)
    out.begin(steps=1)
    out.steps(1, 1)
    out.add("run_ended", status="complete", exit_code=0, error=None, step=1)
    return out.records


def write(run_dir: Path, records: list[Record]) -> Path:
    """Write the records as a run's journal, one file per start."""
    folder = run_dir / "journal"
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in {record["attempt"] for record in records}:
        lines = [json.dumps(record) + "\n" for record in records if record["attempt"] == attempt]
        (folder / f"{attempt:04d}.jsonl").write_text("".join(lines))
    return run_dir
