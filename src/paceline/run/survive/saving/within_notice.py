"""How long a save under way is waited for where the machine goes at a known moment: a notice has come."""

from __future__ import annotations

import time

from paceline.checkpoint.beside.flight import SaveInFlight
from paceline.run.process.world import World
from paceline.run.survive.listener import was_aborted

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


def _ends_by(flight: SaveInFlight | None, moment: float, world: World) -> bool:
    """Return whether a save ends on all ranks by a moment of the monotonic clock; wait for it until then."""
    if flight is None:
        return True
    flight.wait(lambda: was_aborted() or time.monotonic() >= moment)
    return world.maximum([float(flight.is_running)]) == [0.0]
