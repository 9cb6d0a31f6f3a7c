"""What `paceline trace` does: ask a running job for a trace, wait for it, and say what is in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError, DataError
from paceline.lock import is_live
from paceline.observe.traces.summary import TraceSummary, summarise_trace
from paceline.observe.traces.trace_spans import read_trace
from paceline.patience import Patience
from paceline.spec.journal.kinds import RunStarted
from paceline.spec.journal.reading import read_kind, read_tail_step
from paceline.spec.run_files import is_run
from paceline.spec.watch.traced import (
    FOLDER,
    TraceRequest,
    ask_for_trace,
    requested_trace,
    trace_file,
    trace_files,
    trace_under_way,
)

LOOK_SECONDS = 0.2


def take_trace(run_dir: Path, request: TraceRequest, limit_seconds: float, say: Callable[[str], None]) -> Path | None:
    """Ask a job for a trace, wait until the files of all ranks asked are there, and return their folder.

    None where `limit_seconds` is 0: nobody waits then. Raises ConfigError where no run is live or the steps are over,
    DataError where the run has ended first, or takes longer.
    """
    if not is_run(run_dir):
        raise ConfigError(f"{run_dir} is no run's directory", "it has no journal", "the run.dir of a job that trains")
    if not is_live(run_dir):
        raise ConfigError(
            f"nothing trains in {run_dir}", "its lock is held by no process that lives",
            "paceline trace RUN --summary, for traces that were taken",
        )  # fmt: skip
    done = read_tail_step(run_dir)
    if request.first is not None and request.last <= done:
        raise ConfigError(f"steps {request.first} to {request.last} are over", f"the run has made {done}",
                          f"--steps {done + 20}..{done + 22}, or --steps 3 for the next ones")  # fmt: skip
    _let_pass(run_dir, Patience(limit_seconds), say)
    asked = ask_for_trace(run_dir, request)
    if limit_seconds <= 0:
        return None
    return _awaited(run_dir, asked, limit_seconds, say)


def _let_pass(run_dir: Path, patience: Patience, say: Callable[[str], None]) -> None:
    """Wait until a trace that somebody else has asked for is taken. Raises DataError where it takes too long."""
    was_told = False
    while (other := trace_under_way(run_dir)) is not None and is_live(run_dir):
        if patience.is_over:
            raise DataError(f"the trace was not asked for: {other.text} is under way", "one is taken at a time",
                            "ask again when it is there")  # fmt: skip
        if not was_told:
            say(f"trace    {other.text} comes first, which was asked for by {other.by}")
        was_told = True
        time.sleep(LOOK_SECONDS)


def _awaited(run_dir: Path, asked: TraceRequest, limit_seconds: float, say: Callable[[str], None]) -> Path:
    patience, named = Patience(limit_seconds), asked.first is not None
    while not patience.is_over:
        now = requested_trace(run_dir)
        if now is None or now.number != asked.number:
            raise DataError("the trace was not taken", "somebody else asked for another one meanwhile", "ask again")
        if now.first is not None:
            if not named:
                say(f"trace    steps {now.first} to {now.last}")
            named, folder = True, now.folder(run_dir)
            if all(trace_file(folder, rank).exists() for rank in ranks_asked(run_dir, now)):
                return folder
        if not is_live(run_dir):
            raise DataError("the trace was not taken", "the run has ended first", "start it again")
        time.sleep(LOOK_SECONDS)
    raise DataError("the trace is not there yet", f"it has been waited for {limit_seconds:g} s",
                    "paceline trace RUN --summary, when the steps are made")  # fmt: skip


def ranks_asked(run_dir: Path, request: TraceRequest) -> list[int]:
    """Return the ranks of a run that a request is for."""
    starts = list(read_kind(run_dir, RunStarted))
    world = starts[-1].world_size or 1 if starts else 1
    return [rank for rank in range(world) if request.is_of(rank)]


def trace_folders(run_dir: Path) -> list[Path]:
    """Return the folders of traces that a run has, the newest last."""
    found = [path for path in (run_dir / FOLDER).glob("steps-*") if trace_files(path)]
    return sorted(found, key=lambda path: path.stat().st_mtime)


def summaries(run_dir: Path, folder: Path | None = None) -> list[TraceSummary]:
    """Return what the traces of a folder tell, rank by rank; of the newest folder where none is given.

    Raises DataError where there is none, or no step in it.
    """
    folders = [folder] if folder is not None else trace_folders(run_dir)
    if not folders:
        raise DataError(f"{run_dir} has no trace", "nobody has asked for one", "paceline trace RUN --steps 3")
    starts = list(read_kind(run_dir, RunStarted))
    terms = starts[-1].forecast.get("time") or () if starts else ()
    files = trace_files(folders[-1])
    found = [told for path in files if (told := summarise_trace(read_trace(path), path, terms)) is not None]
    if not found:
        raise DataError(f"{folders[-1]} has no step", "the run ended before a step was traced", "ask again")
    return found
