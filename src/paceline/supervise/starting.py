"""How the ranks of a world are started: forked from the standby where there is one, else as processes of their own."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from paceline.errors import PacelineError, Requeue
from paceline.patience import Patience
from paceline.spec.journal.kinds import DecisionRecord
from paceline.supervise.groups import Process
from paceline.supervise.logs.pump import LogPump
from paceline.supervise.standby import Standby
from paceline.supervise.supervisor import StartsRank
from paceline.supervise.told.generation import FORKED, RESTARTED

# No process, memory or descriptor is left for a moment; what else a start fails by stays.
PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
START_SECONDS, AGAIN_SECONDS = 10.0, 0.2  # that a process is tried to be had, and between two tries
MOST_AGAIN = 3  # standbys in the place of ones that were ended: what ends them as often ends the next one too


class Starter:
    """Starts ranks in the quickest way that works, and says once why the quicker one does not."""

    def __init__(
        self,
        cold: StartsRank,
        standby: Standby | None,
        say: Callable[[str], None],
        because: str = "",
        logs: LogPump | None = None,
        again: Callable[[], Standby] | None = None,
    ) -> None:
        """`because` says why there is no standby, where that is not as the spec asks; `logs` keeps what ranks print.

        `again` makes another standby in the place of one that was ended: one import of torch, and not one a rank.
        """
        self._logs, self._again, self._left = logs, again, MOST_AGAIN
        self._cold, self._standby, self._say, self._because = cold, standby, say, because
        self._is_told = False

    def rung(self) -> str:
        """Return how the next ranks will be started. Waits until that is known."""
        before = self._standby
        if before is not None and before.has_forked and not before.is_ready() and self._again and self._left:
            self._left -= 1
            self._say(f"standby  {before.because}; another one imports torch")
            before.close()
            self._standby = self._again()
        if self._standby is not None and self._standby.is_ready():
            return FORKED
        self._because = self._standby.because if self._standby else self._because
        if self._because and not self._is_told:
            self._is_told = True
            self._say(f"standby  off: {self._because}; each rank imports torch by itself")
        return RESTARTED

    def decisions(self) -> tuple[DecisionRecord, ...]:
        """Return what was decided on that the spec has not asked for."""
        if not self._because:
            return ()
        return (DecisionRecord("standby", "ranks forked from a process", "each imports torch", self._because, None),)

    def __call__(self, place: dict[str, str]) -> Process:
        """Start a rank with these additions to its environment."""
        if self._logs is not None:
            place = {**place, **self._logs.place(place)}
        if self._standby is not None and self.rung() == FORKED:
            try:
                return self._standby.start(place)
            except OSError:  # it has ended meanwhile, and says so
                self.rung()  # which later ranks are forked by
        return self._alone(place)

    def _alone(self, place: dict[str, str]) -> Process:
        """Start a rank as a process of its own. Raises a PacelineError (75) where none can be had for some seconds."""
        patience = Patience(START_SECONDS)
        while True:
            try:
                return self._cold(place)
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                if patience.is_over:
                    failed = PacelineError(
                        f"rank {place.get('RANK', '')} of a run could not be started", str(error),
                        "end what takes the processes, and start again: it goes on from the newest checkpoint",
                    )  # fmt: skip
                    failed.exit_code = Requeue.exit_code
                    raise failed from error
            time.sleep(AGAIN_SECONDS)

    def close(self) -> None:
        """End the standby, and print the last of what ranks have said. No rank runs any more."""
        if self._standby is not None:
            self._standby.close()
        if self._logs is not None:
            self._logs.close()
