"""The end of a run, as whoever started its ranks tells it: in the journal what no rank could write, and the report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError, StorageError
from paceline.lock import RunLock
from paceline.spec.journal.redact import Redactor
from paceline.supervise.again.mark_journal import mark_end
from paceline.supervise.blame import Outcome

Say = Callable[[str], None]


def close_run(outcome: Outcome, lock: RunLock, redactor: Redactor, say: Say) -> None:
    """Write into the journal how the run has ended where its ranks could not, and the report.

    Nothing is written where the lock is lost: another run has the directory then.
    """
    if lock.is_lost:
        return
    if outcome.error is not None:
        try:
            mark_end(lock.run_dir, outcome.exit_code, outcome.error, redactor)
        except OSError as error:  # the disk may be full: what ended the run is told all the same
            say(f"journal  how the run ended could not be added: {error}")
    say_report(lock.run_dir, say)


def say_report(run_dir: Path, say: Say) -> None:
    """Write the report and say what is in it, also where the disk does not take its page.

    A run that failed before its first record has nothing to report.
    """
    try:  # only now: nothing of it is in memory while a run trains
        from paceline.report.build import build_report, report_lines, write_report
    except ImportError as error:  # another version was installed meanwhile
        say(f"report   not made: {error}; try: paceline report {run_dir}")
        return
    with contextlib.suppress(StorageError, ConfigError):
        summary, unwritten = build_report(run_dir), ""
        try:
            write_report(run_dir, summary)
        except StorageError as error:
            unwritten = f"{error.what}: {error.because}"
        for line in report_lines(summary, told=True, unwritten=unwritten):
            say(line)
