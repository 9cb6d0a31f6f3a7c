"""Ranks that wait for each other for ever while a loop of a script is proven: told in seconds, with the place of each.

A proof's own ranks have a supervisor that looks (`supervise/pulses/standstill.py`). Those of a script under torchrun
have none of ours, so the first rank looks, beside its main thread. Where all wait, each rank shuts its connections to
the others: the collective in which it waits ends with an error, and the proof with what is known of the wait.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.errors import VerificationFailed
from paceline.patience import Patience
from paceline.run.process.between_ranks import shut_between
from paceline.run.process.world import World
from paceline.scratch import Scratch
from paceline.supervise.blame import ToldError, errors_told
from paceline.supervise.pulses import standstill
from paceline.supervise.pulses.pulse import STACK_SIGNAL, listened_to
from paceline.supervise.pulses.standstill import Standstill, answering_with_stacks
from paceline.supervise.pulses.system import ThreadSeen, threads_of
from paceline.system.this_machine import machine_here

HEARD_SECONDS = 5.0  # that the first rank waits for the others to have read what it has told


@contextlib.contextmanager
def told_where_ranks_wait(world: World) -> Iterator[None]:
    """Raise VerificationFailed in the block, on every rank, where all ranks wait for each other for ever.

    Every rank enters it. It looks where all ranks are processes of one machine (Linux) that compute on its CPU, each
    with the loop in its main thread, and no supervisor listens to them; elsewhere the block is as it would be without.
    """
    told: list[tuple[str, int] | None] = world.gather(_place(world)) if world.size > 1 else []
    places = [place for place in told if place is not None]
    if len(places) < world.size or len({machine for machine, _ in places}) > 1:
        yield
        return
    processes = [process for _, process in places]
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(Scratch("loop")) if world.is_first else ""
        folder = world.share(folder)
        opened.enter_context(answering_with_stacks(Path(folder), world.rank))
        watch = RankWatch(Path(folder), world.rank, processes)
        opened.callback(watch.end)
        try:
            yield
        except Exception as error:
            if (known := watch.told or watch.look()) is None:
                raise
            words = known.words
            raise VerificationFailed(*(str(words[name]) for name in ("what", "because", "try"))) from error


def _place(world: World) -> tuple[str, int] | None:
    """Return this rank's machine and process, None where it cannot be looked at."""
    in_main = threading.current_thread() is threading.main_thread()
    if sys.platform != "linux" or STACK_SIGNAL is None or not in_main:
        return None
    if world.device.type != "cpu" or listened_to() is not None:  # a GPU computes while its rank sleeps
        return None
    return machine_here(), os.getpid()


class RankWatch:
    """A thread beside a rank's main one. The first rank's looks at all ranks; all heed what that one tells."""

    def __init__(self, folder: Path, rank: int, processes: Sequence[int]) -> None:
        """`folder` is shared by the ranks, whose processes are given by rank; each writes its stacks there."""
        self._folder, self._rank, self._processes = folder, rank, processes
        self._over = threading.Event()
        self.told: ToldError | None = None
        self._thread = threading.Thread(target=self._run, name="waiting-ranks", daemon=True)
        self._thread.start()

    def look(self) -> ToldError | None:
        """Return what the first rank has told of the wait, if it has; this rank has heard of it then."""
        self.told = self.told or next(iter(errors_told(self._folder)), None)
        if self.told is not None:
            with contextlib.suppress(OSError):  # the first rank has waited for long enough, and removed the folder
                (self._folder / f"heard-{self._rank}").touch()
        return self.told

    def end(self) -> None:
        """End the thread; where the wait was told, the first rank's ends once all have heard of it."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        watch = None
        if self._rank == 0:
            watch = Standstill(self._folder, len(self._processes), self._processes.__getitem__, _other_threads)
        while not self._over.wait(standstill.LOOK_SECONDS):
            suspect = watch.look(time.monotonic()) if watch is not None else None
            if watch is not None and suspect is not None:
                watch.tell(suspect)
            if self.look() is not None:
                if watch is not None:
                    self._wait_until_heard()
                shut_between([process for process in self._processes if process != os.getpid()])
                return

    def _wait_until_heard(self) -> None:
        """Wait until all ranks have read what was told: once one connection is shut, the first rank may go."""
        patience = Patience(HEARD_SECONDS)
        while len(list(self._folder.glob("heard-*"))) < len(self._processes) and not patience.is_over:
            time.sleep(standstill.LOOK_SECONDS / 10)  # a wait for several processes, not a synchronisation


def _other_threads(process: int) -> list[ThreadSeen]:
    """Return the threads of a process without the one that looks, which runs whenever it does."""
    return [each for each in threads_of(process) if each.number != threading.get_native_id()]
