"""What the switches of a GPU cost or save, as ratios to the same steps without them, and packed documents by kernel.

    python benchmarks/costs/gpu_switches.py [--model llama-1b] [--layers 4] [--device cuda] [--json OUT]
    python benchmarks/costs/gpu_switches.py --device cpu --quick

Every variant trains the same rows in a process of its own, plain first and last: what the two plain ones differ by is
what a ratio may be off by.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.spec.layout import accumulation_for
from paceline.spec.plan import Plan
from paceline.task.models.layers.attention import CausalAttention
from paceline.task.models.layers.packed import PackedDocuments, as_mask, document_starts, takes_packed
from paceline.task.models.sizes import NAMED_SIZES

sys.path.insert(0, str(Path(__file__).parents[1]))  # what benchmarks share
from common import machine
from gpu import Job, alone, with_paceline

SWITCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("bf16", {}),
    "deterministic": ("bf16", {"deterministic": True}),
    "cudnn_benchmark": ("bf16", {"cudnn_benchmark": True}),
    "segments that do not grow": ("bf16", {"expandable_segments": False}),
    "plain again": ("bf16", {}),
    "fp32": ("fp32", {}),
    "fp32, tf32": ("fp32", {"tf32": True}),
    "fp32 again": ("fp32", {}),
}


def steps_with(options: argparse.Namespace, precision: str, switches: dict[str, Any]) -> dict[str, float]:
    """Return what steps take under some switches: seconds, peak bytes, and the last loss."""
    plan = Plan(
        micro_batch=options.micro_batch, accumulation=accumulation_for(options.batch, 1, options.micro_batch),
        batch_samples=options.batch, precision=precision, recompute="selective",
    )  # fmt: skip
    job = Job(
        options.model, options.layers, options.seq_len, options.batch, plan, options.device, options.steps,
        options.warm_up,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="gpu-switches-") as folder:
        took = alone(with_paceline, job, folder, switches)
    return {**dataclasses.asdict(took), "losses": took.losses[-1]}


def documents(device: str, seq: int, heads: int, quick: bool) -> dict[str, Any]:
    """Return the seconds and bytes of attention, forward and backward, of packed documents by kernel and by mask."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, max(2, seq // 4), 4 * seq)
    rows = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)[:seq]).expand(2, seq).contiguous()
    starts = document_starts(rows)
    assert starts is not None
    packed = PackedDocuments(rows.to(device), starts.to(device), seq)
    found: dict[str, Any] = {"documents": len(starts) - 1, "kernel": takes_packed(torch.device(device))}
    ways: dict[str, Any] = {"mask": as_mask(packed)}
    if found["kernel"]:
        ways["packed"] = packed
    for name, mask in ways.items():
        q, k, v = (
            torch.randn(2, heads, seq, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        found[name] = timed(q, k, v, mask, repeats=2 if quick else 20)
    return found


def timed(q: Tensor, k: Tensor, v: Tensor, mask: Any, repeats: int) -> dict[str, float]:
    """Return the seconds of one forward and backward pass, and the most bytes allocated beside the inputs on CUDA."""
    on_cuda, attention = q.device.type == "cuda", CausalAttention()
    best, peak = float("inf"), 0
    for _ in range(repeats + 1):
        if on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        began = time.perf_counter()
        attention(q, k, v, mask).sum().backward()
        if on_cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - held
        best = min(best, time.perf_counter() - began)
    return {"seconds": best, "bytes": peak}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=tuple(NAMED_SIZES), default="llama-1b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8, help="rows per step")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the clock starts")
    parser.add_argument("--quick", action="store_true", help="llama-1m and a few steps, to see that everything works")
    parser.add_argument("--json", metavar="OUT", help="also write the result as JSON")
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.layers, options.seq_len, options.batch = "llama-1m", 1, 32, 4
        options.steps, options.warm_up = 3, 2
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --device cpu --quick shows that the benchmark works")
    return options


def main(arguments: list[str]) -> int:
    """Measure and print."""
    options = parse(arguments)
    facts = alone(machine)
    print(f"{facts['date']} · {facts['gpu'] if options.device == 'cuda' else facts['cpu']} · torch {facts['torch']}")
    found = {name: steps_with(options, *switches) for name, switches in SWITCHES.items()}
    for name, took in found.items():
        base = found["fp32" if name.startswith("fp32") else "plain"]
        print(
            f"  {name:<26} {took['step_seconds']:9.4f} s/step  x {took['step_seconds'] / base['step_seconds']:.3f}  "
            f"peak x {took['peak_bytes'] / base['peak_bytes']:.3f}  loss {took['losses']:.6f}"
        )
    heads = NAMED_SIZES[options.model].heads
    attention = alone(documents, options.device, options.seq_len, heads, options.quick)
    for name in ("mask", "packed"):
        if name in attention:
            print(f"  documents by {name:<13} {attention[name]['seconds']:9.5f} s  {attention[name]['bytes']:,} B")
    if not attention["kernel"]:
        print("  documents by kernel        not on this device")
    if options.json:
        content = {"machine": facts, "options": vars(options), "steps": found, "documents": attention}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
