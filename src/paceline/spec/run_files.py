"""Where a run's directory keeps what others look for in it: the journal, and the checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """Return the runs whose directories lie in a folder, by name. A link to another of them, as `latest`, is none."""
    return distinct(sorted(each.parent for each in folder.glob(f"*/{_JOURNAL}")))


def distinct(runs: Iterable[Path]) -> list[Path]:
    """Return runs' directories, each once by whatever names it has: the first that is no link, else the first."""
    listed = list(runs)
    known: dict[Path, Path] = {}
    for own in (*(each for each in listed if not each.is_symlink()), *listed):
        known.setdefault(own.resolve(), own)
    kept = set(known.values())
    return [own for own in dict.fromkeys(listed) if own in kept]


def called(runs: Sequence[Path]) -> list[str]:
    """Return what runs are called beside each other: their directories' names, or paths where some share a name."""
    names = [each.resolve().name for each in runs]
    return names if len(set(names)) == len(names) else [str(each) for each in runs]


def runs_at(folder: Path) -> list[Path]:
    """Return the run that a folder is, else the runs inside of the folder."""
    return [folder] if is_run(folder) else runs_inside(folder)


def runs_under(folder: Path) -> list[Path]:
    """Return the run that a folder is, else all runs at any depth below it, by name."""
    if is_run(folder):
        return [folder]
    return sorted(each.parent for each in folder.glob(f"**/{_JOURNAL}") if each.is_dir())
