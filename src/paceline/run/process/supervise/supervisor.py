"""The supervisor: starts the processes of a run on this machine, passes signals on and says how they ended.

It never imports torch. Ranks find each other through a file, so there is no port that two runs could fight over.
When one rank ends badly, its peers are given a moment to end themselves and are then killed, with all that they have
started: nothing hangs, and nothing is left behind.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.errors import PacelineError
from paceline.lock import RunLock
from paceline.patience import Patience
from paceline.run.process.supervise.blame import Ending, Outcome, leave_error, outcome_of
from paceline.run.process.supervise.groups import POLL_SECONDS, Process, collect, ending_of, kill_group, signal_process
from paceline.run.process.supervise.memory_kills import memory_kills
from paceline.run.process.supervise.parent import PARENT_VARIABLE
from paceline.run.process.supervise.signals import forward_signals
from paceline.run.survive.health.pulse import PULSE_FOLDER
from paceline.run.survive.health.watch import Watch
from paceline.spec.survive.health import HealthSpec

GRACE_SECONDS = 15.0
ERROR_FOLDER = "PACELINE_ERRORS"


def supervise(
    command: Sequence[str],
    ranks: int,
    environ: dict[str, str],
    limit_seconds: float = math.inf,
    lock: RunLock | None = None,
    health: HealthSpec | None = None,
) -> Outcome:
    """Run `command` once per rank and return how they ended. After `limit_seconds` they are killed.

    With `health`, ranks that hang are found and ended.

    Each process gets RANK, LOCAL_RANK, WORLD_SIZE and a rendezvous; SIGTERM, SIGINT and SIGUSR1 are passed on to all.
    Rank 0 shares the lock of the run's directory, so that it lives as long as either of the two.
    """

    def start(place: dict[str, str]) -> Process:
        keeps = lock if place["RANK"] == "0" else None
        # Own process group: Ctrl-C reaches the ranks once, through us.
        return subprocess.Popen(
            list(command), env={**environ, **place, **(keeps.for_first_rank() if keeps else {})}, process_group=0,
            pass_fds=(keeps.descriptor,) if keeps else (),
        )  # fmt: skip

    return supervise_started(start, ranks, environ, limit_seconds, health, lock.run_dir if lock else None)


def supervise_started(
    start: Callable[[dict[str, str]], Process],
    ranks: int,
    environ: Mapping[str, str],
    limit_seconds: float = math.inf,
    health: HealthSpec | None = None,
    run_dir: Path | None = None,
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
        watch = None
        if health is not None and health.hangs:
            watch = Watch(Path(folder), ranks, health, run_dir)
            shared[PULSE_FOLDER] = folder
        processes: list[Process] = []

        def send(number: int) -> None:
            for process in processes:
                signal_process(process, number)

        flag, kills = forward_signals(send), memory_kills()
        try:
            for rank in range(ranks):
                processes.append(start({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
            endings, killed = _wait(processes, Patience(limit_seconds), watch)
            if len(endings) < ranks:
                because = f"{ranks} process(es) ran for more than {limit_seconds:.0f} s and were killed"
                return Outcome(1, PacelineError("it took too long", because, "try on an idle machine").as_dict())
            return outcome_of(endings, killed, Path(folder), kills)
        finally:
            collect(processes)
            flag.release()


def _wait(processes: Sequence[Process], limit: Patience, watch: Watch | None = None) -> tuple[list[Ending], set[int]]:
    """Return how the processes ended, in order, and which of them were killed because a peer had failed before.

    Some are missing where they were still running when `limit` was over.
    """
    endings: dict[int, Ending] = {}
    killed: set[int] = set()
    grace, looked = None, time.time()
    while len(endings) < len(processes) and not limit.is_over:
        now = time.time()
        for rank, process in enumerate(processes):
            code = ending_of(process) if rank not in endings else None
            if code is not None:
                endings[rank] = Ending(rank, code, looked, now)
        looked = now
        if watch is not None and (suspect := watch.look(time.monotonic(), endings)) is not None:
            watch.tell(suspect)
            for rank in suspect.ranks:
                kill_group(processes[rank])
        if grace is None and any(ending.code for ending in endings.values()):
            grace = Patience(GRACE_SECONDS)
        if grace is not None and grace.is_over:
            killed |= set(range(len(processes))) - set(endings)
            for rank in killed - set(endings):
                kill_group(processes[rank])
        time.sleep(POLL_SECONDS)  # a wait for several processes at once, not a synchronisation
    return list(endings.values()), killed


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
        leave_error(Path(folder), int(os.environ.get("RANK", "0")), details, cause)
