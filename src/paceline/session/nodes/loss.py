"""The loss of a coordinator, told at once by a node that sees it: the next coordinator takes seconds to be there.

Whoever watched the run may be lost with the coordinator, and every other node sees the loss. The one that finds the
lock of the run's directory free first puts the loss on record while nobody else can, and has it sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline.lock import while_free
from paceline.observe.alerts.sinks.make import sinks_here
from paceline.observe.alerts.watch import SINK_SECONDS
from paceline.observe.alerts.watch_of_run import tell_of_loss
from paceline.session.watch.alerting import name_of
from paceline.spec.arguments import run_directory
from paceline.spec.load import Spec
from paceline.supervise.nodes.meeting import Meeting, find_meeting
from paceline.supervise.ranks_lost import RanksLost

Say = Callable[[str], None]
LOOK_SECONDS = 0.05


class LossTeller:
    """Tells of a coordinator that is lost, in a thread, until it is told or another one is there."""

    def __init__(self, spec: Spec, is_stopped: Callable[[], bool], say: Say) -> None:
        """`is_stopped` is whether the node was asked to end: then a coordinator that ends too is no trouble."""
        self._spec, self._is_stopped, self._say = spec, is_stopped, say

    def begin(self, meeting: Meeting | None, because: str) -> None:
        """Begin to tell that the coordinator of this meeting is lost, as its node's silence or a connection says."""
        if meeting is None or not self._spec.run.alerts.enabled:
            return
        ranks_lost = RanksLost((), f"the coordinator on node {meeting.node} was lost", because, time.time())
        work = threading.Thread(target=self._work, args=(meeting, ranks_lost), name="paceline-loss", daemon=True)
        work.start()

    def _work(self, meeting: Meeting, lost: RanksLost) -> None:
        run_dir, run = run_directory(self._spec), self._spec.run
        sinks = sinks_here(run.alerts, self._say)
        while not self._is_stopped():
            with while_free(run_dir) as is_free:
                if find_meeting(run_dir) != meeting:
                    return  # another node coordinates the run, and tells of it; or this one has gone with its node
                if is_free:
                    watch = tell_of_loss(run, run_dir, name_of(self._spec), sinks, lost, self._say)
                    break
            time.sleep(LOOK_SECONDS)  # for the system to take the lock from whoever is gone
        else:
            return
        watch.hand_over(SINK_SECONDS)
