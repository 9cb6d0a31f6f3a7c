"""Looks at what is there for training (torch, CUDA, NCCL, cores, memory, permissions, extras) and says what to do.

Nothing is changed. A line that begins with `!` is what training cannot do without; `-` is a remark.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from paceline.cli.json.shapes import DOCTOR
from paceline.cli.output import print_json, say_folded

EXAMPLE = "paceline doctor"
CODES = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline doctor`."""
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where runs are to be written (default runs)")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline doctor`."""
    from paceline.session.doctor.examine import examine
    from paceline.session.doctor.finding import HANGING, lines_of

    examination = examine(Path(options.runs))
    if options.json:
        findings = [dataclasses.asdict(finding) for finding in examination.findings]
        for finding in findings:
            finding["try"] = finding.pop("try_")
        print_json({"findings": findings}, DOCTOR, examination.exit_code)
    else:
        for line in lines_of(examination):
            say_folded(line, HANGING)
    return examination.exit_code
