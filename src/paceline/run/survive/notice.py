"""Notices that a run is to end soon: a file that appears, a URL that answers, time or money that is used up.

They take the way of a stop signal: a flag, which the ranks agree on at a step boundary.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from paceline.cluster.grid.window import RunWindow, window_of
from paceline.run.survive.budget import RunBudgets
from paceline.run.survive.clouds.announced import NoticeUrl
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.run import RunSpec

LOOK_SECONDS = 1.0
URL_SECONDS = 5.0  # between two questions, and for an answer


class Notices:
    """Looks for notices beside training; `because` says what has come, or is empty.

    The first rank of each node looks for files and URLs: what a cloud tells a machine is of that machine alone. The
    first rank of a world keeps the hours and counts the budget.
    """

    def __init__(self, run: RunSpec, begun_after: float = 0.0, usd_before: float = 0.0) -> None:
        """`begun_after` are the seconds before this process that its supervisor had been at work, and `usd_before` is
        what they have cost: they count too."""
        self.because = ""
        self.is_over = False  # whether what has come ends the run for good: a budget that says so
        self._budget: RunBudgets | None = None
        self._run, self._began = run, time.monotonic() - begun_after
        self._usd, self._usd_per_second, self._entered = usd_before, math.nan, time.monotonic()
        self._watches = self._watches_here = False
        self._decisions: deque[DecisionRecord] = deque()  # of threads that look
        self._window: RunWindow | None = None  # of the first rank's
        self._closes = math.inf  # when the hours of the run end, in seconds since the epoch
        self._ended = threading.Event()

    def enter(
        self, usd_per_second: float, is_first: bool, budget: RunBudgets | None, is_first_here: bool = True
    ) -> None:
        """Go on in a world that costs so much; `budget` is the first rank's, made for this world.

        `is_first_here` is whether this is the first rank of its node. Where that was lost, on the machine of the first
        rank of the world, this one takes its place: a survivor keeps its device, and with that its number there.
        """
        now = time.monotonic()
        if math.isnan(self._usd_per_second):  # the first world of this process, at whose price its start counts
            self._usd_per_second = usd_per_second
        self._usd, self._entered = self._usd_spent(now), now
        self._usd_per_second = usd_per_second
        if budget is not None and self._budget is not None:
            budget.go_on_from(self._budget)
        self._budget = budget
        policy = self._run.recovery
        if is_first and not self._watches:
            self._watches = True
            if self._run.when.window:
                self._window = window_of(self._run.when)
                self._closes = _closing(self._window)
            if any(each.shared_by for each in self._run.budgets):
                self._watch(
                    self._ask_others, lambda: self._budget.next_look_seconds() if self._budget else LOOK_SECONDS
                )
        if (is_first_here or is_first) and not self._watches_here:
            self._watches_here = True
            if policy.notice_file:
                self._watch(lambda: _file_says(Path(policy.notice_file)), LOOK_SECONDS)
            if policy.notice_url:
                url = NoticeUrl(policy.notice_url, URL_SECONDS)
                self._watch(lambda: self._ask(url), URL_SECONDS)

    def look(self) -> str:
        """Return why the run is to stop, or "". It waits for nothing, and is asked once a step."""
        now = time.monotonic()
        if because := self._run.limit_reached(now - self._began, self._usd_spent(now)):
            return because
        if time.time() >= self._closes:
            return f"the hours of run.when ({self._run.when.window}) are over"
        if not self.because and self._budget is not None and (because := self._budget.look()):
            self.is_over = self._budget.is_over
            return because
        return self.because

    def of_this_machine(self) -> str:
        """Return what has announced the end of this machine, or "". A file is looked for at once, by any rank."""
        file = self._run.recovery.notice_file
        return self.because or (_file_says(Path(file)) if file else "")

    def take(self) -> list[DecisionRecord]:
        """Return the decisions since the last call: a budget of which a share is used up, a URL that tells nothing."""
        own = [self._decisions.popleft() for _ in range(len(self._decisions))]
        return [*own, *(self._budget.take() if self._budget is not None else [])]

    def steps_left(self) -> float | None:
        """Return how many steps the budgets still buy; None without one, and before the first step."""
        return self._budget.steps_left() if self._budget is not None else None

    def goes_on(self) -> float | None:
        """Return when the hours of the run begin again (seconds since the epoch); None where they are not over."""
        now = time.time()
        if self._window is None or self._window.is_open(now):
            return None
        opens = self._window.changes(now)
        return opens if math.isfinite(opens) else None

    def close(self) -> None:
        """Look no further."""
        self._ended.set()

    def _usd_spent(self, now: float) -> float:
        return self._usd + (now - self._entered) * self._usd_per_second

    def _ask_others(self) -> str:
        """Have the budget count what runs have spent by now that it is shared with; that alone is no notice."""
        if self._budget is not None:
            with contextlib.suppress(OSError):  # a file server that stumbles once must not end the watch
                self._budget.refresh()
        return ""

    def _ask(self, url: NoticeUrl) -> str:
        """Return what a URL announces; note why nothing would be heard of an end."""
        found = url.ask()
        if found.refusal:
            because = f"{url.url} tells nothing of this machine's end: {found.refusal}"
            self._decisions.append(DecisionRecord("notice", url.url, "the end comes without one", because, None))
        return found.notice

    def _watch(self, ask: Callable[[], str], every_seconds: float | Callable[[], float]) -> None:
        def work() -> None:
            while not self.because and not self._ended.wait(
                every_seconds() if callable(every_seconds) else every_seconds
            ):
                self.because = self.because or ask()

        threading.Thread(target=work, name="paceline-notice", daemon=True).start()


def _closing(window: RunWindow) -> float:
    """Return when the hours of a run end: this moment where they have ended."""
    now = time.time()
    return window.changes(now) if window.is_open(now) else now


def _file_says(path: Path) -> str:
    try:
        return f"the notice {path} has appeared" if path.exists() else ""
    except OSError:  # a file server that stumbles once must not end the watch
        return ""
