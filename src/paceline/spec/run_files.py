"""Where a run's directory keeps what others look for in it: the journal, and the checkpoints."""

from __future__ import annotations

from pathlib import Path

_JOURNAL, _CHECKPOINTS = "journal", "checkpoints"


def journal_folder(run_dir: Path) -> Path:
    """Return the folder of a run's journal: a file for each start, and files beside them."""
    return run_dir / _JOURNAL


def checkpoints_folder(run_dir: Path) -> Path:
    """Return the folder that holds a run's checkpoints."""
    return run_dir / _CHECKPOINTS


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's directory, which has a journal."""
    return journal_folder(folder).is_dir()


def runs_inside(folder: Path) -> list[Path]:
    """Return the runs whose directories lie in a folder, by name."""
    return sorted(each.parent for each in folder.glob(f"*/{_JOURNAL}"))


def runs_at(folder: Path) -> list[Path]:
    """Return the run that a folder is, else the runs inside of the folder."""
    return [folder] if is_run(folder) else runs_inside(folder)


def runs_under(folder: Path) -> list[Path]:
    """Return the run that a folder is, else all runs at any depth below it, by name."""
    if is_run(folder):
        return [folder]
    return sorted(each.parent for each in folder.glob(f"**/{_JOURNAL}") if each.is_dir())
