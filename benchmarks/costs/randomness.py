"""The price of random numbers that belong to samples, against torch's own.

    python benchmarks/costs/randomness.py [--quick] [--rounds 20] [--steps 3] [--json OUT] [--save]

One training step of a small transformer, forward and backward, with dropout and without, on torch's own random numbers
and on those of the samples. The four take turns in every round, and ratios are of CPU time (on CUDA: of events) within
a round, so that other work on the machine meets all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.numerics.randomness.survey import survey

sys.path.insert(0, str(Path(__file__).parents[1]))  # what benchmarks share
from common import Spread, keep, machine, median_of, strict_json

ROWS, SEQ, WIDTH, HEADS, LAYERS, VOCAB = 8, 128, 256, 4, 4, 1024


class Transformer(nn.Module):
    """torch's encoder layers between an embedding and a head; attention by its fused kernel unless it drops."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout, batch_first=True, norm_first=True)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        return self.head(self.layers(self.embed(tokens)))


def objective(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the summed cross-entropy of the tokens themselves, and their number."""
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")
    return loss, tokens.numel()


def contender(dropout: float, ours: bool, device: torch.device) -> Callable[[int], None]:
    """Return a step: forward and backward of one batch."""
    torch.manual_seed(0)
    model = Transformer(dropout).to(device)
    tokens = torch.randint(VOCAB, (ROWS, SEQ), device=device)
    randomness = SampleRandomness(7, device, survey(model, objective, tokens, device))

    def step(number: int) -> None:
        rows = SampleRows(np.arange(ROWS) + number * ROWS, number, SEQ)
        with randomness.during(rows) if ours else contextlib.nullcontext():
            loss, _ = objective(model, tokens)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def seconds_of(step: Callable[[int], None], number: int, steps: int, device: torch.device) -> float:
    """Return the seconds of a few steps: of this process's CPU time, or between events on CUDA."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
    began = time.process_time()
    for index in range(steps):
        step(number * steps + index)
    if device.type != "cuda":
        return time.process_time() - began
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(device: torch.device, rounds: int, steps: int) -> dict[str, Any]:
    """Return the ratios on a device, each with its spread over rounds, and the seconds of a step without dropout."""
    contenders = {(p, ours): contender(p, ours, device) for p in (0.0, 0.1) for ours in (False, True)}
    times: dict[Any, list[float]] = {key: [] for key in contenders}
    for number in range(-1, rounds):
        for key, step in contenders.items():
            taken = seconds_of(step, number + 1, steps, device)
            if number >= 0:  # the first round warms up
                times[key].append(taken)

    def ratio(over: Any, under: Any) -> dict[str, float]:
        found: Spread = median_of([a / b for a, b in zip(times[over], times[under], strict=True)])
        return vars(found)

    return {
        "device": device.type,
        "step_seconds": median_of(times[0.0, False]).median / steps,
        "dropout 0.1: samples' over torch's": ratio((0.1, True), (0.1, False)),
        "dropout 0.1, torch's, over none": ratio((0.1, False), (0.0, False)),
        "dropout 0.1, samples', over none": ratio((0.1, True), (0.0, False)),
        "no dropout: watched over not": ratio((0.0, True), (0.0, False)),
    }


def document(found: list[dict[str, Any]], facts: dict[str, Any], rounds: int, steps: int) -> str:
    """Return the result as a page."""
    lines = [
        "# Random numbers that belong to samples: what they cost", "",
        "`python benchmarks/costs/randomness.py --save`", "",
        f"{facts['date']} · {facts['gpu'] or facts['cpu']} · torch {facts['torch']} · {LAYERS} encoder layers,"
        f" width {WIDTH}, {ROWS} rows of {SEQ} tokens, fp32, one thread · {rounds} rounds of {steps} steps", "",
        "| device | ratio of a step, forward and backward | median (95 % interval) |", "|---|---|---|",
    ]  # fmt: skip
    for row in found:
        for name, spread in row.items():
            if isinstance(spread, dict):
                shown = f"{spread['median']:.3f} ({spread['low']:.3f} to {spread['high']:.3f})"
                lines.append(f"| {row['device']} | {name} | {shown} |")
    return "\n".join([*lines, "", "Ratios are of CPU time, on CUDA of events, within a round; below 1 is faster.", ""])


def main(arguments: list[str]) -> int:
    """Measure, print, and save where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two rounds of a step, to see that it works")
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--save", action="store_true", help="write results/randomness.md, and figures/randomness.json")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps = 2, 1
    torch.set_num_threads(1)
    devices = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
    found = [measure(device, options.rounds, options.steps) for device in devices]
    facts = machine()
    page = document(found, facts, options.rounds, options.steps)
    print(page)
    figures = {"machine": facts, "rows": found}
    if options.json:
        Path(options.json).write_text(strict_json(figures))
    if options.save:
        keep("randomness", figures, page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
