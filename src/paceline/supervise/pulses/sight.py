"""What a watch sees of ranks: pulses, the states of processes, and stacks. Torch-free."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

from paceline.spec.survive.phases import PHASES
from paceline.supervise.pulses.flight import ask_flight, read_flight
from paceline.supervise.pulses.pulse import STACK_SIGNAL, Pulse, read_pulse, stack_path
from paceline.supervise.pulses.rest import Rest, SystemView, UsualThreads
from paceline.supervise.pulses.silences import HangLimits, Overview, Silences, WatchedRank, overview_of
from paceline.supervise.pulses.stacks import FLIGHT_MARK
from paceline.supervise.pulses.system import cpu_seconds, queued_bytes, state_of, threads_of

STARTING, STANDS_STILL = PHASES[0], "Tt"  # /proc: stopped by a signal, or by a debugger
ProcessOf = Callable[[int], int | None]  # by rank
LOOK_SECONDS = 0.2  # between two looks
LONGEST_LOOK_SECONDS = 5 * LOOK_SECONDS  # that count: a supervisor that slept saw nothing


def nobody_knows(rank: int) -> int | None:
    """Return None: the process of no rank is known before its pulse tells it."""
    return None


class Sight(Protocol):
    """Where a watch looks: on this machine, or at what other machines tell."""

    def overview(self, ended: Collection[int], passed: float, now: float, has_failed: bool = False) -> Overview:
        """Return what the ranks show that have not ended, when so many seconds of an idle machine have passed.

        A rank is late there only if nobody can be further behind that is not seen yet. Where one of those that have
        ended `has_failed` nobody wants to know more than that.
        """

    def closely(self) -> Mapping[int, WatchedRank]:
        """Return how each rank is seen, of those that are known since the ranks were asked for their stacks."""

    def ask(self, ranks: Collection[int], by_signal: bool = False) -> None:
        """Have ranks write their stacks; `by_signal` where their threads have not, which code may keep from running."""

    def leave(self) -> None:
        """Look no longer at each rank: none hangs after all."""

    def is_quiet(self) -> bool:
        """Return whether no message can be on its way between ranks since they were asked, as far as that is known."""

    def stack(self, rank: int) -> str:
        """Return the stacks that a rank has written, and its last collectives (`parted`); empty where it has not."""


class NearSight:
    """The ranks of this machine, whose pulses lie in their supervisor's folder."""

    def __init__(
        self, folder: Path, ranks: Collection[int], limits: HangLimits, process_of: ProcessOf = nobody_knows
    ) -> None:
        """`ranks` may change: those are looked at that it has at the moment.

        `process_of` knows their processes: one may be stopped before it has a pulse, and its peers wait to meet it.
        """
        self._folder, self._ranks, self._process_of = folder, ranks, process_of
        self._stopped_early: dict[int, float] = {}  # since when such a rank was seen, by rank
        view = SystemView(lambda process: threads_of(process), lambda process: cpu_seconds(process))
        usual = UsualThreads(view.threads)
        self._silences = Silences(
            limits, lambda pulse: state_of(pulse.process), lambda pulse: cpu_seconds(pulse.process),
            lambda pulse, now: Rest(pulse.process, now, view, usual.of(pulse.process)),
            lambda pulse, now: usual.note(pulse.process, now),
        )  # fmt: skip
        self._seen: dict[int, WatchedRank] = {}
        self._nothing_queued = False

    def overview(self, ended: Collection[int], passed: float, now: float, has_failed: bool = False) -> Overview:
        """Return what the ranks show that have not ended."""
        ranks = [rank for rank in self._ranks if rank not in ended]
        pulses = (read_pulse(self._folder, rank) or self._stopped_without(rank, now) for rank in ranks)
        self._seen = self._silences.note((pulse for pulse in pulses if pulse is not None), passed, now)
        return overview_of(self._seen.values())

    def _stopped_without(self, rank: int, now: float) -> Pulse | None:
        """Return what stands for the pulse of a rank whose process is stopped and that has none yet; None of others."""
        process = self._process_of(rank)
        if process is None or state_of(process) not in STANDS_STILL:
            self._stopped_early.pop(rank, None)
            return None
        since = self._stopped_early.setdefault(rank, now)
        return Pulse(rank, process, False, 0, 0, STARTING, since, 0, 0.0)

    def closely(self) -> Mapping[int, WatchedRank]:
        """Return how each rank was seen at the last overview."""
        return self._seen

    def ask(self, ranks: Collection[int], by_signal: bool = False) -> None:
        """Have ranks write their stacks and last collectives; by a signal where no thread of a rank waits to be asked.

        A rank that is stopped cannot.
        """
        for rank in ranks:
            if rank in self._seen and not self._seen[rank].is_stopped:
                self._ask(self._seen[rank].pulse, by_signal)

        self._nothing_queued = False

    def leave(self) -> None:
        """Do nothing: a rank of this machine is asked once."""

    def is_quiet(self) -> bool:
        """Return whether no byte was under way between ranks at this look and the one before."""
        before = self._nothing_queued
        self._nothing_queued = queued_bytes({seen.pulse.process for seen in self._seen.values()}) == 0
        return before and self._nothing_queued

    def stack(self, rank: int) -> str:
        """Return the stacks that a rank has written, and its last collectives; empty where it has not."""
        flight = read_flight(self._folder, rank)
        try:
            stacks = stack_path(self._folder, rank).read_text(errors="replace")
        except FileNotFoundError:
            stacks = ""
        return f"{stacks}{FLIGHT_MARK}{flight}" if flight else stacks

    def _ask(self, pulse: Pulse, by_signal: bool) -> None:
        if not by_signal and ask_flight(self._folder, pulse.rank):
            return
        if pulse.answers and STACK_SIGNAL is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pulse.process, STACK_SIGNAL)
