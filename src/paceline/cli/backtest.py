"""Tests forecasts against measured tables: published ones, or your own runs. Needs no accelerator.

A table is CSV, JSON Lines or Parquet with one measured step per row; the guide on backtesting has its columns. A folder
stands for the runs under it. What a row leaves open is assumed and counted, and every row that cannot be scored is
counted with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.output import print_json, say_to
from paceline.errors import DataError, StorageError

if TYPE_CHECKING:
    from paceline.backtest.backtest import FileResult

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
    parser.add_argument("--rows", metavar="OUT.csv", help="write every row's forecast beside its measurement")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline backtest`. Raises DataError (exit code 5) for a file that is no table of measurements."""
    from paceline.backtest.backtest import break_down, run_backtest
    from paceline.backtest.listing import listing, write_rows

    say = say_to(options.json)
    if options.fit:
        return _fit([Path(name) for name in options.files], Path(options.fit), options.json)
    folders = [Path(name) for name in options.files if Path(name).is_dir()]
    backtest = run_backtest([Path(name) for name in options.files if not Path(name).is_dir()])
    own = tuple(_own_runs(folder) for folder in folders)
    backtest = dataclasses.replace(backtest, files=(*backtest.files, *own))
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


def _own_runs(folder: Path) -> FileResult:
    """Return the scores of the runs under a folder. Raises DataError where there are none."""
    from paceline.backtest.runs import FinishedRun, score_runs
    from paceline.run.record.observe import observe_run, runs_under

    runs, refused = [], []
    for run_dir in runs_under(folder):
        try:
            runs.append(FinishedRun(*observe_run(run_dir)))
        except DataError as error:
            refused.append((str(run_dir), error.because))
    if not runs and not refused:
        raise DataError(f"there is no run under {folder}", "no folder in it has a journal", "a folder such as runs/")
    return score_runs(str(folder), runs, refused)


def _fit(files: list[Path], out: Path, as_json: bool) -> int:
    """Fit the constants on the files and write them."""
    from paceline.backtest.fit import fit

    found = fit(files)
    try:
        out.write_text(found.text(), "utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {out}", str(error), "a folder that exists and is yours") from error
    for line in [*found.lines(), f"written to {out}"]:
        say_to(as_json)(line)
    if as_json:
        print_json(found.constants)
    return 0
