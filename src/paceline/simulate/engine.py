"""Engine: a run of a job, event by event, from start to end.

Events are what befalls nodes (failures, preemptions, slowdowns) and nodes that come back. Between two of them all is
closed form: a job computes in cycles (cycle.py), or goes through the phases of coming back. Failures also strike jobs
that are coming back; the phases then begin anew. Failures are independent; a node of a switch's failure is one node.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from dataclasses import dataclass

from paceline.simulate.events import (
    DETECTION,
    KINDS,
    LOST,
    PREEMPTION,
    PRODUCTIVE,
    RESTART,
    RESTORE,
    SAVING,
    SHRUNK,
    SLOWDOWN,
    SLOWED,
    WAITING,
    Instant,
    Stretch,
    Strike,
    Strikes,
)
from paceline.simulate.outcome import RunOutcome
from paceline.simulate.policy import Policy
from paceline.simulate.scenario import Scenario
from paceline.simulate.segment import Segment

GIVE_UP = 10.0  # times the work: a run that takes longer does not get on, and is left unfinished
BACK, FOUND = "back", "found"


@dataclass
class _Phase:
    kind: str
    left: float
    stores: bool = False  # at its end all progress is in storage


def simulate_run(scenario: Scenario, policy: Policy, seed: int = 0, index: int = 0, record: bool = False) -> RunOutcome:
    """Return one run of the job under a policy. The same seed and index give the same failures to every policy.

    `record` keeps spans and instants, for a trace.
    """
    return _Run(scenario, policy, f"{seed}/{index}", record).outcome()


class _Run:
    def __init__(self, scenario: Scenario, policy: Policy, seed: str, record: bool) -> None:
        self.scenario, self.policy, self.cycle = scenario, policy, policy.cycle
        self.has_copies = self.cycle.copies > 1
        self.strikes = Strikes(scenario.causes, scenario.devices, f"{seed}/strikes")
        self.repairs, self.memories = random.Random(f"{seed}/repairs"), random.Random(f"{seed}/memories")
        self.record, self.spans, self.instants = record, list[Stretch](), list[Instant]()
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self.interruptions: Counter[str] = Counter()
        self.planned_stops = 0
        self.now, self.end = 0.0, min(scenario.horizon_seconds, GIVE_UP * scenario.work_seconds)
        self.active, self.spares, self.slow = scenario.nodes, policy.spares, 0
        self.held = self.busy = 0.0
        self.done = self.copied = self.stored = 0.0  # progress: in hand, in memory, in storage
        self.phases: list[_Phase] = []
        self.segment: Segment | None = None
        self.running_replicas = 0
        self.pending: list[tuple[float, int, str]] = []
        self.strike = self.strikes.next()

    def outcome(self) -> RunOutcome:
        work = self.scenario.work_seconds
        finished = work == 0
        while not finished and self.now < self.end:
            if self.phases:
                self._come_back()
                continue
            if self.segment is None:
                self._start()
            assert self.segment is not None
            finish, event = self.segment.end_for(work), self._next_event()
            if finish <= min(event, self.end):
                self._stop_computing(finish, work)
                finished = True
            elif event <= self.end:
                self._pass(event)
                self._handle()
            else:
                self._stop_computing(self.end)
        return RunOutcome(
            self.now, finished, self.seconds, dict(self.interruptions), self.planned_stops, self.held, self.busy,
            tuple(self.spans), tuple(self.instants),
        )  # fmt: skip

    # ---- time ----------------------------------------------------------------------------------------------------

    def _next_event(self) -> float:
        strike = self.strike.at if self.strike else math.inf
        return min(strike, self.pending[0][0] if self.pending else math.inf)

    def _pass(self, to: float) -> None:
        """Let time pass, and count the nodes that are held meanwhile."""
        self.held += (self.active + self.spares) * (to - self.now)
        if self.segment is not None:
            self.busy += self.active * (to - self.now)
        self.now = to

    def _come_back(self) -> None:
        """Go through the current phase, to its end or to the next event."""
        phase = self.phases[0]
        if phase.kind == WAITING:
            if self._ready():
                self.phases.pop(0)
                return
            phase.left = math.inf
        until = min(self.now + phase.left, self._next_event(), self.end)
        ends = until == self.now + phase.left
        self.seconds[phase.kind] += until - self.now
        self._note(phase.kind, self.now, until)
        phase.left -= until - self.now
        self._pass(until)
        if ends:
            self.phases.pop(0)
            if phase.stores:
                self.copied = self.stored = self.done
        elif until < self.end:
            self._handle()

    def _start(self) -> None:
        self.running_replicas = self.scenario.replicas_on(self.active)
        share = self.scenario.speed(self.running_replicas)
        self.segment = Segment(self.now, self.done, self.cycle, share, self._factor())

    def _stop_computing(self, at: float, progress: float | None = None) -> None:
        """End the segment at a time: book its seconds, and what of it is safe. `progress` where it is known exactly."""
        segment = self.segment
        assert segment is not None
        self._pass(at)
        work = segment.work_at(at)
        made = segment.made(work)
        self.seconds[PRODUCTIVE] += made.progress
        self.seconds[SHRUNK] += made.shrunk
        self.seconds[SLOWED] += made.slowed
        self.seconds[SAVING] += at - segment.begin - work
        self.done = segment.progress + made.progress if progress is None else progress
        self.stored = max(self.stored, segment.stored_at(at))
        self.copied = max(self.stored, self.copied, segment.copied_at(at) if self.has_copies else 0.0)
        self._note(PRODUCTIVE, segment.begin, at, f"{self.running_replicas} of {self.scenario.replicas} copies")
        self.segment = None

    def _note(self, kind: str, begin: float, end: float, note: str = "") -> None:
        if self.record and end > begin:
            self.spans.append(Stretch(kind, begin, end, note))

    # ---- what happens ---------------------------------------------------------------------------------------------

    def _handle(self) -> None:
        """Handle the event that is due now."""
        if self.pending and self.pending[0][0] <= self.now:
            _, _, what = heapq.heappop(self.pending)
            return self._node_back() if what == BACK else self._slow_found()
        strike, self.strike = self.strike, self.strikes.next()
        assert strike is not None
        if strike.draw * self.scenario.nodes < self.active:
            self._struck(strike)
        return None

    def _struck(self, strike: Strike) -> None:
        cause, idle = strike.cause, bool(self.phases) and self.phases[0].kind == WAITING
        if self.record:
            self.instants.append(Instant(cause.name, self.now, cause.component))
        if cause.component == SLOWDOWN:
            self.slow += 1
            self._schedule(self.scenario.slow_detection, FOUND)
            if self.segment is not None:
                self.segment.change(self.now, self._factor())
            return
        spot = cause.component == PREEMPTION
        if cause.evicts:
            mean = self.scenario.preemption_return if spot else self.scenario.repair_seconds
            self._lose_node(self.repairs.expovariate(1 / mean))
        if idle:
            return  # nothing runs that could be interrupted
        announced = cause.planned or (spot and self._save_seconds <= self.scenario.preemption_notice)
        if announced and self.phases:
            return  # the job is down already
        if announced:
            self._stop_planned(cause.name if spot else None)
        else:
            self._interrupt(cause.name, detection=0.0 if spot else self.policy.detection)

    def _interrupt(self, name: str, detection: float) -> None:
        """Stop at once: what is not safe is lost."""
        self.interruptions[name] += 1
        if self.segment is not None:
            self._stop_computing(self.now)
        if self.has_copies and self.memories.random() >= self.policy.memory_survives:
            self.copied = self.stored
        safe = max(self.stored, self.copied) if self.has_copies else self.stored
        from_memory = self.has_copies and self.copied > self.stored
        self.seconds[PRODUCTIVE] -= self.done - safe
        self.seconds[LOST] += self.done - safe
        self.done = safe
        restore = self.policy.memory_restore if from_memory else self.policy.restore
        self._go_through(_Phase(DETECTION, detection), _Phase(WAITING, 0.0), restore=restore)

    def _stop_planned(self, name: str | None = None) -> None:
        """Save, then stop: nothing is lost. A name counts it among the interruptions."""
        if name is None:
            self.planned_stops += 1
        else:
            self.interruptions[name] += 1
        self._stop_computing(self.now)
        self._go_through(
            _Phase(SAVING, self._save_seconds, stores=True), _Phase(WAITING, 0.0), restore=self.policy.restore
        )

    def _go_through(self, *first: _Phase, restore: float) -> None:
        self.phases = [*first, _Phase(RESTART, self.policy.restart), _Phase(RESTORE, restore)]

    @property
    def _save_seconds(self) -> float:
        return self.policy.stall + self.policy.write

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        if self.policy.on_loss == "shrink":
            return self.scenario.replicas_on(self.active) >= 1
        return self.active == self.scenario.nodes

    def _lose_node(self, back_in: float) -> None:
        self.active -= 1
        self._schedule(back_in, BACK)
        if self.spares:
            self.spares -= 1
            self.active += 1

    def _node_back(self) -> None:
        if self.record:
            self.instants.append(Instant("node back", self.now))
        if self.active == self.scenario.nodes:
            self.spares += 1
            return
        self.active += 1
        if self.segment is not None and self.scenario.replicas_on(self.active) > self.running_replicas:
            self._stop_planned()  # to grow

    def _slow_found(self) -> None:
        self.slow -= 1
        self._lose_node(self.repairs.expovariate(1 / self.scenario.repair_seconds))
        if self.segment is not None:
            self._stop_planned()

    def _factor(self) -> float:
        return self.scenario.slow_factor if self.slow else 1.0

    def _schedule(self, after: float, what: str) -> None:
        heapq.heappush(self.pending, (self.now + after, len(self.pending), what))
