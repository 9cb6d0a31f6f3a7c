"""What deterministic mode costs, and what it gives: two runs bit for bit equal.

    python benchmarks/costs/deterministic.py [--quick] [--model llama-1m] [--rounds 30] [--steps 4] [--device cuda]
                                             [--json F]

Four loops train the same model on the same rows: two with PyTorch's usual kernels, two with deterministic ones alone
(`run.deterministic`). They take turns of a few steps in one process, so that what else the machine does hits all alike;
a figure is the median over the rounds of a loop's time over the first one's in the same round. The second usual loop is
the control: how far its ratio is from 1 is what the measurement cannot see. At the end the weights of the loops are
compared bit for bit, in pairs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TypedDict

import torch

import paceline
from paceline.run.assemble import Assembled, assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan

sys.path.insert(0, str(Path(__file__).parents[1]))  # what benchmarks share
from common import TokenRows, machine, median_of

LOOPS = {"usual": False, "usual again": False, "deterministic": True, "deterministic again": True}
VOCAB, LR = 257, 1e-3


class Loop:
    """A model that is trained with or without deterministic kernels."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.deterministic, self._step = name, LOOPS[name], 0
        world = World(0, 1, 0, torch.device(options.device))
        rows = TokenRows(4096, options.seq_len, VOCAB)
        task = paceline.Task(name="det", model=paceline.ModelSpec(options.model, vocab=VOCAB), data=rows, seed=7)
        plan = Plan(Layout(), micro_batch=options.micro_batch, accumulation=1, batch_samples=options.micro_batch)
        self._built: Assembled = assemble(task, plan, world, rows, options.seq_len)
        self._stream = BatchStream(rows, task.seed, plan, 0, world.device)
        self._batch = plan.batch_samples

    def turn(self, steps: int) -> float:
        """Make some steps and return the seconds they took."""
        torch.use_deterministic_algorithms(self.deterministic)
        began = time.perf_counter()
        for _ in range(steps):
            self._built.stepper.step(self._stream.at(self._step * self._batch), LR)
            self._step += 1
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def digest(self) -> str:
        """Return the digest of the weights."""
        found = hashlib.sha256()
        for weight in self._built.model.parameters():
            found.update(weight.detach().cpu().numpy().tobytes())
        return found.hexdigest()


class Row(TypedDict):
    """A loop, and its time against the loop with the usual kernels."""

    loop: str
    ratio: dict[str, float]


class Result(TypedDict):
    """What is written as JSON; `equal` says by the kind of kernels whether two runs ended with the same bits."""

    rows: list[Row]
    equal: dict[str, bool]
    machine: dict[str, Any]


def measure(options: argparse.Namespace) -> Result:
    """Return the ratios of the loops to the first, and which of them ended with the same bits."""
    loops = [Loop(name, options) for name in LOOPS]
    for loop in loops:
        loop.turn(2)  # first steps make the optimizer's state
    ratios: dict[str, list[float]] = {name: [] for name in LOOPS}
    for number in range(options.rounds):
        order = loops[number % len(loops) :] + loops[: number % len(loops)]
        seconds = {loop.name: loop.turn(options.steps) for loop in order}
        for name, each in seconds.items():
            ratios[name].append(each / seconds["usual"])
    digests = {loop.name: loop.digest() for loop in loops}
    return {
        "rows": [{"loop": name, "ratio": vars(median_of(values))} for name, values in ratios.items()],
        "equal": {
            "usual": digests["usual"] == digests["usual again"],
            "deterministic": digests["deterministic"] == digests["deterministic again"],
        },
        "machine": machine(),
    }


def main(arguments: list[str]) -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1m")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that everything works")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps, options.seq_len, options.micro_batch = 3, 2, 16, 1
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as `run.deterministic` sets it, before CUDA is used
    result = measure(options)
    print("| loop | time against the usual kernels |\n|---|---|")
    for row in result["rows"]:
        ratio = row["ratio"]
        print(f"| {row['loop']} | {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) |")
    for kernels, equal in result["equal"].items():
        print(f"two runs with {kernels} kernels: {'the same bits' if equal else 'other bits'}")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
