"""Where the ranks of a run's worlds run: on this machine, or on several nodes (supervise/nodes/fleet.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from paceline.lock import RunLock
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.survive.health import HealthSpec
from paceline.supervise.again.held_state import HeldState
from paceline.supervise.again.rescue import rescue_folder
from paceline.supervise.control import Control
from paceline.supervise.groups import Process
from paceline.supervise.nodes.held_in_memory import HeldPieces
from paceline.supervise.pulses.sight import ProcessOf
from paceline.supervise.pulses.watch import PulseWatch
from paceline.supervise.starting import Starter
from paceline.supervise.supervisor import places
from paceline.supervise.told.generation import JudgedSoFar


class Stander(Protocol):
    """A rank that stands by, and what it holds of the state."""

    @property
    def held(self) -> HeldState: ...


class RankHosts(Protocol):
    """What a run's generations ask of the machines that its ranks run on."""

    def open(self, folder: Path) -> None:
        """Begin to serve a run, whose generations have folders below `folder`."""

    def rest(self) -> None:
        """Note that nobody looks after ranks for as long as a plan takes."""

    def is_stopped(self, leaving: Collection[int] = ()) -> bool:
        """Return whether somebody has asked one of the machines to stop, other than those of `leaving` ranks."""

    def rung(self) -> str:
        """Return how the next ranks will be started. Waits until that is known."""

    def decisions(self) -> tuple[DecisionRecord, ...]:
        """Return what was decided on that the spec has not asked for."""

    def changes(self) -> int | None:
        """Return another number once a process has ended, None where each is to be asked."""

    def part_with(self, ranks: Collection[int], ended: Collection[int] = ()) -> str:
        """Let the machines go whose ranks have saved and ended while others stand by; return which, "" where none is.

        They count no more among those that are there. `ended` are all ranks that have ended, also those which came too
        late to stand by, whose machines stay.
        """

    def devices(self) -> int | None:
        """Return how many devices are there now; None where that is not for the machines to say."""

    @property
    def unit(self) -> int:
        """How many devices go with the least that can be lost and not be replaced."""

    def wait_for(self, devices: int, is_over: Callable[[], object]) -> bool:
        """Return whether so many devices are there, or come before the run has waited for too long, or `is_over`."""

    def places(self, folder: Path, ranks: int) -> list[dict[str, str]]:
        """Return what the environment of each rank of the next world has besides."""

    def seats(self, standing: Collection[int], ranks: int, needed: Collection[int] = ()) -> dict[int, int]:
        """Return which survivor takes which rank of the next world, which is to begin: by new rank, the old one.

        Where it has fewer ranks than there are survivors, those that are `needed` go on before others.
        """

    def seated(self, standing: Collection[int], ranks: int, needed: Collection[int]) -> Collection[int]:
        """Return which survivors would take a rank of such a world."""

    def start(self, place: Mapping[str, str]) -> Process:
        """Start a rank with these additions to its environment."""

    def for_survivors(self) -> dict[str, str]:
        """Return what the environment of ranks says that may stand by."""

    def standing(self, generation: int) -> Mapping[int, Stander]:
        """Return the ranks of a generation that stand by now."""

    def dismiss(self, ranks: Mapping[int, Mapping[str, object]] | None = None) -> None:
        """Answer all that stand by: each with its message, or that it does not go on."""

    def word(self, folder: Path, name: str) -> None:
        """Leave a word for the ranks of a generation, of which `folder` is the folder."""

    def watch(
        self, health: HealthSpec | None, folder: Path, ranks: int, run_dir: Path, process_of: ProcessOf
    ) -> PulseWatch | None:
        """Return the watch over a world's ranks, None where hangs are not looked for.

        `process_of` has the processes of ranks as they are started, of this machine's by their numbers.
        """

    def rescue(self, lock: RunLock, generation: int) -> str:
        """Return the folder in which the ranks of the next world bring together what they hold, or FROM_RANKS."""

    def held(self, ranks: int) -> HeldPieces | None:
        """Return the state that is in the memory of machines, for the ranks of the next world; None where none is."""

    def note_judged(self, judged: JudgedSoFar) -> None:
        """Have it kept what is counted of failures: who supervises may be lost before the next world is formed."""

    def close(self) -> None:
        """End what is left of the service to the run."""


class OneMachine:
    """The ranks of a run on this machine, as processes of this one's."""

    def __init__(self, starter: Starter, environ: Mapping[str, str]) -> None:
        self._starter, self._environ = starter, environ
        self.rung: Callable[[], str] = starter.rung
        self.decisions: Callable[[], tuple[DecisionRecord, ...]] = starter.decisions
        self._control: Control | None = None

    def open(self, folder: Path) -> None:
        """Begin to serve a run, whose generations have folders below `folder`."""
        self._control = Control(folder)

    def rest(self) -> None:
        """Do nothing: nobody else waits for this process."""

    def is_stopped(self, leaving: Collection[int] = ()) -> bool:
        """Return False: who supervises one machine gets its signals."""
        return False

    def changes(self) -> int | None:
        """Return None: processes of this machine are asked."""
        return None

    def devices(self) -> int | None:
        """Return None: the devices of one machine stay as they are, but for what a file says."""
        return None

    @property
    def unit(self) -> int:
        """One: a device may be lost by itself."""
        return 1

    def part_with(self, ranks: Collection[int], ended: Collection[int] = ()) -> str:
        """Return "": all ranks are of this machine."""
        return ""

    def wait_for(self, devices: int, is_over: Callable[[], object]) -> bool:
        """Return False: no more devices will come than there are."""
        return False

    def places(self, folder: Path, ranks: int) -> list[dict[str, str]]:
        """Return what the environment of each rank of the next world has besides."""
        return places(folder, ranks, self._environ)

    def seats(self, standing: Collection[int], ranks: int, needed: Collection[int] = ()) -> dict[int, int]:
        """Return which survivor takes which rank of the next world: by new rank, the old one."""
        return seats_of(standing, range(ranks), needed)

    def seated(self, standing: Collection[int], ranks: int, needed: Collection[int]) -> Collection[int]:
        """Return which survivors would take a rank of such a world."""
        return self.seats(standing, ranks, needed).values()

    def start(self, place: Mapping[str, str]) -> Process:
        """Start a rank with these additions to its environment."""
        return self._starter(dict(place))

    def for_survivors(self) -> dict[str, str]:
        """Return what the environment of ranks says that may stand by."""
        return self._control.environ() if self._control else {}

    def standing(self, generation: int) -> Mapping[int, Stander]:
        """Return the ranks of a generation that stand by now."""
        return self._control.look(generation) if self._control else {}

    def dismiss(self, ranks: Mapping[int, Mapping[str, object]] | None = None) -> None:
        """Answer all that stand by: each with its message, or that it does not go on."""
        if self._control is not None:
            self._control.dismiss(ranks)

    def word(self, folder: Path, name: str) -> None:
        """Leave a word for the ranks of a generation, of which `folder` is the folder."""
        with contextlib.suppress(OSError):  # a disk may have no room for a name: who leaves it tries again
            (folder / name).touch()

    def watch(
        self, health: HealthSpec | None, folder: Path, ranks: int, run_dir: Path, process_of: ProcessOf
    ) -> PulseWatch | None:
        """Return the watch over a world's ranks, None where hangs are not looked for."""
        return PulseWatch.of(health, folder, ranks, run_dir, process_of)

    def rescue(self, lock: RunLock, generation: int) -> str:
        """Return the folder in which the ranks of the next world bring together what they hold, or FROM_RANKS."""
        return rescue_folder(lock, generation)

    def held(self, ranks: int) -> HeldPieces | None:
        """Return None: what a machine's memory holds of checkpoints is found as those on disk are."""
        return None

    def note_judged(self, judged: JudgedSoFar) -> None:
        """Do nothing: a run on one machine ends with its supervisor."""

    def close(self) -> None:
        """End what is left of the service to the run."""
        if self._control is not None:
            self._control.close()
        self._starter.close()


def seats_of(standing: Collection[int], ranks: Sequence[int], needed: Collection[int] = ()) -> dict[int, int]:
    """Return by rank which survivor takes the rank: a survivor keeps its own rank where `ranks` has that.

    The others take the ranks that are free, in order: survivors 0, 2 and 3 of `ranks` 0 to 2 give {0: 0, 2: 2, 1: 3}.
    Where there are fewer ranks than survivors those go on that are `needed`, after rank 0, which has the records of the
    run: survivors 0, 2 and 3 of ranks 0 and 1 give {0: 0, 1: 2}, and {0: 0, 1: 3} where 3 is needed.
    """
    wanted = sorted(standing, key=lambda rank: (rank != 0, rank not in needed, rank not in ranks, rank))
    chosen = sorted(wanted[: len(ranks)])
    seats = {rank: rank for rank in chosen if rank in ranks}
    free = iter([rank for rank in ranks if rank not in seats])
    return seats | dict(zip(free, (rank for rank in chosen if rank not in ranks), strict=False))
