"""Evaluates a run's weights on one device: the mean loss and the metrics on what the run held out, or on SOURCE.

SOURCE is what `task.data.source` takes, such as a table of texts and labels that training has not seen: all of it
counts, and is read as the run reads its own data, with the run's tokenizer, classes and code. The newest checkpoint
that is sound in every byte is taken, or the one of --step; `--step best` is the one of the best evaluation. Nothing
is written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.json.shapes import EVALUATE
from paceline.cli.output import print_json, say_folded
from paceline.cli.parser import step_or_best, whole
from paceline.units import format_seconds

EXAMPLE = "paceline evaluate runs/stdlib-code\npaceline evaluate runs/stdlib-code --samples 8 --json"
CODES = (5, 74)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline evaluate`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory: the one with `checkpoints`")
    parser.add_argument("source", metavar="SOURCE", nargs="?", default="", help="other data than what the run held out")
    parser.add_argument(
        "--step", metavar="N", type=step_or_best, help="the checkpoint of this step, or of the best evaluation (best)"
    )
    parser.add_argument("--samples", metavar="N", type=whole, help="samples at most, always the same (default: all)")
    parser.add_argument(
        "--metrics", metavar="NAME", nargs="+", default=[], help="metrics in the place of the task's own"
    )


def execute(options: argparse.Namespace) -> int:
    """Run `paceline evaluate`."""
    from paceline.session.evaluating import evaluate_run

    found = evaluate_run(options.run_dir, options.source, options.step, options.samples, options.metrics)
    if options.json:
        print_json({
            "run_dir": str(options.run_dir), "checkpoint": str(found.checkpoint), "step": found.step,
            "source": found.source, "samples": found.samples, "of_samples": found.of_samples, "loss": found.loss,
            "weight": found.weight, "metrics": dict(found.metrics), "seconds": found.seconds,
            "skipped": list(found.skipped),
        }, EVALUATE)  # fmt: skip
        return 0
    for reason in found.skipped:
        say_folded(f"skipped  {reason}")
    part = "all" if found.samples == found.of_samples else f"{found.samples:,} of"
    what, took = found.source or "what the run held out", format_seconds(found.seconds)
    say_folded(f"evaluate step {found.step:,} on {part} {found.of_samples:,} samples of {what} ({took})")
    for name, value in {"loss": found.loss, **found.metrics}.items():
        print(f"  {name:<14}{value:.6g}")
    return 0
