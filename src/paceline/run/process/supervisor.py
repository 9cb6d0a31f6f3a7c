"""The supervisor: starts the processes of a run on this machine, passes signals on and says how they ended.

It never imports torch. Ranks find each other through a file, so there is no port that two runs could fight over.
When one rank ends badly, its peers are given a moment to end themselves and are then killed: nothing hangs.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.errors import PacelineError, Requeue, WorkerDied
from paceline.patience import Patience
from paceline.run.process.parent import PARENT_VARIABLE
from paceline.run.process.signals import forward_signals

GRACE_SECONDS = 15.0
POLL_SECONDS = 0.05
ERROR_FOLDER = "PACELINE_ERRORS"


@dataclass(frozen=True)
class Outcome:
    """How a group of processes ended: the exit code for the caller, and what to say about it."""

    exit_code: int
    error: dict[str, object] | None = None


class Process(Protocol):
    """What a supervisor asks of a process: a `subprocess.Popen`, or one that was forked."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


def supervise(command: Sequence[str], ranks: int, environ: dict[str, str], limit_seconds: float = math.inf) -> Outcome:
    """Run `command` once per rank and return how they ended. After `limit_seconds` they are killed.

    Each process gets RANK, LOCAL_RANK, WORLD_SIZE and a rendezvous; SIGTERM, SIGINT and SIGUSR1 are passed on to all.
    """

    def start(place: dict[str, str]) -> Process:
        # Own process group: Ctrl-C reaches the ranks once, through us.
        return subprocess.Popen(list(command), env={**environ, **place}, process_group=0)

    return supervise_started(start, ranks, environ, limit_seconds)


def supervise_started(
    start: Callable[[dict[str, str]], Process], ranks: int, environ: Mapping[str, str], limit_seconds: float = math.inf
) -> Outcome:
    """Start one process per rank, `start(what its environment has besides)`, and return how they ended."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        shared = {
            "WORLD_SIZE": str(ranks),
            "PACELINE_RENDEZVOUS": f"file://{folder}/rendezvous",
            ERROR_FOLDER: folder,
            PARENT_VARIABLE: str(os.getpid()),
            "GLOO_SOCKET_IFNAME": environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        processes: list[Process] = []

        def send(number: int) -> None:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(number)

        flag = forward_signals(send)
        try:
            for rank in range(ranks):
                processes.append(start({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
            if not _wait(processes, Patience(limit_seconds)):
                because = f"{ranks} process(es) ran for more than {limit_seconds:.0f} s and were killed"
                return Outcome(1, PacelineError("it took too long", because, "try on an idle machine").as_dict())
            return _outcome(processes, Path(folder))
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
            flag.release()


def _wait(processes: Sequence[Process], limit: Patience) -> bool:
    """Return when all processes have ended, by themselves or, after a peer's failure, by force.

    The result is False where they were still running when `limit` was over and were killed.
    """
    grace = None
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() not in (None, 0) for process in processes)
        if failed and grace is None:
            grace = Patience(GRACE_SECONDS)
        if grace is not None and grace.is_over:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        if limit.is_over:
            for process in processes:
                process.kill()
                process.wait()
            return False
        time.sleep(POLL_SECONDS)  # a wait for several processes at once, not a synchronisation
    return True


def _outcome(processes: Sequence[Process], folder: Path) -> Outcome:
    """Return the ending that explains the others: a rank's own error, then a signal, then any other code."""
    codes = [process.returncode or 0 for process in processes]
    if not any(codes):
        return Outcome(0)
    written = sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    errors = [json.loads(path.read_text()) for path in written]
    told = next((error for error in errors if error.get("cause")), None)
    killed = [(rank, -code) for rank, code in enumerate(codes) if code < 0 and -code != signal.SIGKILL]
    killed = killed or [(rank, -code) for rank, code in enumerate(codes) if code < 0]
    if told is not None:
        return Outcome(int(told["exit_code"]), told)
    if Requeue.exit_code in codes and not killed:
        return Outcome(Requeue.exit_code)
    if killed:
        rank, number = killed[0]
        name = signal.Signals(number).name
        died = WorkerDied(
            f"rank {rank} of {len(codes)} was ended by {name}",
            "out of memory is the usual reason for SIGKILL" if number == signal.SIGKILL else "the process got a signal",
            "start the same command again: it resumes from the last checkpoint",
            exit_code=128 + number,
        )
        return Outcome(128 + number, died.as_dict())
    return Outcome(max(codes), errors[0] if errors else None)


def explain(outcome: Outcome) -> None:
    """Print the error of a group of processes to stderr, if there is one."""
    if outcome.error is not None:
        print(outcome.error.get("traceback", ""), end="", file=sys.stderr)
        print(f"error: {_as_error(outcome.error)}", file=sys.stderr)


def _as_error(details: dict[str, object]) -> PacelineError:
    what = str(details["what"])
    if "rank" in details:
        what = f"{what} (rank {details['rank']})"
    return PacelineError(what, str(details["because"]), str(details["try"]))


def is_supervised() -> bool:
    """Return whether this process was started by a supervisor."""
    return ERROR_FOLDER in os.environ


def report_error(details: dict[str, object], cause: bool) -> None:
    """Leave a rank's error where the supervisor finds it; `cause` is False for what a peer's end brought about."""
    folder = os.environ.get(ERROR_FOLDER)
    if folder:
        path = Path(folder) / f"error-{os.environ.get('RANK', '0')}.json"
        path.write_text(json.dumps({**details, "rank": int(os.environ.get("RANK", "0")), "cause": cause}))
