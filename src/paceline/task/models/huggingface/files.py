"""The files that an index of weights names: inside the index's own folder, wherever the index came from."""

from __future__ import annotations

from pathlib import Path, PurePath

from paceline.errors import StorageError


def file_inside(folder: Path, name: str) -> Path:
    """Return the path of a file that `folder`'s index names. Raises StorageError where it leaves the folder.

    An index is downloaded with its weights, so a name may be anybody's: neither an absolute path, nor "..", nor a link
    leads out. Links of the Hugging Face cache are followed: they lead from a snapshot to the blobs beside it.
    """
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise _leaves(folder, name, "a file of an index lies beside it or below")
    home, real = folder.resolve(), _resolved(folder, name)
    if not real.is_relative_to(home) and real.parent not in _blobs_of(home):
        raise _leaves(folder, name, f"it is a link to {real}")
    return folder / name


def _resolved(folder: Path, name: str) -> Path:
    try:
        return (folder / name).resolve()
    except (OSError, RuntimeError) as error:  # links in a circle: which of the two depends on Python's version
        raise _leaves(folder, name, str(error)) from error


def _blobs_of(home: Path) -> list[Path]:
    """Return where the files of a snapshot of the Hugging Face cache are kept, for a folder that is one."""
    return [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]


def _leaves(folder: Path, name: str, because: str) -> StorageError:
    return StorageError(
        f"the index of {folder} names a file outside of the folder: '{name}'", because,
        "a folder with the files themselves, from a source that you trust",
    )  # fmt: skip
