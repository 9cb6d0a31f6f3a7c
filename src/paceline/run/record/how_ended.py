"""How a process ended, as the journal and the supervisor are told: an error as plain data, and whose error it is."""

from __future__ import annotations

import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.foreign_errors import is_of_gloo, is_of_left_group
from paceline.run.survive.listener import was_aborted


def describe(error: BaseException | None) -> tuple[dict[str, object], int]:
    """Return an error as plain data and the exit code that goes with it."""
    if error is None:
        return {}, 0
    if isinstance(error, KeyboardInterrupt):
        again = "start the same command again: it resumes from the last checkpoint"
        return {"error": "KeyboardInterrupt", "what": "interrupted", "because": "Ctrl-C", "try": again}, 130
    code = int(getattr(error, "exit_code", 1))
    if isinstance(error, PacelineError):
        return error.as_dict(), code
    return {"error": type(error).__name__, "what": f"{type(error).__name__}: {error}", "because": "", "try": ""}, code


def is_echo(error: BaseException | None) -> bool:
    """Return whether the error only says that a peer has gone, or that this process has left its world."""
    if isinstance(error, Exception) and not isinstance(error, PacelineError) and was_aborted():
        return True
    return error is not None and (isinstance(error, dist.DistError) or is_of_gloo(error) or is_of_left_group(error))
