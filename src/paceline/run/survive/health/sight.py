"""What a watch sees of ranks: their pulses, the states of their processes, and their stacks. Torch-free."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

from paceline.run.survive.health.flight import ask_flight, read_flight
from paceline.run.survive.health.pulse import STACK_SIGNAL, Pulse, read_pulse, stack_path
from paceline.run.survive.health.stacks import FLIGHT_MARK
from paceline.run.survive.health.system import cpu_seconds, state_of


class Sight(Protocol):
    """Where a watch looks: on this machine, or at what other machines tell."""

    def pulse(self, rank: int) -> Pulse | None:
        """Return a rank's pulse, None where it has none yet."""

    def state(self, pulse: Pulse) -> str:
        """Return the state of a rank's process as its system names it."""

    def cpu_seconds(self, pulse: Pulse) -> float:
        """Return for how long a rank's process has computed."""

    def ask(self, pulse: Pulse, by_signal: bool = False) -> None:
        """Have a rank write its stacks; `by_signal` where its threads have not, which code may keep from running."""

    def stack(self, rank: int) -> str:
        """Return the stacks that a rank has written, and its last collectives (`parted`); empty where it has not."""


class NearSight:
    """The ranks of this machine, whose pulses lie in their supervisor's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pulse(self, rank: int) -> Pulse | None:
        """Return a rank's pulse, None where it has none yet."""
        return read_pulse(self._folder, rank)

    def state(self, pulse: Pulse) -> str:
        """Return the state of a rank's process as the system names it."""
        return state_of(pulse.process)

    def cpu_seconds(self, pulse: Pulse) -> float:
        """Return for how long a rank's process has computed."""
        return cpu_seconds(pulse.process)

    def ask(self, pulse: Pulse, by_signal: bool = False) -> None:
        """Have a rank write its stacks and last collectives; by a signal where no thread of it waits to be asked."""
        if not by_signal and ask_flight(self._folder, pulse.rank):
            return
        if pulse.answers and STACK_SIGNAL is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pulse.process, STACK_SIGNAL)

    def stack(self, rank: int) -> str:
        """Return the stacks that a rank has written, and its last collectives; empty where it has not."""
        flight = read_flight(self._folder, rank)
        try:
            stacks = stack_path(self._folder, rank).read_text(errors="replace")
        except FileNotFoundError:
            stacks = ""
        return f"{stacks}{FLIGHT_MARK}{flight}" if flight else stacks
