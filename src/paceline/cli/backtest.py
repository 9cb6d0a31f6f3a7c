"""Tests forecasts against measured tables: published ones, or your own runs. Fits nothing and needs no accelerator.

A table is CSV, JSON Lines or Parquet with one measured step per row; the guide on backtesting has its columns. What a
row leaves open is assumed and counted, and every row that cannot be scored is counted with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from paceline.cli.output import print_json, say_to

EXAMPLE = "paceline backtest examples/measured-steps.csv --by accelerator --rows rows.csv"
CODES = (5, 74)
BY = ("source", "accelerator", "model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline backtest`."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="a table of measurements: .csv, .jsonl or .parquet")
    parser.add_argument(
        "--by", choices=BY, help="also score the step times of all files by source, accelerator or model"
    )
    parser.add_argument("--rows", metavar="OUT.csv", help="write every row's forecast beside its measurement")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline backtest`. Raises DataError (exit code 5) for a file that is no table of measurements."""
    from paceline.plan.backtest.backtest import break_down, run_backtest
    from paceline.plan.backtest.listing import listing, write_rows

    say = say_to(options.json)
    backtest = run_backtest([Path(name) for name in options.files])
    parts = break_down(backtest, options.by) if options.by else []
    if options.rows:
        count = write_rows(backtest, Path(options.rows))
        say(f"{count} rows: {options.rows}")
    if options.json:
        files = [dataclasses.asdict(file.score) for file in backtest.files]
        by = {"by": {options.by: parts}} if options.by else {}
        print_json({"constants_sha256": backtest.constants_sha256, "files": files, **by})
        return 0
    for line in listing(backtest, parts):
        say(line)
    return 0
