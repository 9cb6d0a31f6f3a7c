"""The budget of a run: what all its starts have cost so far, when it is nearly used up, and what is left buys."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from paceline.spec.journal.kinds import ClockRecord, DecisionRecord, RunStarted
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.rates import AMOUNTS, rate_of
from paceline.spec.journal.reading import records_of_kind, starts_of
from paceline.spec.journal.timing.clock import clock_here, moved_since
from paceline.spec.journal.timing.held_devices import HeldTime, held_by_others, held_in
from paceline.spec.run import RunSpec
from paceline.spec.survive.budget import BUDGETS, BudgetSpec

DEVICE_SECONDS = "device_seconds"
SOON_SECONDS, SHARED_SECONDS = 1.0, 20.0  # between two looks at what other runs have spent of a budget: least, most
LOOKS_KEPT = 16  # whose answers tell how fast they spend
STEPS_KEPT = 33  # whose length tells that of the next
ROUNDING = 1e-9  # of a limit: amounts are sums of products


def spent_in(held: Sequence[HeldTime]) -> dict[str, float]:
    """Return every amount of BUDGETS over stretches of held time; one without a rate counts nothing."""
    total = dict.fromkeys((*AMOUNTS, DEVICE_SECONDS), 0.0)
    for each in held:
        start, seconds = each.start, each.seconds * each.devices
        total[DEVICE_SECONDS] += seconds
        for name in AMOUNTS:
            rate, _ = rate_of(name, start.forecast, start.cluster, start.world_size)
            total[name] += (rate or 0.0) * seconds
    return total


def spent_by_all(budget: BudgetSpec, run: RunSpec, run_dir: Path) -> dict[str, float]:
    """Return what is spent of every amount by a run, and by those that a budget of its is shared with."""
    return added(spent_in(held_in(run_dir)), spent_by_others(budget, run, run_dir))


def spent_by_others(budget: BudgetSpec, run: RunSpec, run_dir: Path) -> dict[str, float]:
    """Return what the runs have spent that a run's budget is shared with; nothing where it is shared with none."""
    shared = budget.shared_by
    return spent_in(held_by_others(run_dir, run.tags, shared) if shared else ())


def added(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of two spendings."""
    return {name: value + second[name] for name, value in first.items()}


def budget_of(run: RunSpec, run_dir: Path, planned: PlannedRecord, devices: int) -> RunBudgets | None:
    """Return the budgets of a run that goes on in a world of so many devices; None where the spec sets none.

    To be made anew in each world: the run's own records say what the ones before have cost.
    """
    if not run.budgets:
        return None
    held = held_in(run_dir)
    passed = max(0.0, time.time() - _clock_moved(run_dir) - held[-1].ended) if held else 0.0
    found = [RunBudget(each, held, planned.forecast, planned.cluster, devices, passed) for each in run.budgets]
    for budget, spec in zip(found, run.budgets, strict=True):
        budget.share(partial(spent_by_others, spec, run, run_dir))
    return RunBudgets(found)


def _clock_moved(run_dir: Path) -> float:
    """Return by how much the clock was set since the last record of a run, which nobody has noted yet."""
    newest = starts_of(run_dir)[-1][1]
    return moved_since(records_of_kind(newest, RunStarted.KIND, ClockRecord.KIND), clock_here())


class RunBudget:
    """Counts what a run costs, from what it had cost and the rates of the world that trains now.

    `passed` are seconds since the held time ended, which count as this world's.
    """

    def __init__(
        self,
        spec: BudgetSpec,
        held: Sequence[HeldTime],
        forecast: Mapping[str, object],
        cluster: Mapping[str, object],
        devices: int,
        passed: float = 0.0,
    ) -> None:
        self._spec, self._before, self._began = spec, spent_in(held), time.monotonic() - passed
        self._ask_others: Callable[[], dict[str, float]] = lambda: spent_in(())  # runs that the budget is shared with
        # When, and the answer. A thread adds to it while another reads: what belongs together comes at once.
        self._asked: deque[tuple[float, dict[str, float]]] = deque(maxlen=LOOKS_KEPT)
        self._looked: float | None = None  # the first moment at which a step was to begin
        # The forecast is of the cluster's own devices, which may be more than this world has.
        rates = {name: rate_of(name, forecast, cluster, None)[0] or 0.0 for name in AMOUNTS}
        self._per_second = {name: rate * devices for name, rate in {**rates, DEVICE_SECONDS: 1.0}.items()}
        self._steps, self._step_seconds = 0, 0.0  # made in this world, and what one took with all that lay between
        self._began_steps: deque[float] = deque(maxlen=STEPS_KEPT)  # the moments at which the last ones began
        self._told: set[str] = set()
        self._decisions: list[DecisionRecord] = []

    @property
    def is_for_good(self) -> bool:
        """Whether the run is over where it is used up, and not to be started again."""
        return self._spec.at_end == "stop"

    def share(self, ask: Callable[[], dict[str, float]]) -> None:
        """Count what others spend too, as `ask` tells it: now, and at each `refresh`."""
        self._ask_others = ask
        self.refresh()

    def refresh(self) -> None:
        """Ask what others have spent by now. It reads their journals, so it is for a thread beside training."""
        others = self._ask_others()
        self._asked.append((time.monotonic(), others))

    def next_look_seconds(self) -> float:
        """Return when to ask others again: soon where what is left lasts for a short time at the pace of all."""
        now = time.monotonic()
        left = [
            (limit - self._amount(name, now - self._began)) / rate
            for name, limit in self._spec.limits.items()
            if (rate := (self._per_second[BUDGETS[name][0]] + self._others_per_second(BUDGETS[name][0]))
                / BUDGETS[name][1])
        ]  # fmt: skip
        soon = min(left, default=math.inf) / 4 if len(self._asked) > 1 else 0.0
        return min(SHARED_SECONDS, max(SOON_SECONDS, soon))

    def spent(self) -> dict[str, float]:
        """Return what is spent of every budget that is set, in its unit."""
        passed = time.monotonic() - self._began
        return {name: self._amount(name, passed) for name in self._spec.limits}

    def look(self) -> str:
        """Return why the run is to end with the step that begins, or "".

        To be called before each step: one that uses the budget up is the last. A share that is used up is a decision.
        """
        now = time.monotonic()
        passed, because = now - self._began, ""
        self._looked = now if self._looked is None else self._looked
        self._step_seconds = step_seconds = (now - self._looked) / self._steps if self._steps else 0.0
        self._began_steps.append(now)
        next_seconds = self._next_seconds()
        for name, limit in self._spec.limits.items():
            spent, said = self._amount(name, passed), BUDGETS[name][2]
            if self._amount(name, passed + next_seconds) >= limit * (1 - ROUNDING):
                because = because or f"the budget of {said(limit)}{self._spec.text} is used up"
            elif spent >= self._spec.warn_at * limit and name not in self._told:
                self._told.add(name)
                self._decisions.append(self._warning(name, limit, spent, step_seconds))
        self._steps += 1
        return because

    def _next_seconds(self) -> float:
        """Return what the step that begins will take, as the last ones did: 0 while the first is all that is known.

        The first step of a world is far slower than those after it.
        """
        took = [after - before for before, after in itertools.pairwise(self._began_steps)]
        usual = took[1:] if self._steps == len(took) else took
        return statistics.median(usual) if usual else 0.0

    def steps_left(self) -> float | None:
        """Return how many steps what is left buys at the pace so far, by the budget that is used up first."""
        if not self._step_seconds:
            return None
        spent = self.spent()
        left = [
            max(0.0, limit - spent[name]) / rate / self._step_seconds
            for name, limit in self._spec.limits.items()
            if (rate := self._per_second[BUDGETS[name][0]] / BUDGETS[name][1])
        ]
        return min(left, default=None)

    def go_on_from(self, other: RunBudget) -> None:
        """Take over from the world before what was told already."""
        self._told |= other._told
        self._decisions = [*other.take(), *self._decisions]

    def take(self) -> list[DecisionRecord]:
        """Return the decisions since the last call."""
        found, self._decisions = self._decisions, []
        return found

    def _amount(self, name: str, passed: float) -> float:
        """Return what is spent of a budget, so many seconds after this world began; others go on at their pace."""
        amount, unit, _ = BUDGETS[name]
        asked = tuple(self._asked)
        since, others = (passed - (asked[-1][0] - self._began), asked[-1][1][amount]) if asked else (0.0, 0.0)
        others += _pace(asked, amount) * min(SHARED_SECONDS, max(0.0, since))
        return (self._before[amount] + others + passed * self._per_second[amount]) / unit

    def _others_per_second(self, amount: str) -> float:
        """Return how fast others spend, by what they had spent at the last looks."""
        return _pace(tuple(self._asked), amount)

    def _warning(self, name: str, limit: float, spent: float, step_seconds: float) -> DecisionRecord:
        amount, unit, said = BUDGETS[name]
        rate = self._per_second[amount] / unit
        left = (limit - spent) / rate if rate else 0.0
        buys = "no step was made yet"
        if step_seconds:
            buys = f"what is left buys {left / step_seconds:,.0f} steps at the pace so far"
        evidence = {"spent": spent, "limit": limit, "seconds_left": left}
        because = f"{said(spent)} of {said(limit)}{self._spec.text} is spent, {spent / limit:.0%}; {buys}"
        return DecisionRecord("budget", "spend", "spend on", because, evidence)


def _pace(asked: Sequence[tuple[float, Mapping[str, float]]], amount: str) -> float:
    """Return how fast an amount has grown from the first to the last of some answers, each with its moment."""
    if len(asked) < 2:
        return 0.0
    (began, first), (ended, last) = asked[0], asked[-1]
    return max(0.0, last[amount] - first[amount]) / (ended - began) if ended > began else 0.0


class RunBudgets:
    """The budgets of a run: its own, and the one that it shares. The first that is used up ends the run."""

    def __init__(self, budgets: Sequence[RunBudget]) -> None:
        self.budgets = tuple(budgets)
        self.is_over = False  # whether one that is used up ends the run for good

    def look(self) -> str:
        """Return why the run is to end with the step that begins, or "". Of two that meet in one step both are told."""
        found = [(because, each) for each in self.budgets if (because := each.look())]
        self.is_over = any(each.is_for_good for _, each in found)
        return ", and ".join(because for because, _ in found)

    def take(self) -> list[DecisionRecord]:
        """Return the decisions since the last call."""
        return [decision for each in self.budgets for decision in each.take()]

    def steps_left(self) -> float | None:
        """Return how many steps what is left buys, by the budget that is used up first."""
        return min((left for each in self.budgets if (left := each.steps_left()) is not None), default=None)

    def refresh(self) -> None:
        """Ask what others have spent by now."""
        for each in self.budgets:
            each.refresh()

    def next_look_seconds(self) -> float:
        """Return when to ask others again."""
        return min(each.next_look_seconds() for each in self.budgets)

    def go_on_from(self, other: RunBudgets) -> None:
        """Take over from the world before what was told already."""
        for mine, before in zip(self.budgets, other.budgets, strict=True):
            mine.go_on_from(before)
