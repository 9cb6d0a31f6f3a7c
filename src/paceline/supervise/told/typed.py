"""The command that started a run, as somebody would type it again."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = "paceline"
NO_FILES = ("", "-c", "-m")  # what Python calls a prompt, a line of code, and a module that is not found yet
KERNEL = "kernel_launcher"  # what the programs end with that run a notebook's cells


def typed_command() -> tuple[str, ...]:
    """Return the words of this process's command line, such as ("paceline", "train", "a.toml").

    A prompt, a line of code and a notebook have none.

    A process that the run starts for itself has a command line that nobody types: it is told this one.
    """
    first, *rest = sys.argv or [""]
    path = Path(first)
    if path.name == "__main__.py" and path.parent.name == PACKAGE:
        return ("python", "-m", PACKAGE, *rest)
    if path.name == PACKAGE:
        return (PACKAGE, *rest)
    if first in NO_FILES or path.stem.endswith(KERNEL):
        return ()
    return ("python", first, *rest) if path.suffix == ".py" else (first, *rest)
