"""A run directory's report: its summary, the HTML file and the closing lines for the console."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from paceline.account.advice.advise import advice_line
from paceline.errors import ConfigError, StorageError
from paceline.history.goodput import goodput_text
from paceline.report.compare import ENERGY, MEMORY, STEP_TIME
from paceline.report.format import signed_percent
from paceline.report.html import render_html
from paceline.report.summary import Summary, summarise
from paceline.spec.journal.reading import node_files, read_journal, read_nodes, starts_of
from paceline.spec.run_files import journal_folder
from paceline.verdict.verdict import COMPUTE

FILE = "report.html"


def build_report(run_dir: Path) -> Summary:
    """Return the summary of the run in `run_dir`.

    Raises ConfigError where the directory is not a run's, StorageError where its journal is empty or unreadable.
    """
    run_dir = Path(run_dir)
    folder = journal_folder(run_dir)
    if not folder.is_dir():
        because = f"it has no folder '{folder.name}'" if run_dir.is_dir() else "there is no such folder"
        raise ConfigError(f"{run_dir} is not a run's directory", because, "name the folder that `paceline train` wrote")
    try:
        nodes = list(read_nodes(run_dir)) if node_files(run_dir) else ()
        summary = summarise(read_journal(run_dir), str(run_dir), nodes)
    except OSError as error:
        raise StorageError(
            f"cannot read the journal in {folder}", str(error), "check the folder's permissions"
        ) from error
    if not summary.attempts:
        raise StorageError(
            f"the journal in {folder} is empty", "no complete record was written before the run ended", "start it again"
        )
    return summary


def write_report(run_dir: Path, summary: Summary | None = None) -> Path:
    """Write RUN/report.html whole or not at all, and return its path. Raises as build_report, and StorageError.

    A `summary` of the run that is there already is not made again: of a long run that takes a while.
    """
    run_dir = Path(run_dir)
    page = render_html(build_report(run_dir) if summary is None else summary)
    target = run_dir / FILE
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", errors="replace", dir=run_dir, prefix=".report-", suffix=".html", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(_mode(run_dir))
        temporary.replace(target)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise StorageError(
            f"cannot write {target}", str(error), "free space or check the folder's permissions"
        ) from error
    return target


def _mode(run_dir: Path) -> int:
    """Return who may read the report: whoever may read the newest start in the journal, which it repeats."""
    return stat.S_IMODE(starts_of(run_dir)[-1][1].stat().st_mode) & 0o644


def report_lines(summary: Summary, told: bool = False, unwritten: str = "") -> list[str]:
    """Return the closing lines of a run: where the report is, forecast against measured in percent, the verdict.

    `told` says that whoever reads them has just watched the run: what was said of its health meanwhile is left out.
    `unwritten` is why there is no page, "" where it is there.
    """
    compared = [
        f"{word} {signed_percent(promise.error, digits)}"
        for word, kind, digits in (("time", STEP_TIME, 1), ("memory", MEMORY, 1), ("energy", ENERGY, 0))
        if (promise := summary.promise(kind)).error is not None
    ]
    against = f"      forecast vs measured: {'  '.join(compared)}" if compared else ""
    lines = [f"report   {unwritten or Path(summary.run_dir) / FILE}{against}"]
    if summary.bound:
        advice = f"; try: {summary.bound.advice}" if summary.bound.kind != COMPUTE else ""
        advice += f" ({summary.bound.promise})" if advice and summary.bound.promise else ""
        lines.append(f"verdict  {summary.bound.text}{advice}")
    if summary.nodes_sensed:
        lines.append(f"seen     {summary.nodes}")
    lines += [f"health   {line}" for line in summary.health if not told]
    proof = summary.verification
    if proof and proof.get("verdict") == "ill-conditioned":
        lines.append(f"verify   {proof['text']}")
    if summary.goodput.faults or summary.goodput.restarts or summary.goodput.lost_seconds:
        lines.append(f"goodput  {goodput_text(summary.goodput)}")
    said = summary.bound.advice if summary.bound and summary.bound.kind != COMPUTE else ""
    lines += [f"advice   {advice_line(advice, said)}" for advice in summary.advice[:1]]
    lines += [f"budget   {left.text}" for left in summary.budgets]
    if summary.error:
        lines.append(f"failed   {summary.error['what']}")
    return lines
