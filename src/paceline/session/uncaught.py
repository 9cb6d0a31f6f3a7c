"""A script whose error nobody caught ends with the error's own exit code, as the command line does.

This is Python's own place for it, `sys.excepthook`: the hook that was there still shows the error.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from paceline.errors import PacelineError
from paceline.run.record.recorder import describe, is_echo
from paceline.supervise.supervisor import is_supervised, report_error
from paceline.uncaught import is_prompt, show


class Uncaught:
    """Shows an error, or leaves it to the supervisor where there is one, and ends the process with its exit code."""

    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        details, code = describe(error)
        if is_supervised():
            if not isinstance(error, PacelineError) and not is_echo(error):
                details["traceback"] = "".join(traceback.format_exception(error))
            report_error({**details, "exit_code": code}, cause=not is_echo(error))
        else:
            show(self._before, kind, error, trace)
        raise SystemExit(code)


def end_with_own_code() -> bool:
    """Have uncaught errors end this process with their exit code; return whether that is so for the first time.

    At a prompt or in a notebook errors do not end the process, and nothing is changed.
    """
    if isinstance(sys.excepthook, Uncaught):
        return False
    if not is_prompt():
        sys.excepthook = Uncaught(sys.excepthook)
    return True
