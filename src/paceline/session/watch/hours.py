"""The hours of a run: a run waits for hours without devices, or ends with 75 and is begun again in the next hours."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.cluster.grid.window import RunWindow, window_of
from paceline.errors import Requeue
from paceline.plan.explain.hours import day_text
from paceline.spec.watch.when import WhenSpec
from paceline.supervise.blame import Outcome
from paceline.supervise.signals import StopFlag

LOOK_SECONDS = 1.0
Say = Callable[[str], None]


def in_hours(
    window: RunWindow, run: Callable[[], Outcome], say: Say,
    clock: Callable[[], float] = time.time, rest: Callable[[float], None] = time.sleep,
) -> Outcome:  # fmt: skip
    """Run in the hours of the window, again in the next ones where they end before the run does; return how it ended.

    A signal meanwhile ends the wait with 75, as the end of the hours does where the spec does not wait.
    """
    while True:
        if not window.is_open(clock()):
            if window.spec.outside == "requeue":
                say(f"hours    {closed_text(window, clock())}")
                return Outcome(Requeue.exit_code)
            if not _waited(window, say, clock, rest):
                return Outcome(Requeue.exit_code)
        outcome = run()
        if outcome.exit_code != Requeue.exit_code or window.is_open(clock()):
            return outcome


def refuse_outside(spec: WhenSpec) -> None:
    """Raise Requeue where a run begins outside of its hours, and nobody waits for it."""
    window = window_of(spec)
    if not window.is_open(now := time.time()):
        raise Requeue(closed_text(window, now))


def closed_text(window: RunWindow, now: float) -> str:
    """Return until when the hours are closed."""
    return f"the hours of run.when ({window.spec.window}) begin {day_text(window.changes(now))}"


def _waited(window: RunWindow, say: Say, clock: Callable[[], float], rest: Callable[[float], None]) -> bool:
    """Wait until the window opens; return whether it has, False where a signal has asked to stop."""
    opens = window.changes(clock())
    say(f"hours    waiting without devices: {closed_text(window, clock())}")
    flag = StopFlag().watch()
    try:
        while clock() < opens and not flag.because:
            rest(min(LOOK_SECONDS, max(0.0, opens - clock())))
    finally:
        flag.release()
    return not flag.because
