"""The page as one file without a script: what it shows at this moment, to be kept or sent."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.durable import publish
from paceline.errors import ConfigError, StorageError
from paceline.observe.compare.page import compare_html
from paceline.observe.compare.runs import MOST_RUNS, compare_runs
from paceline.observe.dash.page import run_body, static
from paceline.observe.dash.page_parts import PARTS, RunView
from paceline.observe.dash.watched import RunSet
from paceline.observe.live.run import LiveRun
from paceline.observe.live.shared_spending import SharedSpending
from paceline.report.format import utc


def export_page(paths: Sequence[Path], out: Path) -> int:
    """Write the page of one run, or of several beside each other, whole or not at all; return how many they are.

    Raises ConfigError where there is no run, or more than can be shown, and StorageError where it cannot be written.
    """
    runs = RunSet(paths).scan()
    if not runs:
        raise ConfigError("no run to show", f"there is none in {', '.join(map(str, paths))}", "name runs' directories")
    now = time.time()
    made = f"Made at {utc(now)} from the journals of {', '.join(str(path) for path in runs.values())}."
    if len(runs) == 1:
        live = LiveRun(next(iter(runs.values())))
        live.refresh()
        view = RunView(live, now, others=SharedSpending(live).of)
        body = run_body(live.name, {name: part(view) for name, (_, part) in PARTS.items()})
        page = static(live.name, body, made, wide=True)
    elif len(runs) > MOST_RUNS:
        raise ConfigError(f"{len(runs)} runs on one page", f"it shows {MOST_RUNS} at most", "name the ones to compare")
    else:
        page = static("Compared", compare_html(compare_runs(list(runs.values()))), made)
    write_page(out, page)
    return len(runs)


def write_page(out: Path, page: str) -> None:
    """Write a page, whole or not at all. Raises StorageError."""
    try:
        unfinished = out.with_name(f".{out.name}.{os.getpid()}")
        unfinished.write_text(page, encoding="utf-8", errors="replace")
        publish(unfinished, out)
    except OSError as error:
        raise StorageError(f"cannot write {out}", str(error), "free space, or name another file") from error
