"""A script that ends with an error of ours, before any run was begun, ends with the exit code of the command line."""

from __future__ import annotations

import builtins
import contextlib
import io
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from paceline.errors import PacelineError


class EndsWithCode:
    """Shows an error as the hook before it does; of a PacelineError the process ends with its exit code."""

    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(self._before, kind, error, trace)
        if isinstance(error, PacelineError):
            raise SystemExit(error.exit_code)


def show(
    before: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Have a hook show an error on the process's stderr, though the hook around this one keeps what is written.

    torch's hook of a process group does so until the hook before it returns, which one does not that ends the process.
    """
    own = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else None
    with contextlib.redirect_stderr(own or sys.stderr):
        before(kind, error, trace)


def own_place(error: BaseException) -> str:
    """Return "metrics.py:10", the line of the user's own code that raised an error; "" where it is in ours.

    What a library raises is of whoever called it.
    """
    ours, python = Path(__file__).parent, [Path(sysconfig.get_paths()[kind]) for kind in ("stdlib", "platstdlib")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(ours):
            return ""
        installed = {"site-packages", "dist-packages"} & set(file.parts) or any(map(file.is_relative_to, python))
        if not installed and file.is_file():
            return f"{file.name}:{frame.lineno}"
    return ""


def is_prompt() -> bool:
    """Return whether this is a prompt or a notebook, where an error does not end the process."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "__IPYTHON__")


def is_notebook() -> bool:
    """Return whether what this process prints is shown in a notebook: by a kernel of IPython, and no terminal."""
    shell = getattr(builtins, "get_ipython", None)
    return getattr(shell() if callable(shell) else None, "kernel", None) is not None


def end_with_code() -> None:
    """Have an error of ours that nobody catches end a script with its exit code. At a prompt nothing is changed."""
    if sys.excepthook is sys.__excepthook__ and not is_prompt():
        sys.excepthook = EndsWithCode(sys.excepthook)
