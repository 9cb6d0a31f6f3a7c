"""Files: what a simulation or a timeline leaves behind, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import StorageError


def write_text(path: Path, text: str) -> None:
    """Write a file, replacing one that is there. Raises StorageError (exit code 74) where it cannot be written."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        because = error.strerror or str(error)
        raise StorageError(f"{path} cannot be written", because, "a path in a folder that is there") from error
