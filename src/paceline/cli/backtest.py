"""Tests forecasts against measured tables: published ones, or your own runs. Needs no accelerator.

A table is CSV, JSON Lines or Parquet with one measured step per row; the guide on backtesting has its columns. A folder
stands for the runs under it. What a row leaves open is assumed and counted, and every row that cannot be scored is
counted with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from paceline.cli.json.shapes import BACKTEST, LEFT_OUT
from paceline.cli.output import print_bare, print_json, say_to
from paceline.durable import write_output

EXAMPLE = "paceline backtest examples/measured-steps.csv --by accelerator --rows rows.csv"
CODES = (5, 74)
BY = ("source", "accelerator", "model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline backtest`."""
    parser.add_argument(
        "files", metavar="FILE", nargs="+",
        help="a table of measurements (.csv, .jsonl or .parquet), or a folder with runs of `paceline train`",
    )  # fmt: skip
    parser.add_argument(
        "--by", choices=BY, help="also score the step times of all files by source, accelerator or model"
    )
    parser.add_argument(
        "--fit", metavar="OUT.toml", help="fit the constants of the forecasts on these files and write them there"
    )
    parser.add_argument(
        "--leave-one-source-out", action="store_true",
        help="score each table of steps by constants that are fitted without its source",
    )  # fmt: skip
    parser.add_argument(
        "--fit-on", metavar="FILE", nargs="+",
        help="the tables that --leave-one-source-out may fit on (default: all that are scored)",
    )  # fmt: skip
    parser.add_argument(
        "--anchor", choices=("smallest",),
        help="also score the rest of every series when its smallest row is given",
    )  # fmt: skip
    parser.add_argument("--rows", metavar="OUT.csv", help="write every row's forecast beside its measurement")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline backtest`. Raises DataError (exit code 5) for a file that is no table of measurements."""
    from paceline.backtest.anchor import anchor_smallest, anchored_lines
    from paceline.backtest.backtest import break_down
    from paceline.backtest.listing import listing, write_rows
    from paceline.session.verbs.scores import backtest_of

    say, files = say_to(options.json), [Path(name) for name in options.files]
    if options.fit:
        return _fit(files, Path(options.fit), options.json)
    if options.leave_one_source_out:
        return _leave_out(files, [Path(name) for name in options.fit_on or options.files], options.json)
    backtest = backtest_of(files)
    anchored = anchor_smallest(backtest.steps()) if options.anchor else None
    parts = break_down(backtest, options.by) if options.by else []
    if options.rows:
        count = write_rows(backtest, Path(options.rows))
        say(f"{count} rows: {options.rows}")
    if options.json:
        scores = [dataclasses.asdict(file.score) for file in backtest.files]
        by = {"by": {options.by: parts}} if options.by else {}
        by = {**by, "anchored": dataclasses.asdict(anchored)} if anchored else by
        print_json({"constants_sha256": backtest.constants_sha256, "files": scores, **by}, BACKTEST)
        return 0
    for line in [*listing(backtest, parts), *(["", *anchored_lines(anchored)] if anchored else [])]:
        say(line)
    return 0


def _leave_out(files: list[Path], fit_on: list[Path], as_json: bool) -> int:
    """Score every table of steps by constants that are fitted without its source."""
    from paceline.backtest.fitting.leave_out import leave_sources_out, left_out_lines

    found = leave_sources_out(files, fit_on)
    for line in left_out_lines(found):
        say_to(as_json)(line)
    if as_json:
        told = dataclasses.asdict(dataclasses.replace(found, files=()))
        del told["files"]
        scores = [dataclasses.asdict(file.score) for file in found.files]
        print_json({"leave_one_source_out": told, "files": scores}, LEFT_OUT)
    return 0


def _fit(files: list[Path], out: Path, as_json: bool) -> int:
    """Fit the constants on the files and write them."""
    from paceline.backtest.fitting.fit import fit

    found = fit(files)
    write_output(out, found.text())
    for line in [*found.lines(), f"written to {out}"]:
        say_to(as_json)(line)
    if as_json:
        print_bare(found.constants)
    return 0
