"""Tokens per second, utilisation and memory of Paceline on one device, beside a training loop by hand.

    python benchmarks/gpu.py [--models llama-1b,llama-8b] [--device cuda] [--steps 10] [--json OUT] [--save]
    python benchmarks/gpu.py --device cpu --quick

A model trains in bf16 with fp32 weights and AdamW state, compiled blocks and selective recompute, in the largest
micro-batch that the forecast says fits; where the whole model does not fit, with as many of its layers as do. Each loop
has a process to itself. The loop by hand keeps bf16 weights for the passes beside fp32 ones for the optimizer, adds up
gradients in fp32, and uses the same module, kernels and recompute, so that both compute the same numbers.

MFU counts 3 x the forward pass's FLOPs with causal attention as half, and none for recompute. It is given over the
published dense peak and over the rate of large bf16 products measured in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import TokenRows, keep, machine, strict_json
from torch import Tensor, nn

import paceline
from paceline.errors import DoesNotFit
from paceline.plan.planned import Planned, plan_task
from paceline.plan.search.found import Candidate
from paceline.run.loop.loader import split_rows
from paceline.run.memory.recompute import checkpoint_block
from paceline.run.memory.spent import MemoryMeter
from paceline.spec.arguments import make_spec
from paceline.spec.layout import accumulation_for
from paceline.spec.plan import Plan
from paceline.task.data.order.permutation import sample_ids
from paceline.task.models.build import build_model
from paceline.task.models.sizes import NAMED_SIZES, nominal_vocab

SEED = 7
LEARNING_RATE = 1e-4
CLIP_NORM = 1.0
SAMPLES = 256


@dataclasses.dataclass(frozen=True)
class Job:
    """What both loops train."""

    model: str
    layers: int
    seq_len: int
    batch: int  # rows per step
    plan: Plan
    device: str
    steps: int
    warm_up: int

    def source(self) -> TokenRows:
        """Return the rows that are trained on."""
        return TokenRows(SAMPLES, self.seq_len, nominal_vocab(NAMED_SIZES[self.model]))

    def task(self) -> paceline.Task:
        """Return the task; one step longer than is run, so that no checkpoint is written at its end."""
        return paceline.Task(
            name=self.model,
            model=paceline.ModelSpec(self.model, layers=self.layers),
            data=self.source(),
            optimizer=paceline.OptimizerSpec(lr=LEARNING_RATE, clip_norm=CLIP_NORM),
            schedule=paceline.ScheduleSpec(kind="constant"),
            global_batch=paceline.Amount(self.batch, "samples"),
            stop=paceline.Amount(self.warm_up + self.steps + 1, "steps"),
            seed=SEED,
        )


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one loop took."""

    step_seconds: float
    peak_bytes: int  # CUDA: most bytes of tensors at a time; CPU: resident memory
    beside_bytes: int  # CUDA: what the process held of the device beside its allocator; CPU: 0
    reserved_bytes: int  # CUDA: most that the allocator held of the device; CPU: 0
    losses: list[float]  # of every step, warm-up included


# ---- the plan ------------------------------------------------------------------------------------------------------


def plan_largest(options: argparse.Namespace, model: str, folder: str) -> tuple[Job, Planned, Candidate]:
    """Return the job with the most layers that fit and its largest micro-batch, as forecast."""
    whole = options.layers or NAMED_SIZES[model].layers
    layers = whole
    most: tuple[int, Any] = (0, None)
    low, high = 1, whole
    while low <= high:  # bisect: what fits with n layers fits with fewer
        try:
            most = layers, _plan(options, model, layers, folder)
            low = layers + 1
        except DoesNotFit:
            if layers == 1:
                raise
            high = layers - 1
        layers = (low + high) // 2
    layers, planned = most
    assert planned is not None
    best = max(planned.search.candidates, key=lambda candidate: candidate.plan.micro_batch)
    return dataclasses.replace(_job(options, model, layers), plan=best.plan), planned, best


def _plan(options: argparse.Namespace, model: str, layers: int, folder: str) -> Planned:
    constraints = {"precision": "bf16", "recompute": "selective", "compile": options.compile}
    task = _job(options, model, layers).task()
    return plan_task(make_spec(task, constraints, {"device": options.device, "devices": 1}, {"dir": folder}))


def _job(options: argparse.Namespace, model: str, layers: int) -> Job:
    return Job(model, layers, options.seq_len, options.batch, Plan(), options.device, options.steps, options.warm_up)


# ---- the loops, each in a process of its own -----------------------------------------------------------------------


class StopWatch:
    """Counts steps; the clock starts after the warm-up, with the device idle and its memory peak forgotten."""

    def __init__(self, job: Job) -> None:
        self._job, self._device = job, torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
        self._losses: list[Any] = []
        self._began = 0.0

    def step_done(self, loss: Any) -> bool:
        """Count a step, whose loss may be a tensor on the device; return whether there are more to make."""
        self._losses.append(loss)
        if len(self._losses) == self._job.warm_up:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                torch.cuda.reset_peak_memory_stats(self._device)
            self._began = time.perf_counter()
        return len(self._losses) < self._job.warm_up + self._job.steps

    def stop(self) -> Measured:
        """Return what was measured. The device must be given time to finish, which counts."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = (time.perf_counter() - self._began) / self._job.steps
        reserved = torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else 0
        losses = [float(loss) for loss in self._losses]
        meter = MemoryMeter(self._device)
        beside = meter.beside_bytes()
        return Measured(seconds, meter.peak_bytes() - beside, beside, reserved, losses)


def with_paceline(job: Job, folder: str, switches: dict[str, Any] | None = None) -> Measured:
    """Train with Paceline's public loop, journal on; `switches` are further options of the run."""
    with contextlib.redirect_stdout(sys.stderr):
        run = paceline.Run(
            job.task(),
            job.plan,
            cluster={"device": job.device, "devices": 1},
            run={"dir": folder, "checkpoint_every": None, "evaluate_every": None, "verify": False, **(switches or {})},
        )
        watch = StopWatch(job)
        for batch in run:
            if not watch.step_done(run.step(batch).loss):
                break
        return watch.stop()


def by_hand(job: Job, folder: str) -> Measured:
    """Train with torch alone: bf16 weights for the passes, fp32 ones for AdamW, rows on the device from the start."""
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
    source = job.source()
    spec = paceline.ModelSpec(job.model, layers=job.layers)
    model: Any = build_model(spec, int(source.vocab or 0), job.seq_len, SEED, device=str(device)).train()
    weights = [parameter.detach().clone() for parameter in model.parameters()]  # fp32
    model.to(torch.bfloat16)
    for layer in model.layers:
        checkpoint_block(layer, job.plan.recompute, compiled=job.plan.compile)
        if job.plan.compile:
            layer.forward = torch.compile(layer.forward)
    parameters = list(model.parameters())
    optimizer = _adamw(weights)
    order = sample_ids(SEED, torch.arange((job.warm_up + job.steps) * job.batch).numpy(), source.samples)
    rows = {name: tensor.to(device) for name, tensor in source.read(order).items()}
    watch, more, step = StopWatch(job), True, 0
    while more:
        losses = []
        for weight in weights:
            weight.grad = None
        # Paceline's cut of a batch into micro-batches, which need not be equal.
        for part in split_rows(range(step * job.batch, (step + 1) * job.batch), job.plan.accumulation):
            taken = slice(part.start, part.stop)
            loss_sum, _ = model(rows["tokens"][taken], labels=rows["labels"][taken])
            loss = loss_sum / (job.batch * job.seq_len)
            loss.backward()
            _add_gradients(weights, parameters)
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(weights, CLIP_NORM)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, weights)
        more, step = watch.step_done(torch.stack(losses).sum()), step + 1
    return watch.stop()


@torch.no_grad()
def _add_gradients(weights: list[Tensor], parameters: list[Tensor]) -> None:
    """Add bf16 gradients to fp32 ones, one at a time so that their memory is free at once."""
    for weight, parameter in zip(weights, parameters, strict=True):
        assert parameter.grad is not None
        if weight.grad is None:
            weight.grad = parameter.grad.float()
        else:
            weight.grad += parameter.grad
        parameter.grad = None


def _adamw(weights: list[Tensor]) -> torch.optim.Optimizer:
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": 0.1},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)


def by_hand_if_it_fits(job: Job, folder: str) -> Measured | None:
    """Return what the loop by hand took, or None where it runs out of the device's memory."""
    try:
        return by_hand(job, folder)
    except torch.OutOfMemoryError:
        return None


def by_hand_that_fits(job: Job, folder: str) -> tuple[int, Measured | None]:
    """Return the micro-batch, at most the plan's, with which the loop by hand fits, and what it took; or (0, None).

    It keeps 4 bytes per parameter more than Paceline: bf16 weights and gradients for the whole model at a time.
    """
    micro_batch = job.plan.micro_batch
    while micro_batch:
        plan = dataclasses.replace(
            job.plan, micro_batch=micro_batch, accumulation=accumulation_for(job.batch, 1, micro_batch)
        )
        took = alone(by_hand_if_it_fits, dataclasses.replace(job, plan=plan), folder)
        if took is not None:
            return micro_batch, took
        micro_batch //= 2
    return 0, None


def matrix_peak(device: str, width: int) -> float:
    """Return the FLOP/s of bf16 products of [width, width] matrices: the best of several trials of ten."""
    with torch.inference_mode():
        a = torch.randn(width, width, device=device, dtype=torch.bfloat16)
        b = torch.randn(width, width, device=device, dtype=torch.bfloat16)
        best = math.inf
        for _ in range(6):
            _synchronise(device)
            began = time.perf_counter()
            for _ in range(10):
                torch.mm(a, b)
            _synchronise(device)
            best = min(best, (time.perf_counter() - began) / 10)
    return 2 * width**3 / best


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns in a fresh process, whose memory is gone afterwards."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# ---- the report ----------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, model: str, matrix_flops: float) -> dict[str, Any]:
    """Return one model's result."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        job, planned, candidate = plan_largest(options, model, folder)
        print(f"{model}, {job.layers} layers: {job.plan}", file=sys.stderr)
        ours = alone(with_paceline, job, folder)
        micro_batch, theirs = by_hand_that_fits(job, folder)
    forecast = candidate.forecast
    runtime = sum(term.value for term in forecast.memory if term.kind == "runtime")
    published = planned.cluster.device.peak_flops.get("bf16", math.nan)

    def row(took: Measured, micro_batch: int) -> dict[str, Any]:
        flops = forecast.model_flops_per_step / took.step_seconds
        return {
            "micro_batch": micro_batch,
            "step_seconds": took.step_seconds,
            "tokens_per_second": job.batch * job.seq_len / took.step_seconds,
            "mfu_published": _known(flops / published),
            "mfu_matrix": flops / matrix_flops,
            "peak_bytes": took.peak_bytes,
            "beside_bytes": took.beside_bytes,
            "reserved_bytes": took.reserved_bytes,
            "losses": took.losses,
        }

    return {
        "model": model,
        "layers": job.layers,
        "layers_of": NAMED_SIZES[model].layers,
        "parameters": planned.profile.parameters,
        "seq_len": job.seq_len,
        "batch": job.batch,
        "plan": str(job.plan),
        "model_flops_per_step": forecast.model_flops_per_step,
        "forecast": {
            "step_seconds": _known(forecast.step_seconds.value),
            # Of tensors, as it is measured; what the process holds besides, on CUDA, stands by itself.
            "peak_bytes": forecast.peak_bytes.value - (runtime if options.device == "cuda" else 0),
            "beside_bytes": runtime if options.device == "cuda" else 0,
        },
        "paceline": row(ours, job.plan.micro_batch),
        "by_hand": row(theirs, micro_batch) if theirs else None,
        "time_over_by_hand": ours.step_seconds / theirs.step_seconds if theirs else None,
        "largest_loss_difference": _difference(ours.losses, theirs.losses) if theirs else None,
    }


def _difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference of two runs' losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def lines_of(result: dict[str, Any]) -> list[str]:
    """Return one model's result as lines of text."""
    name = f"{result['model']} ({result['layers']} of {result['layers_of']} layers)"
    lines = [f"{name}, {result['parameters']:,} parameters, {result['seq_len']} tokens a row: {result['plan']}"]
    for loop, title in (("paceline", "Paceline"), ("by_hand", "loop by hand")):
        row = result[loop]
        if row is None:
            lines.append(f"  {title:<13} out of memory with every micro-batch")
            continue
        published = "unknown" if row["mfu_published"] is None else f"{row['mfu_published']:.1%}"
        lines.append(
            f"  {title:<13} {row['step_seconds']:9.4f} s/step  {row['tokens_per_second']:12,.0f} tokens/s  "
            f"MFU {row['mfu_matrix']:.1%} of measured products, {published} of the published peak  "
            f"peak {row['peak_bytes'] / 2**30:.2f} GiB  micro-batch {row['micro_batch']}"
        )
    forecast = result["forecast"]
    seconds = "unknown" if forecast["step_seconds"] is None else f"{forecast['step_seconds']:9.4f}"
    lines.append(f"  {'forecast':<13} {seconds} s/step  peak {forecast['peak_bytes'] / 2**30:.2f} GiB")
    if result["by_hand"] is not None:
        lines.append(
            f"  time over the loop by hand {result['time_over_by_hand']:.4f}; "
            f"losses differ by {result['largest_loss_difference']:.1e} at most"
        )
    return lines


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", default="llama-1b,llama-8b", help="named sizes of the built-in decoder")
    parser.add_argument("--layers", type=int, default=0, help="at most so many layers (0: all that fit)")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=16, help="rows per step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the clock starts")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--quick", action="store_true", help="llama-1m and a few steps, to see that everything works")
    parser.add_argument("--json", metavar="OUT", help="also write the result as JSON")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/figures/gpu/DEVICE.json")
    options = parser.parse_args(arguments)
    if options.quick:
        options.models, options.seq_len, options.batch, options.steps, options.warm_up = "llama-1m", 32, 4, 3, 2
    unknown = set(options.models.split(",")) - set(NAMED_SIZES)
    if unknown:
        parser.error(f"--models: unknown {', '.join(sorted(unknown))}; there are {', '.join(NAMED_SIZES)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --device cpu --quick shows that the benchmark works")
    return options


def main(arguments: list[str]) -> int:
    """Measure, print, and write what was asked for."""
    options = parse(arguments)
    facts = alone(machine)
    matrix_flops = alone(matrix_peak, options.device, 1024 if options.device == "cpu" else 8192)
    device = facts["gpu"] if options.device == "cuda" else facts["cpu"]
    print(f"{facts['date']} · {device} · torch {facts['torch']} · bf16 products {matrix_flops / 1e12:.3g} TFLOP/s")
    results = [measure(options, model, matrix_flops) for model in options.models.split(",")]
    for result in results:
        print("\n".join(lines_of(result)))
    content = {"machine": facts, "matrix_flops": matrix_flops, "options": vars(options), "results": results}
    if options.json:
        Path(options.json).write_text(strict_json(content))
    if options.save:
        keep(f"gpu/{device.lower().replace(' ', '-')}", content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
