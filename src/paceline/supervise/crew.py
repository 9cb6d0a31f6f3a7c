"""The crew: the processes of a world on this machine, a process for each rank, and how processes have ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from paceline.errors import Requeue
from paceline.patience import Patience
from paceline.spec.journal.timing.clock import on_clock, passed_seconds
from paceline.supervise.blame import EARLY_CODE, Ending
from paceline.supervise.groups import POLL_SECONDS, Far, Process, ending_of, kill_group, signal_process
from paceline.supervise.pulses.watch import Suspect, WorldWatch
from paceline.supervise.ranks_lost import RanksLost, TellLost, told_to_nobody
from paceline.supervise.signals import STOP_SIGNALS

RECOVERY_POLL_SECONDS = POLL_SECONDS / 10  # between two looks once a rank has failed


class Crew:
    """The processes of a world in the order of ranks, and what is known of how they ended."""

    def __init__(
        self,
        processes: Sequence[Process] = (),
        tell: TellLost = told_to_nobody,
        is_stopped: Callable[[], bool] = lambda: False,
        changes: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`tell` is told at once of each process that was ended by a signal which nobody here has sent.

        `is_stopped` says whether another machine was asked to stop, which has passed the signal on by itself. `changes`
        returns another number once a process has ended, None where each is to be asked.
        """
        self.processes = list(processes)
        self.endings: dict[int, Ending] = {}
        self.killed: set[int] = set()  # by the supervisor, because a peer had failed before
        self.passed_on: set[int] = set()  # stop signals that ranks were sent
        self._looked = passed_seconds()
        self.tell, self._is_stopped = tell, is_stopped
        self._changes, self._changes_seen = changes, -1

    def process_of(self, rank: int) -> int | None:
        """Return the number of a rank's process, None where that is yet to be started."""
        return self.processes[rank].pid if rank < len(self.processes) else None

    def look(self) -> None:
        """Note which processes have ended since the last look."""
        now, changes = passed_seconds(), self._changes()
        for rank, process in enumerate(self.processes) if changes is None or changes != self._changes_seen else ():
            code = ending_of(process) if rank not in self.endings else None
            if code is not None:
                self.endings[rank] = Ending(rank, code, self._looked, now)
                if self._is_lost(rank, code):
                    self.tell(_lost(rank, len(self.processes), process, code, self._looked))
        self._looked, self._changes_seen = now, -1 if changes is None else changes

    def _is_lost(self, rank: int, code: int) -> bool:
        return code not in (0, Requeue.exit_code) and rank not in self.killed and not self._is_asked(code)

    def _is_asked(self, code: int) -> bool:
        """Return whether a process ended by a stop signal that all were sent."""
        return -code in self.passed_on or (-code in STOP_SIGNALS and self._is_stopped())

    def send(self, number: int) -> None:
        """Send a signal to every process that runs, as far as is known. Signal handlers call this at any moment."""
        self.passed_on.add(number)
        for rank, process in enumerate(self.processes):
            if rank not in self.endings:
                signal_process(process, number)

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        """End those that still run by force: all of them, or some ranks'."""
        for rank in range(len(self.processes)) if ranks is None else ranks:
            if rank not in self.endings:
                self.killed.add(rank)
                kill_group(self.processes[rank])

    def left_early(self) -> None:
        """Note that peers wait for those that have ended as if they were done: they have failed."""
        for rank, ending in self.endings.items():
            if not ending.code:
                self.endings[rank] = replace(ending, code=EARLY_CODE, is_early=True)
                self.tell(_lost(rank, len(self.processes), self.processes[rank], 0, ending.after))

    @property
    def has_failed(self) -> bool:
        """Whether a process has ended badly."""
        return any(ending.code for ending in self.endings.values())

    @property
    def is_over(self) -> bool:
        """Whether all have ended."""
        return len(self.endings) == len(self.processes)

    def ended(self) -> list[Ending]:
        """Return how the ranks ended, in the order in which that was seen.

        A stop signal may reach a rank before it can hear of one, or when all have agreed to stop by that of another and
        this one has saved and is about to leave: it has stopped as it was asked to.
        """
        return [
            replace(ending, code=Requeue.exit_code) if self._is_asked(ending.code) else ending
            for ending in self.endings.values()
        ]


def attend(
    crew: Crew,
    limit: Patience,
    grace_seconds: float,
    is_settled: Callable[[], bool] = lambda: False,
    spared: Callable[[], Collection[int]] = tuple,
    pulses: WorldWatch | None = None,
    is_asked: Callable[[], bool] = lambda: False,
) -> None:
    """Return when all processes have ended, the limit is over, or things are settled.

    Ranks that hang, as the watch over their `pulses` tells, are ended: that is their failure. So it is looked on where
    some have ended with code 0: who is waited for by peers was not done.
    After a failure, or where all are asked to end, the others have a grace; who has not ended by then, by itself or as
    asked, is killed if not spared.
    """
    grace: Patience | None = None
    while not crew.is_over and not limit.is_over:
        crew.look()
        if pulses is not None:
            suspect = pulses.look(time.monotonic(), crew.endings, crew.has_failed)
            if suspect is not None:
                pulses.tell(suspect)
                _end_suspects(crew, suspect)
        if grace is None and (crew.has_failed or is_asked()):
            grace = Patience(grace_seconds)
        if is_settled():
            return
        if grace is not None and grace.is_over:
            crew.kill(sorted(set(range(len(crew.processes))) - set(spared())))
        # A wait for several processes at once, not a synchronisation. Who recovers waits for the next look.
        time.sleep(POLL_SECONDS if grace is None else RECOVERY_POLL_SECONDS)


def _end_suspects(crew: Crew, suspect: Suspect) -> None:
    """End ranks that hang; those that have ended as if they were done, and are waited for, have failed."""
    if suspect.have_left:
        crew.left_early()
        return
    crew.tell(RanksLost(suspect.ranks, suspect.what, suspect.because, on_clock(suspect.since)))
    for rank in suspect.ranks:
        kill_group(crew.processes[rank])


def _lost(rank: int, ranks: int, process: Process, code: int, passed: float) -> RanksLost:
    since = on_clock(passed)
    if isinstance(process, Far) and process.lost_with:
        return RanksLost((rank,), f"{process.lost_with}, with rank {rank} of {ranks}", "", since)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with code {code}"
    return RanksLost((rank,), f"rank {rank} of {ranks} {how}", "", since)
