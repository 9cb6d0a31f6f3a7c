"""What `paceline backtest` scores: tables of measurements, and folders with runs of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from paceline.backtest.backtest import Backtest, FileResult, run_backtest
from paceline.backtest.runs import FinishedRun, score_runs
from paceline.errors import DataError
from paceline.plan.learn.observe import observe_run
from paceline.spec.run_files import runs_under


def backtest_of(files: Sequence[Path]) -> Backtest:
    """Return the backtest of tables, and after them of folders. Raises DataError for what is neither."""
    folders = [path for path in files if path.is_dir()]
    tables = run_backtest([path for path in files if not path.is_dir()])
    return dataclasses.replace(tables, files=(*tables.files, *(own_runs(folder) for folder in folders)))


def own_runs(folder: Path) -> FileResult:
    """Return the scores of the runs under a folder. Raises DataError where there are none."""
    runs, refused = [], []
    for run_dir in runs_under(folder):
        try:
            runs.append(FinishedRun(*observe_run(run_dir)))
        except DataError as error:
            refused.append((str(run_dir), error.because))
    if not runs and not refused:
        raise DataError(f"there is no run under {folder}", "no folder in it has a journal", "a folder such as runs/")
    return score_runs(str(folder), runs, refused)
