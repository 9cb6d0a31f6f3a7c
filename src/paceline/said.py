"""Lines on standard output, which may be kept on the very disk that is full: that costs the lines and not the run."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import textwrap
import warnings
import weakref
from collections.abc import Callable
from typing import TextIO

# What a disk answers that takes no more, or has gone. A reader that left (EPIPE) is another matter.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)


# Streams whose last line may be printed over, and how long it is.
_OPEN: weakref.WeakKeyDictionary[TextIO, int] = weakref.WeakKeyDictionary()


TERMINAL_VARIABLE = "PACELINE_TERMINAL"  # set for ranks whose standard output a supervisor shows on a terminal


def is_shown(stream: TextIO) -> bool:
    """Return whether a stream is shown on a terminal, through a supervisor too."""
    return _is_terminal(stream) or (stream is sys.stdout and TERMINAL_VARIABLE in os.environ)


def _is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal: one of a script's own may have `write` and `flush`, and nothing else."""
    return bool(getattr(stream, "isatty", bool)())


def one_line(text: str) -> str:
    """Return a text of somebody else's as one line that no terminal obeys: what cannot be printed is spelt out."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


COMMAND = "paceline "  # what a line of a command begins with
LEAST_COLUMNS = 40  # of a terminal: in fewer there is no room beside a line's first word
_FIRST_WORD = re.compile(r" *(?:\w+ {2,})?")  # `plan     `, `  because  `, or the blanks of what stands below one


def folded(text: str, stream: TextIO, hanging: int | None = None) -> str:
    """Return a line folded between words, below its first word, to the width of the terminal that a stream is.

    What goes to a file or a pipe stays one line, as whoever searches it wants it, and so does a command to be copied.
    `hanging` columns are left free below instead of those of the first word.
    """
    columns = _columns(stream)
    if columns < LEAST_COLUMNS or len(text) <= columns or "\n" in text:
        return text
    first = _FIRST_WORD.match(text)
    head = first[0] if first is not None else ""
    if text[len(head) :].startswith(COMMAND) or text.lstrip().startswith(COMMAND):
        return text
    indent = len(head) if hanging is None else hanging
    below = " " * (indent if indent <= columns // 3 else 2)
    lines = textwrap.wrap(text, columns, subsequent_indent=below, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines)


def each_folded(text: str, stream: TextIO) -> str:
    """Return a text with each of its lines folded, as an error's: what happened, because of what, what to try."""
    return "\n".join(folded(line, stream) for line in text.split("\n"))


def _columns(stream: TextIO) -> int:
    """Return how wide the terminal is that a stream is; 0 where it is none, or does not say."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns if _is_terminal(stream) else 0
    return 0


def say_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line at once. Where a disk does not take it, it is tried again with the next one."""
    stream = stream or sys.stdout
    if stream is not None:  # as where it was closed before the process began
        text = folded(text, stream)
        _print(f"\n{text}" if _OPEN.pop(stream, None) is not None else text, stream, "\n")


def say_over(text: str, stream: TextIO | None = None) -> None:
    """Print a line that the next such one is printed over: where text is shown that may change, as in a notebook."""
    stream = stream or sys.stdout
    if stream is None:
        return
    before = _OPEN.get(stream)
    _OPEN[stream] = len(text)
    _print(text if before is None else f"\r{text:<{before}}", stream, "")


def end_line(stream: TextIO | None = None) -> None:
    """End the line that might have been printed over, where there is one."""
    stream = stream or sys.stdout
    if stream is not None and _OPEN.pop(stream, None) is not None:
        _print("", stream, "\n")


class OwnWarning(UserWarning):
    """A warning of ours: a line in processes of our own, and Python's warning in a program of the user's."""


def say_own_warnings() -> None:
    """Have this process say warnings of ours as folded lines on stderr, each once, and not as lines of our source."""
    before, said = warnings.showwarning, set[str]()

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        if not issubclass(category, OwnWarning):
            before(message, category, filename, lineno, file, line)
        elif str(message) not in said:
            said.add(str(message))
            say_line(f"note     {message}", file or sys.stderr)

    warnings.showwarning = show


_rescue: Callable[[], bool] = bool  # of no argument: False


def rescue_by(lead_elsewhere: Callable[[], bool]) -> None:
    """Have a function called where a reader has left; where output goes elsewhere then, it is no error."""
    global _rescue
    _rescue = lead_elsewhere


def _is_told(error: OSError) -> bool:
    """Return whether an error of printing is to be raised."""
    return error.errno not in DISK and not (error.errno == errno.EPIPE and _rescue())


def _print(text: str, stream: TextIO, end: str) -> None:
    try:
        print(text, file=stream, end=end, flush=True)
    except OSError as error:
        if _is_told(error):
            raise


def flush_said() -> None:
    """Print what waits, for a process that ends; what a disk does not take is lost, and is no error."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            if _is_told(error):
                raise
            with contextlib.suppress(OSError, ValueError):  # a stream without a file behind it
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
