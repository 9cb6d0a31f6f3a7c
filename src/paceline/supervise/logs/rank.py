"""A rank's end of its log: standard output and error lead into pipes with names, which the supervisor reads.

What a rank has written stays in the pipe when it is killed, and children of the rank write there too.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from paceline.said import flush_said, rescue_by
from paceline.supervise.logs.files import ERR, OUT

LOGS_VARIABLE = "PACELINE_LOGS"  # the folder of the pipes, set by a supervisor that keeps logs
STREAMS = {OUT: 1, ERR: 2}


def pipe_path(folder: Path, rank: int, stream: str) -> Path:
    """Return the pipe of one of a rank's streams."""
    return folder / f"rank-{rank}.{stream}"


def into_log() -> None:
    """Have this process's output go into its rank's pipes, where a supervisor reads them.

    Where it does not, output goes where it went. A process that takes another rank's place calls it again.
    """
    folder = os.environ.get(LOGS_VARIABLE)
    if not folder:
        return
    flush_said()
    rescue_by(let_go)
    rank = int(os.environ.get("RANK", "0"))
    for stream, number in STREAMS.items():
        try:
            end = os.open(pipe_path(Path(folder), rank, stream), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads it, or there is none for this rank
            continue
        os.set_blocking(end, True)
        os.dup2(end, number)
        os.close(end)
    for named in (sys.stdout, sys.stderr):
        reconfigure = getattr(named, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)  # as on a terminal: a log is looked at while it grows


def let_go() -> bool:
    """Lead output nowhere where the supervisor that read it has died; return whether it has.

    The rank saves and ends then, and what it prints on the way must not end it sooner. A supervisor that nobody reads
    any more lets go of a pipe too, but removes it first: there the rank is to hear of it.
    """
    folder, gone = os.environ.get(LOGS_VARIABLE), False
    rank = int(os.environ.get("RANK", "0"))
    for stream, number in STREAMS.items() if folder else ():
        if pipe_path(Path(str(folder)), rank, stream).exists() and _has_no_reader(number):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
            gone = True
    return gone


def _has_no_reader(number: int) -> bool:
    looked = select.poll()
    looked.register(number, 0)
    return any(event & select.POLLERR for _, event in looked.poll(0))


@contextlib.contextmanager
def opened(place: Mapping[str, str]) -> Iterator[dict[str, IO[bytes]]]:
    """Open the pipes of a rank that is to be started as a process: `stdout` and `stderr`, as far as there are any."""
    with contextlib.ExitStack() as closing:
        found: dict[str, IO[bytes]] = {}
        folder = place.get(LOGS_VARIABLE)
        for name, stream in (("stdout", OUT), ("stderr", ERR)) if folder else ():
            path = pipe_path(Path(str(folder)), int(place["RANK"]), stream)
            with contextlib.suppress(OSError):  # nobody reads it any more
                end = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.set_blocking(end, True)
                found[name] = closing.enter_context(os.fdopen(end, "wb", buffering=0))
        yield found
