"""Compares what a run took with what was forecast, term by term, and writes report.html into the run's directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.output import print_json
from paceline.errors import ConfigError, suggestion

EXAMPLE = "paceline report runs/stdlib-code"
CODES = (74,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline report`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory: the one that holds `journal`")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline report`."""
    run_dir: Path = options.run_dir
    if not (run_dir / "journal").is_dir():
        raise ConfigError(f"'{run_dir}' is not a run's directory", "it has no folder `journal`", _runs_near(run_dir))
    from paceline.report.build import build_report, report_lines, write_report

    page = write_report(run_dir)
    summary = build_report(run_dir)
    if options.json:
        print_json({**summary.as_dict(), "page": str(page)})
    else:
        print("\n".join(report_lines(summary)))
    return 0


def _runs_near(run_dir: Path) -> str:
    folders = {run_dir, run_dir.parent, Path("runs")}
    known = [str(found.parent) for folder in folders for found in folder.glob("*/journal")]
    return suggestion(str(run_dir), known) if known else "paceline train SPEC makes one"
