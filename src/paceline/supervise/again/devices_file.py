"""The file that says how many devices are there, read in a thread: a disk that hangs holds up nobody who asks."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path


class DevicesFile:
    """Reads the number in a file again and again; what it said last counts while its disk does not answer."""

    def __init__(self, path: str) -> None:
        """An empty `path` is no file."""
        self._path = path
        self._said: int | None = None
        self._reader: threading.Thread | None = None

    def __bool__(self) -> bool:
        """Return whether there is a file to read."""
        return bool(self._path)

    def read(self, seconds: float) -> int | None:
        """Return the number, and wait for the disk for so long; None where there is no file, or it never said one.

        What is no number is being written, by whatever empties a file first: the last one counts.
        """
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read, name="paceline-devices", daemon=True)
            self._reader.start()
        self._reader.join(seconds)
        return self._said

    def _read(self) -> None:
        try:
            text = Path(self._path).read_text()
        except OSError:
            self._said = None
            return
        with contextlib.suppress(ValueError):
            self._said = int(text)
