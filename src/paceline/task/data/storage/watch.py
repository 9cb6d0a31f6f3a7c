"""Watch: that a mapped file is still the one that was opened.

A read of a mapped page that the file has no longer ends the process by SIGBUS, and one of a page that was written since
gives other data. So the file's state is asked for before each batch is read from it: a call of about 2 microseconds.
What is left is a file that is cut while these very microseconds pass.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from paceline.errors import DataError

RESTART = "let files stay as they are while a run reads them; started again, the run reads what is there then"


class State(NamedTuple):
    """What says of a local file that nobody has changed it."""

    device: int
    inode: int
    size: int
    changed_ns: int


class WatchedFile:
    """The state of a file as it was when the watch began."""

    __slots__ = ("name", "size", "state")

    def __init__(self, name: str, state: State | None = None) -> None:
        """Begin to watch a local file, as it is now or as it was in `state`. Raises OSError where it is not there."""
        self.name = name
        self.state = state_of(os.stat(name)) if state is None else state  # noqa: PTH116 (a Path costs more than the call)
        self.size = self.state.size

    def hold(self, start: int = 0, stop: int = 0) -> None:
        """Raise DataError where the file is no longer the one that was opened. The bytes start..stop are wanted."""
        try:
            found = os.stat(self.name)  # noqa: PTH116
        except OSError as error:
            raise self._gone(error) from error
        if found.st_mtime_ns != self.state.changed_ns or state_of(found) != self.state:
            raise self._changed(state_of(found), start, stop)

    def _changed(self, found: State, start: int, stop: int) -> DataError:
        wanted = f"; its bytes {start:,} to {stop:,} were to be read" if stop else ""
        if found[:2] != self.state[:2]:
            return DataError(
                f"'{self.name}' was replaced while it was read", f"another file has taken its name{wanted}", RESTART
            )
        if found.size < self.size:
            because = f"it had {self.size:,} bytes when it was opened, and has {found.size:,}{wanted}"
            return DataError(f"'{self.name}' was cut while it was read", because, RESTART)
        grown = found.size != self.size
        because = f"it had {self.size:,} bytes, and has {found.size:,}" if grown else "it was written to"
        seconds = (found.changed_ns - self.state.changed_ns) / 1e9
        return DataError(
            f"'{self.name}' changed while it was read",
            f"{because}, and its last change is {seconds:+,.3f} s from the one when it was opened{wanted}", RESTART,
        )  # fmt: skip

    def _gone(self, error: OSError) -> DataError:
        because = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        return DataError(f"'{self.name}' went away while it was read", because, RESTART)


def state_of(found: os.stat_result) -> State:
    """Return the state that the system tells."""
    return State(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
