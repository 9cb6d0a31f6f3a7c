"""Elastic: how many devices the next world has, under which plan, and whether more of them would pay.

The task stays what it is, with its global batch, its samples and its schedule; the plan alone changes.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from paceline.errors import PacelineError
from paceline.patience import Patience
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.plan import Plan
from paceline.spec.survive.recovery import RecoverySpec
from paceline.supervise.again.devices_file import DevicesFile
from paceline.supervise.again.plans_ahead import Ahead
from paceline.supervise.told.brief import BRIEF_FILE, BRIEF_VARIABLE, Brief
from paceline.units import plural

LOOK_SECONDS = 1.0  # between two looks at the file
GLANCE_SECONDS = 0.05  # for the disk of that file to answer, while somebody has to look after ranks
ANSWER_SECONDS = 2.0  # and before a world is formed
GROWTH_SECONDS = 600.0  # for the plan of a larger world and its proof; the run goes on as it is where it takes longer


@dataclass(frozen=True)
class Replanned:
    """A plan for another number of devices: the brief of its ranks, and the decision for the journal."""

    brief: Brief
    decision: DecisionRecord


class Replan(Protocol):
    """Makes the plan for another number of devices."""

    def __call__(self, devices: int, now: Brief, gives_way: bool = False) -> Replanned:
        """Return the plan; `now` is the brief so far. Raises a PacelineError where so many devices have none.

        What `gives_way` is made ahead: the processes of its proof have the lowest priority.
        """


class Elastic:
    """The number of devices of a run, which follows the file that says how many there are."""

    def __init__(
        self, policy: RecoverySpec, brief: Brief, replan: Replan | None, there: Callable[[], int | None] = lambda: None
    ) -> None:
        """`there` returns how many devices are there, where the machines know it better than the file."""
        self._policy, self._first, self._brief, self._replan, self._there = policy, brief, brief, replan, there
        self._most = policy.max_devices or brief.plan.layout.devices
        self._next: Replanned | None = None
        self._looked, self._refused = -math.inf, 0
        self._ahead = Ahead(functools.partial(self._replan_for, gives_way=True))
        self._file = DevicesFile(policy.devices_file)
        self._growing = Ahead(self._replan_for)
        self._bound = (0, Patience(0.0))  # for the plan of a larger world, of so many devices
        self._prepared_for, self._asked = 0, -math.inf
        self.because = ""  # why the run cannot go on

    @property
    def usd_per_second(self) -> float:
        """What the world at hand costs; NaN where no price is known."""
        return self._brief.usd_per_second

    @property
    def record(self) -> PlannedRecord:
        """What is on record of the plan at hand."""
        return self._brief.record

    @property
    def devices_there(self) -> int:
        """How many devices are there, or are taken to be."""
        there = self._there()
        return self._brief.plan.layout.devices if there is None else there

    def environ(self, folder: Path) -> dict[str, str]:
        """Return what the environment of a generation's ranks says of their plan, left in its folder."""
        if self._brief is self._first and self._there() is None:  # which the ranks of this machine have
            return {}
        path = folder / BRIEF_FILE
        path.write_text(self._brief.to_json())
        return {BRIEF_VARIABLE: str(path)}

    def next_plan(self) -> bool:
        """Find the plan of the next world; return False where there are too few devices for any."""
        devices, now = self._wanted(ANSWER_SECONDS), self._brief.plan.layout.devices
        self._next = None
        if devices > now and self._growing.is_at_work(devices):  # what is only better is not waited for
            devices = now
        if devices == now:
            return True
        while devices >= self._policy.min_devices and devices != now:
            try:
                is_ahead = self._ahead.wait_for(devices)
                self._next = self._replan_for(devices)
                if is_ahead:
                    decision = self._next.decision
                    evidence = {**(decision.evidence or {}), "made_ahead": True}
                    self._next = replace(self._next, decision=replace(decision, evidence=evidence))
                return True
            except PacelineError as error:  # 3 devices may have no plan where 2 have one
                self.because = f"no plan for {plural(devices, 'device')}: {error.what}: {error.because}"
            devices -= 1
        if devices == now:
            return True
        self.because = self.because or f"{plural(devices, 'device')} left, and run.recovery.min_devices is " + str(
            self._policy.min_devices
        )
        return False

    def take(self, say: Callable[[str], None]) -> tuple[Plan, tuple[DecisionRecord, ...]]:
        """Return the plan of the next world, from now on this one's, and what was decided on the way."""
        if self._next is None:
            return self._brief.plan, ()
        self._brief, decision = self._next.brief, self._next.decision
        self._next, self._refused = None, 0
        say(f"replan   {decision.after}: {decision.because}")
        return self._brief.plan, (decision,)

    def prepare(self, unit: int, has_begun: Callable[[], bool]) -> None:
        """Begin to plan for the world that the loss of `unit` devices would leave, once the run makes steps."""
        now = self._brief.plan.layout.devices
        may = self._policy.prepare and self._is_elastic and self._prepared_for != now
        if not may or time.monotonic() - self._asked < LOOK_SECONDS:
            return
        self._asked = time.monotonic()
        if has_begun():
            self._prepared_for = now
            self._ahead.begin(range(now - unit, self._policy.min_devices - 1, -1))

    @property
    def _is_elastic(self) -> bool:
        """Whether the number of devices may become another."""
        return self._replan is not None and (bool(self._file) or self._there() is not None)

    def pays(self, done: Callable[[], int]) -> bool:
        """Return whether more devices are there than the run uses, and the steps that are left pay for the change.

        Their plan is made in a thread, and not waited for: who asks looks after the ranks meanwhile.
        """
        if not (self._file or self._there()) or time.monotonic() - self._looked < LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        devices = self._wanted(GLANCE_SECONDS)
        if devices <= self._brief.plan.layout.devices or devices == self._refused:
            return False
        is_made = self._growing.is_made(devices)
        if is_made is None and not self._is_bound_over(devices):
            self._growing.begin([devices])
            return False
        if is_made:
            found = self._replan_for(devices)
            if self._policy.worth is None:
                return True
            saved = (self._brief.step_seconds - found.brief.step_seconds) * (found.brief.steps - done())
            if saved > self._policy.worth:
                return True
        self._refused = devices  # until another number of devices is there
        return False

    def _is_bound_over(self, devices: int) -> bool:
        """Return whether the plan for so many devices has been in the making for longer than anybody wants."""
        if self._bound[0] != devices:
            self._bound = (devices, Patience(GROWTH_SECONDS))
        return self._bound[1].is_over

    def _replan_for(self, devices: int, gives_way: bool = False) -> Replanned:
        assert self._replan is not None, "who makes a run elastic says how it is planned"
        return self._replan(devices, self._brief, gives_way)

    def _wanted(self, wait_seconds: float = 0.0) -> int:
        """Return how many devices the next world is to have; the file's disk is waited for so long."""
        there = self._there()
        if there is not None and self._replan is not None:
            return min(there, self._most)
        if self._file and self._replan is not None:
            there = self._file.read(wait_seconds)
        return self._brief.plan.layout.devices if there is None or self._replan is None else min(there, self._most)
