"""Plans the task, proves the plan equal to one device, trains, and reports against the forecast.

A run that was stopped goes on where its newest complete checkpoint is, on however many devices there are now: start
the same command again.
"""

from __future__ import annotations

import argparse

from paceline.cli.output import print_json, stdout_to_stderr
from paceline.cli.parser import add_spec_arguments, whole

EXAMPLE = "paceline train examples/stdlib-code.toml --steps 50 --run-dir runs/short"
CODES = (3, 4, 5, 6, 74, 75)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline train`."""
    add_spec_arguments(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="the run's directory, short for --set run.dir=DIR")
    steps_help = "stop after N steps, short for --set 'task.stop=N steps'"
    parser.add_argument("--steps", metavar="N", type=whole, help=steps_help)
    parser.add_argument("--no-verify", action="store_true", help="skip the proof, short for --set run.verify=false")
    parser.add_argument(
        "--record-samples", action="store_true",
        help="write the sample ids of every step to the journal, short for --set run.record_samples=true",
    )  # fmt: skip


def execute(options: argparse.Namespace) -> int:
    """Run `paceline train` and return the run's exit code."""
    from paceline.config.build import Override
    from paceline.config.values import toml
    from paceline.spec import load_spec

    short: list[str | Override] = []
    if options.run_dir is not None:
        short.append(Override("run.dir", toml(options.run_dir), "--run-dir"))
    if options.steps is not None:
        short.append(Override("task.stop", toml(f"{options.steps} steps"), "--steps"))
    if options.no_verify:
        short.append(Override("run.verify", "false", "--no-verify"))
    if options.record_samples:
        short.append(Override("run.record_samples", "true", "--record-samples"))
    spec = load_spec(options.spec, [*options.overrides, *short])
    from paceline.launch.start import train

    if not options.json:
        return train(spec)
    from paceline.report.build import build_report
    from paceline.run.arguments import run_directory

    with stdout_to_stderr():
        code = train(spec)
    print_json({"exit_code": code, "report": build_report(run_directory(spec)).as_dict()})
    return code
