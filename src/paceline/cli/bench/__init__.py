"""Measures a task's own steps on this machine.

data SPEC    trains some steps as they are and as many on batches that were read before: what the loader costs, and
             what bounds a step. The run's directory stays as it is, and what was trained is thrown away
"""

from __future__ import annotations

import argparse

from paceline.cli.json.shapes import BENCH
from paceline.cli.output import print_json, say_to, stdout_to_stderr
from paceline.cli.parser import add_spec_arguments, whole

EXAMPLE = "paceline bench data examples/stdlib-code.toml --steps 10"
CODES = (3, 5, 6, 74)
ACTIONS = ("data",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline bench`."""
    parser.add_argument("action", metavar="ACTION", choices=ACTIONS, help="what to measure: data")
    add_spec_arguments(parser)
    parser.add_argument("--steps", metavar="N", type=whole, default=20, help="steps of each kind (default 20)")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline bench`."""
    from paceline.session.verbs.bench import bench_data
    from paceline.spec.load import load_spec

    spec, say = load_spec(options.spec, options.overrides), say_to(options.json)
    if options.json:
        with stdout_to_stderr():
            found = bench_data(spec, options.steps, say)
        print_json(found, BENCH)
        return 0
    for line in bench_data(spec, options.steps, say).lines():
        print(line)
    return 0
