"""Lines on standard output, which may be kept on the very disk that is full: that costs the lines and not the run."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TextIO

# What a disk answers that takes no more, or has gone. A reader that left (EPIPE) is another matter.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)


def say_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line at once. Where a disk does not take it, it is tried again with the next one."""
    try:
        print(text, file=stream or sys.stdout, flush=True)
    except OSError as error:
        if error.errno not in DISK:
            raise


def flush_said() -> None:
    """Print what waits, for a process that ends; what a disk does not take is lost, and is no error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if error.errno not in DISK:
                raise
            with contextlib.suppress(OSError, ValueError):  # a stream without a file behind it
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
