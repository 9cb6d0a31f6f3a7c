"""Lines at the end of a file that one process writes: a line is one write, and begins below a line that was cut."""

from __future__ import annotations

import os
from pathlib import Path


def append_line(path: Path, line: bytes, mode: int = 0o600) -> None:
    """Append a line, of which this process is the one writer, in one write. Raises OSError.

    Where the last line was cut short by the end of an earlier writer, the new one begins below it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[os.write(file, line) :]
    finally:
        os.close(file)
