"""How long a save is waited for: one for which training waits, and one where the machine goes at a known moment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch

from paceline.checkpoint.beside.flight import SaveInFlight, SaveTo
from paceline.checkpoint.snapshot import Snapshot, take_snapshot
from paceline.run.process.world import World
from paceline.run.survive.listener import was_aborted

ABANDON_SECONDS = 2.0  # for a thread that nobody waits for any more to end
FLIGHT_SHARE = 0.8  # of a notice, in which a save under way may end where no further one follows


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
    flight.wait(lambda: was_aborted() or time.monotonic() >= moment)
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

    It hangs that takes longer than `limit_seconds`, or goes on at the moment `until` of the monotonic clock. What was
    given up publishes nothing: its values may change from then on. Every rank calls it. Raises RuntimeError where the
    world ends meanwhile.
    """
    if world.device.type == "cuda":  # what is under way there is this thread's, and another one reads the values
        torch.cuda.current_stream(world.device).synchronize()
    group = world.groups.beside(timedelta(seconds=limit_seconds)) if world.size > 1 else None
    flight = SaveInFlight([to], state, group, limit_seconds)
    try:
        flight.wait(lambda: was_aborted() or time.monotonic() >= until)
    except BaseException:  # a signal; what is not finished is cleared away, if that takes no longer
        flight.abandon(ABANDON_SECONDS)
        raise
    if flight.is_running and was_aborted():
        flight.abandon(ABANDON_SECONDS)
        raise RuntimeError(f"the world has ended, and the save of step {state.step} with it")
    lost = any(outcome.has_lost_a_peer for outcome in flight.outcomes)
    hangs, was_lost = world.maximum([float(flight.is_running), float(lost)])
    if hangs:
        flight.abandon(ABANDON_SECONDS)
    if hangs or was_lost:
        world.groups.drop_beside()
    return flight
