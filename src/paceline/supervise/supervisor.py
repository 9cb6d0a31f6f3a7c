"""The supervisor: starts the processes of a world on this machine, passes signals on and says how they ended.

It never imports torch. Ranks find each other through a file, so there is no port that two runs could fight over.
When one rank ends badly, its peers are given a moment to end themselves and are then killed, with all that they have
started: nothing hangs, and nothing is left behind. Runs go on after that (again/generations.py).
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.cluster.here.heap import joined_heap
from paceline.cluster.here.waiting import waiting
from paceline.errors import PacelineError, Requeue, of_rank
from paceline.lock import RunLock
from paceline.patience import Patience
from paceline.said import each_folded
from paceline.scratch import Scratch
from paceline.spec.survive.health import HealthSpec
from paceline.supervise.blame import Outcome, leave_error, outcome_of
from paceline.supervise.crew import Crew, attend
from paceline.supervise.groups import HASHES_ALIKE, Process, collect
from paceline.supervise.logs.rank import opened
from paceline.supervise.memory_kills import memory_kills
from paceline.supervise.pulses.standstill import Standstill
from paceline.supervise.pulses.watch import PulseWatch, WorldWatch
from paceline.supervise.signals import ForwardingFlag, forward_signals
from paceline.supervise.told.place import FILE, RENDEZVOUS
from paceline.system.end_of_parent import PARENT_VARIABLE
from paceline.units import plural

GRACE_SECONDS = 15.0
ERROR_FOLDER = "PACELINE_ERRORS"

StartsRank = Callable[[dict[str, str]], Process]  # given what the environment of the process has besides


def supervise(
    command: Sequence[str],
    ranks: int,
    environ: dict[str, str],
    limit_seconds: float = math.inf,
    lock: RunLock | None = None,
) -> Outcome:
    """Run `command` once per rank and return how they ended. After `limit_seconds` they are killed.

    Each process gets RANK, LOCAL_RANK, WORLD_SIZE and a rendezvous. SIGTERM, SIGINT and SIGUSR1 end them: they have
    nothing to save. Then this process reacts to the signal as it would have without them.
    """
    return supervise_as_asked(starter(command, environ, lock), ranks, environ, limit_seconds)


def supervise_as_asked(
    start: StartsRank, ranks: int, environ: Mapping[str, str], limit_seconds: float = math.inf
) -> Outcome:
    """Start one process per rank and return how these ended. A stop signal that ended ranks then meets this process."""
    outcome, flag = _supervised(start, ranks, environ, limit_seconds)
    flag.hand_on()
    return outcome


def starter(command: Sequence[str], environ: Mapping[str, str], lock: RunLock | None = None) -> StartsRank:
    """Return what starts the command for a rank.

    The ranks share the lock of the run's directory, so that it lives as long as any of them.
    """

    def start(place: dict[str, str]) -> Process:
        # Own process group: Ctrl-C reaches the ranks once, through us.
        held = lock.for_first_rank() if lock else {}
        with opened(place) as streams:
            return subprocess.Popen(
                list(command), process_group=0,
                env={**HASHES_ALIKE, **waiting(environ), **environ, **joined_heap(environ), **place, **held},
                pass_fds=(lock.descriptor,) if lock else (), stdout=streams.get("stdout"), stderr=streams.get("stderr"),
            )  # fmt: skip

    return start


def supervise_started(
    start: StartsRank,
    ranks: int,
    environ: Mapping[str, str],
    limit_seconds: float = math.inf,
    health: HealthSpec | None = None,
    run_dir: Path | None = None,
    answer: bool = False,
) -> Outcome:
    """Start one process per rank, `start(what its environment has besides)`, and return how they ended.

    With `health`, ranks that hang are found and ended, and the stacks of all are kept in `run_dir`. Without, ranks that
    `answer` with their stacks are ended where they wait for each other for ever. A stop signal is passed on as SIGTERM,
    the one that a process ends of without a word. One that comes when all have ended, while what they leave is cleared,
    counts too: whoever was asked to stop starts nothing further.
    """
    outcome, flag = _supervised(start, ranks, environ, limit_seconds, health, run_dir, answer)
    return Outcome(Requeue.exit_code) if flag.because else outcome


def _supervised(
    start: StartsRank,
    ranks: int,
    environ: Mapping[str, str],
    limit_seconds: float,
    health: HealthSpec | None = None,
    run_dir: Path | None = None,
    answer: bool = False,
) -> tuple[Outcome, ForwardingFlag]:
    with Scratch("world") as folder:
        crew = Crew()
        pulses: WorldWatch | None = PulseWatch.of(health, Path(folder), ranks, run_dir, crew.process_of)
        if pulses is None and answer:
            pulses = Standstill(Path(folder), ranks, crew.process_of)
        flag, kills = forward_signals(lambda number: crew.send(signal.SIGTERM)), memory_kills()
        try:
            for place in places(Path(folder), ranks, environ):
                crew.processes.append(start({**place, **(pulses.for_ranks() if pulses else {})}))
            if flag.because:  # while they were started: some were not there to be told
                crew.send(signal.SIGTERM)
            attend(crew, Patience(limit_seconds), GRACE_SECONDS, pulses=pulses, is_asked=lambda: bool(flag.because))
            if flag.because:
                return Outcome(Requeue.exit_code), flag
            if not crew.is_over:
                because = f"after {limit_seconds:.0f} s {plural(ranks, 'process')} had to be killed"
                took = PacelineError("it took too long", because, "try on an idle machine")
                return Outcome(1, took.as_dict()), flag
            return outcome_of(crew.ended(), crew.killed, Path(folder), kills), flag
        finally:
            collect(crew.processes)
            flag.release()


def places(folder: Path, ranks: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Return what the environment of each rank has besides: its place, where all meet, and where errors are left."""
    shared = {
        "WORLD_SIZE": str(ranks),
        RENDEZVOUS: f"{FILE}{folder}/rendezvous",
        ERROR_FOLDER: str(folder),
        PARENT_VARIABLE: str(os.getpid()),
        "GLOO_SOCKET_IFNAME": environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def explain(outcome: Outcome) -> None:
    """Print the error of a group of processes to stderr, if there is one."""
    if outcome.error is not None:
        print(outcome.error.get("traceback", ""), end="", file=sys.stderr)
        print(each_folded(f"error: {_as_error(outcome.error)}", sys.stderr), file=sys.stderr)


def _as_error(details: Mapping[str, object]) -> PacelineError:
    what = str(details["what"])
    if "rank" in details:
        what = of_rank(what, details["rank"], bool(details.get("names_ranks")))
    return PacelineError(what, str(details["because"]), str(details["try"]))


def is_supervised() -> bool:
    """Return whether this process was started by a supervisor."""
    return ERROR_FOLDER in os.environ


def report_error(details: dict[str, object], cause: bool) -> None:
    """Leave a rank's error where the supervisor finds it; `cause` is False for what a peer's end brought about.

    Where that cannot be written, or the supervisor has gone with its folder, a cause is printed.
    """
    folder = os.environ.get(ERROR_FOLDER)
    if not folder:
        return
    try:
        leave_error(Path(folder), int(os.environ.get("RANK", "0")), details, cause)
    except OSError:
        if cause:
            print(f"error: {details.get('what', '')}: {details.get('because', '')}", file=sys.stderr)
