"""Standstill: ranks that wait for each other for ever, found in seconds, however long their work may take. Torch-free.

A rank that waits in a collective sleeps until the message of a peer wakes it. Where all ranks of a world on one machine
sleep in collectives, and no thread of theirs runs or wants to run, no message is on its way that could wake one.
Nothing of that is a limit of time: on a loaded machine a rank that gets no core is one that wants a core, and the
system says so. What is not a collective's wait, as that for a disk or for a service, is none of this.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from paceline.errors import VerificationFailed
from paceline.spec.journal.timing.clock import passed_seconds
from paceline.supervise.blame import leave_if_there_is_room, ranks_text
from paceline.supervise.pulses.pulse import STACK_SIGNAL, stack_path
from paceline.supervise.pulses.rest import ASLEEP, IDLE_SHARE, WAITS_FOR_A_DISK, WANTS_A_CORE
from paceline.supervise.pulses.sight import ProcessOf
from paceline.supervise.pulses.stacks import called_by, waits_in
from paceline.supervise.pulses.system import ThreadSeen, cpu_seconds, threads_of
from paceline.supervise.pulses.watch import Suspect

LOOK_SECONDS = 0.5  # between two looks
LONGEST_LOOK_SECONDS = 2 * LOOK_SECONDS  # that count: a supervisor that slept saw nothing
STILL_SECONDS = 10.0  # in which nothing has moved, before ranks are asked for their stacks
SETTLED_SECONDS = 2.0  # and after they have answered
WHAT = "all {ranks} ranks wait for each other, and would for ever"
TRY = (
    "have every rank make the same collectives in the same order: its number, its rows and its environment must not"
    " decide whether it makes one"
)


class StandstillStage(enum.Enum):
    """How far the watch is: it looks, has asked for stacks, has them, or knows that what stands still is no wait."""

    LOOKS = enum.auto()
    ASKED = enum.auto()
    ANSWERED = enum.auto()
    EXCUSED = enum.auto()


@contextlib.contextmanager
def answering_with_stacks(folder: Path, rank: int) -> Iterator[None]:
    """Have this process, on its main thread, write its stacks on STACK_SIGNAL while a block runs."""
    if STACK_SIGNAL is None:
        yield
        return
    with stack_path(folder, rank).open("w") as file:
        faulthandler.register(STACK_SIGNAL, file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACK_SIGNAL)
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # one that is on its way would end this process


class Standstill:
    """Looks whether `ranks` ranks of this machine wait for each other for ever; a watch as that of pulses is."""

    def __init__(
        self, folder: Path, ranks: int, process_of: ProcessOf,
        threads: Callable[[int], Sequence[ThreadSeen]] = threads_of, cpu: Callable[[int], float] = cpu_seconds,
    ) -> None:  # fmt: skip
        """`folder` is where ranks leave their stacks and errors; `threads` and `cpu` say what the system knows."""
        self._folder, self._ranks, self._process_of = folder, ranks, process_of
        self._threads, self._cpu = threads, cpu
        self._looked, self._standing, self._is_told = -float("inf"), StandstillStage.LOOKS, False
        self._cores: list[int] | None = None  # how often each main thread had been given one, where nothing moved
        self._still_seconds, self._cpu_before = 0.0, 0.0  # since then
        self._wanted = set[int]()  # the threads that wanted a core at the last look
        self._before: list[int] = []  # lengths of stacks when they were asked for

    def for_ranks(self) -> dict[str, str]:
        """Return what the environment of the ranks says of it: nothing."""
        return {}

    def look(self, now: float, ended: Collection[int] = (), has_failed: bool = False) -> Suspect | None:
        """Return all ranks where they wait for each other for ever, or None; `now` is of the monotonic clock."""
        if self._is_told or self._ranks < 2 or now - self._looked < LOOK_SECONDS:
            return None
        passed, self._looked = min(now - self._looked, LONGEST_LOOK_SECONDS), now
        if self._standing is StandstillStage.ASKED:
            if all(now > before for now, before in zip(self._lengths(), self._before, strict=True)):
                # To write them each rank has moved; and which threads wanted a core was not looked at since.
                self._standing, self._cores, self._wanted = StandstillStage.ANSWERED, None, set()
        elif not self._stand_still(passed, ended):
            self._standing = StandstillStage.LOOKS
        elif self._standing is StandstillStage.LOOKS and self._still_seconds >= STILL_SECONDS:
            self._ask()
        elif self._standing is StandstillStage.ANSWERED and self._still_seconds >= SETTLED_SECONDS:
            self._standing = StandstillStage.EXCUSED
            return self._judged()
        return None

    def tell(self, suspect: Suspect) -> None:
        """Leave what is known as the error of all ranks, which are to be ended then."""
        self._is_told = True
        error = VerificationFailed(suspect.what, suspect.because, TRY).naming_ranks()
        for rank in suspect.ranks:
            leave_if_there_is_room(self._folder, rank, error.as_dict(), suspect.since)

    # ---- what the system says --------------------------------------------------------------------------------------

    def _stand_still(self, passed: float, ended: Collection[int]) -> bool:
        """Return whether nothing has moved since the last look; at the first look after a move nothing has."""
        cores, cpu, wanted, is_still = list[int](), 0.0, set[int](), not ended
        for process in map(self._process_of, range(self._ranks)):
            threads = self._threads(process) if process is not None else ()
            main = next((each for each in threads if each.number == process), None)
            is_still &= main is not None and main.state == ASLEEP
            is_still &= all(each.state != WAITS_FOR_A_DISK for each in threads)
            wanted |= {each.number for each in threads if each.state == WANTS_A_CORE}
            cores.append(main.switches if main is not None else -1)
            cpu += self._cpu(process) if process is not None else 0.0
        is_still &= not wanted & self._wanted  # a thread that looks for messages is met so once, and not twice
        self._wanted = wanted
        had_moved = self._cores is None
        self._still_seconds += passed
        is_idle = cpu - self._cpu_before <= IDLE_SHARE * self._ranks * self._still_seconds
        if is_still and not had_moved and cores == self._cores and is_idle:
            return True
        self._cores, self._still_seconds, self._cpu_before = cores if is_still else None, 0.0, cpu
        return is_still and had_moved

    # ---- what the ranks say ----------------------------------------------------------------------------------------

    def _lengths(self) -> list[int]:
        """Return how long the stacks are that each rank has written; -1 of one that does not answer yet."""
        paths = [stack_path(self._folder, rank) for rank in range(self._ranks)]
        return [path.stat().st_size if path.exists() else -1 for path in paths]

    def _ask(self) -> None:
        """Have all ranks write their stacks, once all of them would: others end of the signal."""
        self._before = self._lengths()
        if STACK_SIGNAL is None or min(self._before) < 0:
            return
        self._standing = StandstillStage.ASKED
        for process in map(self._process_of, range(self._ranks)):
            if process is not None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(process, STACK_SIGNAL)

    def _judged(self) -> Suspect | None:
        stacks = [stack_path(self._folder, rank).read_text(errors="replace") for rank in range(self._ranks)]
        waits = [waits_in(stack) for stack in stacks]
        if not all(waits):
            return None
        alike = defaultdict[str, list[int]](list)
        for rank, (stack, wait) in enumerate(zip(stacks, waits, strict=True)):
            caller = called_by(stack)
            alike[f"{wait}, called by {caller}" if caller else wait].append(rank)
        told = [f"{ranks_text(ranks)} in {where}" for where, ranks in alike.items()]
        because = f"all sleep in collectives, and nothing is on its way to any of them: {'; '.join(told)}"
        since = passed_seconds() - self._still_seconds
        return Suspect(tuple(range(self._ranks)), WHAT.format(ranks=self._ranks), because, since)
