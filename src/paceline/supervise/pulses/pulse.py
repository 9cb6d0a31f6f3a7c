"""A rank's pulse: the rank's place and since when, in a small file in memory that the supervisor reads. Torch-free.

A beat is one write of 32 bytes to mapped memory: no system call, no lock. A reader may meet a beat half written; it
looks again in a moment, and what stands still is whole.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.spec.survive.phases import PHASES
from paceline.supervise.pulses.flight import FlightTeller

PULSE_FOLDER = "PACELINE_PULSES"  # set by a supervisor that listens
HEAD = struct.Struct("<QQ")  # process, whether it answers STACK_SIGNAL
BEAT = struct.Struct("<QQQQ")  # beats, step, phase, nanoseconds of the system's monotonic clock
STEP = struct.Struct("<QQ")  # whole steps made by this process, nanoseconds that the last one took
SIZE = HEAD.size + BEAT.size + STEP.size
# Of the real-time signals, which no program is sent by accident: it writes all stacks into a file.
STACK_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else None
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}


@dataclass(frozen=True)
class Pulse:
    """What a rank has told last. `since` is a moment of the system's monotonic clock."""

    rank: int
    process: int
    answers: bool  # whether it writes its stacks on STACK_SIGNAL
    beats: int
    step: int
    phase: str
    since: float
    steps_made: int  # whole steps of this process
    step_seconds: float  # of the last of them

    @property
    def order(self) -> tuple[int, int]:
        """How far the rank is."""
        return self.step, _NUMBER[self.phase]


def pulse_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's pulse in its supervisor's folder."""
    return folder / f"pulse-{rank}"


def processes_in(folder: Path) -> list[int]:
    """Return the processes that have left a pulse in a supervisor's folder, whether or not they are there still."""
    ranks = [int(path.name.removeprefix("pulse-")) for path in folder.glob("pulse-*")]
    return [pulse.process for rank in sorted(ranks) if (pulse := read_pulse(folder, rank)) is not None]


def stack_path(folder: Path, rank: int) -> Path:
    """Return the file into which a rank writes its stacks."""
    return folder / f"stacks-{rank}.txt"


class Heart:
    """Beats for this process. Made on its main thread, once in a world."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.place = folder, rank
        path = pulse_path(folder, rank)
        path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SIZE)
        self._beats, self._made, self._step_began, self._step = 0, 0, 0, -1
        answers = STACK_SIGNAL is not None
        if STACK_SIGNAL is not None:
            self._stacks = stack_path(folder, rank).open("w")
            faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True)
        self._flight = FlightTeller(folder, rank, stacks=self._tell_stacks)
        HEAD.pack_into(self._memory, 0, os.getpid(), answers)
        self.beat("starting", 0)

    def _tell_stacks(self) -> None:
        if STACK_SIGNAL is not None:
            faulthandler.dump_traceback(self._stacks, all_threads=True)

    def stop(self) -> None:
        """Tell nothing more: this process is in another world."""
        self._flight.stop()

    def beat(self, phase: str, step: int) -> None:
        """Tell that this process has come to a phase of a step."""
        now = time.monotonic_ns()
        self._beats += 1
        if phase == "data":
            if step == self._step + 1:
                self._made += 1
                STEP.pack_into(self._memory, HEAD.size + BEAT.size, self._made, now - self._step_began)
            self._step, self._step_began = step, now
        BEAT.pack_into(self._memory, HEAD.size, self._beats, step, _NUMBER[phase], now)


def listened_to() -> tuple[Path, int] | None:
    """Return the folder in which a supervisor looks for this process's pulse, and its rank; None without one."""
    folder = os.environ.get(PULSE_FOLDER)
    return (Path(folder), int(os.environ.get("RANK", "0"))) if folder else None


def heart_here() -> Heart | None:
    """Return a heart for this process where a supervisor of ours listens to it."""
    place = listened_to()
    return Heart(*place) if place else None


def read_pulse(folder: Path, rank: int) -> Pulse | None:
    """Return a rank's pulse, None where it has none yet."""
    try:
        content = pulse_path(folder, rank).read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < SIZE:
        return None
    process, answers = HEAD.unpack_from(content)
    beats, step, phase, since = BEAT.unpack_from(content, HEAD.size)
    made, last = STEP.unpack_from(content, HEAD.size + BEAT.size)
    if not beats or phase >= len(PHASES):
        return None
    return Pulse(rank, process, bool(answers), beats, step, PHASES[phase], since / 1e9, made, last / 1e9)
