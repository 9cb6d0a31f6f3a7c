"""Compares what a run took with what was forecast, term by term, and writes report.html into the run's directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.json.shapes import REPORT
from paceline.cli.output import print_json, say_to

EXAMPLE = "paceline report runs/stdlib-code"
CODES = (74,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline report`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory: the one that holds `journal`")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline report`."""
    from paceline.report.build import build_report, report_lines, write_report
    from paceline.session.verbs.run_folder import open_run

    run = open_run(options.run_dir)
    summary = build_report(run.dir)
    page = write_report(run.dir, summary)
    if options.json:
        print_json({**summary.as_dict(), "page": str(page)}, REPORT)
    else:
        for line in report_lines(summary):
            say_to(json_wanted=False)(line)
    return 0
