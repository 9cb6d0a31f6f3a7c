"""What others have spent of the budgets that a run shares, for a page that is drawn again and again."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping

from paceline.account.budget_left import others_of
from paceline.observe.live.run import LiveRun

LOOK_SECONDS = 20.0  # between two looks, as a run itself looks
REST = 10.0  # times what a look took, for which none follows: many long journals are read less often


class SharedSpending:
    """Reads the journals of the runs beside one, for what they have spent of its budgets.

    The first answer is waited for; after that the newest one is given at once, while an older one is made anew.
    """

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._known: dict[str, Mapping[str, float]] = {}
        self._next: dict[str, float] = {}  # tag -> when to look again, by the monotonic clock

    def of(self, tag: str) -> Mapping[str, float]:
        """Return what the runs have spent that share a tag's value, by amount."""
        if tag not in self._known:
            self._look(tag)
        elif time.monotonic() >= self._next[tag]:
            self._next[tag] = math.inf
            threading.Thread(target=self._look, args=(tag,), name="paceline-others", daemon=True).start()
        return self._known[tag]

    def _look(self, tag: str) -> None:
        began = time.monotonic()
        try:
            self._known[tag] = others_of(self._run.starts[max(self._run.starts)].spec, self._run.run_dir)(tag)
        finally:
            took = time.monotonic() - began
            self._known.setdefault(tag, {})
            self._next[tag] = began + took + max(LOOK_SECONDS, REST * took)
