"""The leak watch: what of a rank's memory grows from look to look, and how long that can go on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.units import format_bytes

LOOKS = 5  # one after the other in which memory must have grown each time
WARM_UP_STEPS = 20  # ranks are looked at after every one of a start's first ten steps
HALF = (LOOKS + 1) // 2  # looks by which a first and a last pace are told
LEAST_SHARE = 0.02  # of what is used, that it has grown by in those looks
LEAST_BYTES = 16 << 20
SLOWING = 0.5  # times its first pace: what grows more slowly by then fills up, as the pools of allocators do
AGAIN = 2.0  # times what it had grown by when it was told last: then it is told again


@dataclass(frozen=True)
class MemoryGrowth:
    """A component of memory that grows: since which step, and by how many bytes a step."""

    component: str
    since: int
    bytes: float
    bytes_per_step: float
    steps_left: float  # until the memory is full; infinity where its size is not known

    @property
    def because(self) -> str:
        """What has been seen, in one line."""
        grown = f"{self.component} has grown by {format_bytes(self.bytes)} since step {self.since}, at every look"
        full = (
            f", which fills the memory in about {self.steps_left:,.0f} steps" if math.isfinite(self.steps_left) else ""
        )
        return (
            f"{grown}: {format_bytes(self.bytes_per_step)} a step{full}; "
            "the next look names the tensors of which there is more, and so does `paceline trace RUN --memory`"
        )


class LeakWatch:
    """Looks at memory by component now and then.

    The first look is left out, and those close behind it: allocators fill their pools until then.
    """

    def __init__(self, usable_bytes: float = math.inf) -> None:
        self._usable = usable_bytes if math.isfinite(usable_bytes) else math.inf
        self._looks: list[tuple[int, dict[str, float]]] = []
        self._told: dict[str, float] = {}  # by component: the level from which on it is told again
        self._first: dict[str, float] = {}  # the level from which it had grown when it was told first
        self._began: int | None = None  # the step of the first look

    def begin_anew(self) -> None:
        """Forget what was seen: something that is known takes memory now, such as a trace."""
        self._looks.clear()
        self._began = None

    def look(self, step: int, components: Mapping[str, float]) -> MemoryGrowth | None:
        """Take what memory is spent on after a step, and return the component that grows most, where one does.

        The same one is returned again when it has grown twice as far.
        """
        if self._began is None:
            self._began = step
        if step < self._began + WARM_UP_STEPS:
            return None
        self._looks.append((step, dict(components)))
        self._looks = self._looks[-(LOOKS + 1) :]
        if len(self._looks) <= LOOKS:
            return None
        found = [growth for name in components if (growth := self._growth(name)) is not None]
        worst = max(found, key=lambda growth: growth.bytes, default=None)
        if worst is None:
            return None
        level = self._looks[-1][1][worst.component]
        if level < self._told.get(worst.component, 0.0):
            return None
        first = self._first.setdefault(worst.component, level - worst.bytes)
        self._told[worst.component] = first + AGAIN * (level - first)
        return worst

    def _growth(self, name: str) -> MemoryGrowth | None:
        values = [found.get(name, 0.0) for _, found in self._looks]
        if any(after <= before for before, after in itertools.pairwise(values)):
            return None
        (since, _), (step, now) = self._looks[0], self._looks[-1]
        grown, used = values[-1] - values[0], sum(now.values())
        if grown < max(LEAST_BYTES, LEAST_SHARE * used):
            return None
        if _pace(self._looks[-HALF:], name) < SLOWING * _pace(self._looks[:HALF], name):
            return None
        each = grown / max(1, step - since)
        return MemoryGrowth(name, since, grown, each, max(0.0, self._usable - used) / each)


def _pace(looks: Sequence[tuple[int, Mapping[str, float]]], name: str) -> float:
    """Return by how many bytes a step a component has grown between the first and the last of some looks."""
    (since, before), (step, now) = looks[0], looks[-1]
    return (now.get(name, 0.0) - before.get(name, 0.0)) / max(1, step - since)
