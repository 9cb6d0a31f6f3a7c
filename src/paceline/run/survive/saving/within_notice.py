"""How long a save is waited for: one for which training waits, and one where the machine goes at a known moment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from paceline.checkpoint.beside.flight import SaveInFlight, SaveTo
from paceline.checkpoint.snapshot import Snapshot, take_snapshot
from paceline.run.process.world import World
from paceline.run.survive.listener import has_lost_a_peer, refuse_lost_world

ABANDON_SECONDS = 2.0  # for a thread that nobody waits for any more to end
FLIGHT_SHARE = 0.8  # of a notice, in which a save under way may end where no further one follows
SLOWEST = 2**18  # bytes a second that a rank moves whose storage answers; what else a run writes and reads is less


def waited_for(flight: SaveInFlight | None, took: float, notice: float, world: World) -> tuple[bool, bool]:
    """Return whether a save under way has ended on all ranks, and whether one of this moment fits in then.

    `took` are the seconds of a save, and `notice` those from now to the end of the machine; both the same on all ranks,
    which all call it. Who is not given the time of a further save waits for what is under way all the longer.
    """
    began = time.monotonic()
    if took <= notice and _ends_by(flight, began + notice - took, world):
        return True, True
    return _ends_by(flight, began + FLIGHT_SHARE * notice, world), False


def last_moment(began: float, notice: float, took: float) -> float:
    """Return until when a save that begins now may go on, where a notice of so many seconds came at the moment `began`.

    Moments are those of the monotonic clock. The run needs a part of the notice to say how it ended.
    """
    return began + min(notice, max(FLIGHT_SHARE * notice, time.monotonic() - began + took))


def _ends_by(flight: SaveInFlight | None, moment: float, world: World) -> bool:
    """Return whether a save ends on all ranks by a moment of the monotonic clock; wait for it until then."""
    if flight is None:
        return True
    flight.wait(lambda: has_lost_a_peer() or time.monotonic() >= moment)
    return world.maximum([float(flight.is_running)]) == [0.0]


@dataclass(frozen=True)
class LiveState:
    """The state itself, which is not copied: nothing may change it while it is written."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    extra: Mapping[str, object]
    device_seconds: float = 0.0  # as of a copy, which there is none of

    def arrived(self) -> Snapshot:
        """Return the state as a snapshot of live values. Any thread may call it."""
        return take_snapshot(self.step, self.tensors, self.extra, copy=False)


def save_waited_for(to: SaveTo, state: LiveState, world: World, limit_seconds: float, until: float) -> SaveInFlight:
    """Return a save that has ended on all ranks, or that was given up on all, since it hangs on one of them.

    It hangs where no rank writes or reads anything for `limit_seconds`: all of a large state may take longer. It is
    also given up where it goes on at the moment `until` of the monotonic clock. What was given up publishes nothing:
    its values may change from then on. Every rank calls it. Raises DistError where the world ends meanwhile.
    """
    if world.device.type == "cuda":  # what is under way there is this thread's, and another one reads the values
        torch.cuda.current_stream(world.device).synchronize()
    group = world.groups.beside(timedelta(seconds=limit_seconds)) if world.size > 1 else None
    moved, flight = bytes_moved(), SaveInFlight([to], state, group, limit_seconds)
    try:
        while True:
            flight.wait(lambda: has_lost_a_peer() or time.monotonic() >= until)
            if flight.is_running:
                refuse_lost_world(state.step)
            lost = any(outcome.has_lost_a_peer for outcome in flight.outcomes)
            before, moved = moved, bytes_moved()
            moves, is_late = moved - before >= SLOWEST * limit_seconds, time.monotonic() >= until
            told = world.maximum([float(each) for each in (flight.is_running, lost, moves, is_late)])
            goes_on, was_lost, moves, is_late = map(bool, told)
            if not goes_on or is_late or not moves:
                break
            flight.go_on()
    except BaseException:  # a signal too, or a peer that is gone as ranks agree; what is unfinished is cleared away
        flight.abandon(ABANDON_SECONDS)
        raise
    if goes_on:
        flight.abandon(ABANDON_SECONDS)
    if goes_on or was_lost:
        world.groups.drop_beside()
    return flight


def bytes_moved() -> int:
    """Return how many bytes this process has written and read so far by calls of the system; 0 where nobody counts."""
    try:
        told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(told["rchar"]) + int(told["wchar"])
    except (OSError, ValueError, KeyError):
        return 0
