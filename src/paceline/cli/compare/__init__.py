"""Holds runs against the first of them: loss, speed, memory, money, and what differs in spec, plan, data and versions.

Losses are means over the last steps that all runs have. A difference comes with a 95 % interval and how sure its sign
is: from the noise of the steps, or of runs that differ by their seed alone where there are such.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.json.shapes import COMPARED_RUNS
from paceline.cli.output import print_json, say_folded

EXAMPLE = "paceline compare runs/a runs/b\npaceline compare runs/a runs/b --json"
EXAMPLE_NEEDS = "two runs"
CODES = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline compare`."""
    parser.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="runs' directories, two or more")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline compare`."""
    from paceline.observe.compare.runs import compare_runs
    from paceline.observe.compare.texts import HANGING, compare_lines

    found = compare_runs(options.runs)
    if options.json:
        print_json(found, COMPARED_RUNS)
    else:
        for line in compare_lines(found):
            say_folded(line, HANGING)
    return 0
