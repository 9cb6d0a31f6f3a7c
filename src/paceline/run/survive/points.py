"""Points of a run: the places that a process tells when it comes to them. Pulses are beaten there, and faults strike.

Without a supervisor and without a plan of faults a point costs a note of where the process is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.spec.journal.reading import starts_of
from paceline.spec.run import RunSpec
from paceline.spec.survive.phases import ENDED, MEETS
from paceline.supervise.pulses.pulse import Heart, heart_here, listened_to

if TYPE_CHECKING:
    from paceline.run.survive.faults.injector import Injector

SaysPoint = Callable[[str, int], None]
_HEARTS: list[Heart] = []  # at most one: a process has one pulse, whatever runs it makes one after the other


def nowhere(phase: str, step: int) -> None:
    """Do nothing: nobody is told."""


class Points:
    """Who is told where this process is. `reached(phase, step)` is called at each point."""

    def __init__(self, heart: Heart | None, injector: Injector | None) -> None:
        self._heart, self.injector = heart, injector
        told: list[SaysPoint] = [heart.beat] if heart is not None else []
        told += [injector.reached] if injector is not None else []
        self._told = tuple(told)
        self.at = ("load", 0)  # the phase and the step that this process came to last

    def reached(self, phase: str, step: int) -> None:
        """Note that this process has come to a phase of a step, and tell it."""
        self.at = (phase, step)
        for tell in self._told:
            tell(phase, step)

    def waits(self, step: int) -> None:
        """Tell that this process waits for its peers before it makes a step. No fault strikes there."""
        self._beats(MEETS, step)

    def has_met(self, step: int) -> None:
        """Tell that its peers have come, and that this process goes on to make the step."""
        self._beats("loop", step)

    @contextlib.contextmanager
    def in_users_code(self) -> Iterator[None]:
        """Tell while a block runs that this process is in code of the user's, of which nobody knows how long it takes.

        No fault strikes there. Peers may wait for it meanwhile, as for one that is in its own loop.
        """
        with self.aside():
            self._beats("loop", self.at[1])
            yield

    def leaves_loop(self, step: int) -> None:
        """Tell that this process makes no further step: what it does from here on may take long. No fault strikes."""
        self._beats(ENDED, step)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Tell, when a block that tells other phases is over, that this process is back where it was before."""
        before = self.at
        try:
            yield
        finally:
            self._beats(*before)

    def _beats(self, phase: str, step: int) -> None:
        self.at = (phase, step)
        if self._heart is not None:
            self._heart.beat(phase, step)

    def tell_also(self, told: SaysPoint) -> None:
        """Tell a further listener from now on where this process comes to: a trace."""
        self._told = (*self._told, told)

    def tell_no_more(self, told: SaysPoint) -> None:
        """Tell this listener no more."""
        self._told = tuple(each for each in self._told if each != told)

    def starting(self, phase: str, run_dir: Path) -> None:
        """Tell a phase before the first step, in which faults strike by the number of the start."""
        self.at = (phase, 0)
        if self._heart is not None:
            self._heart.beat(phase, 0)
        if self.injector is not None:
            self.injector.reached(phase, 1 + len(starts_of(run_dir)))

    def tell(self, record: Any) -> None:
        """Have a recorder record the faults that have struck since the last call, on whichever rank."""
        if self.injector is not None:
            record.injected(self.injector.news())

    def bind(self, stepper: Any) -> None:
        """Have a step tell its phases."""
        stepper.reached = self.reached
        if self.injector is not None:
            self.injector.bind(stepper)


def points_of(run: RunSpec, run_dir: Path, rank: int, world_size: int) -> Points:
    """Return the points of a process of a run: its rank's, of so many."""
    if run.health.hangs and listened_to() not in (None, *(heart.place for heart in _HEARTS)):
        for heart in _HEARTS:
            heart.stop()
        _HEARTS[:] = filter(None, [heart_here()])  # this process's first, or its first in another world
    injector = None
    if run.faults.each:
        from paceline.run.survive.faults.injector import Injector

        injector = Injector(run.faults, run_dir, rank, world_size)
    return Points(_HEARTS[0] if _HEARTS else None, injector)
