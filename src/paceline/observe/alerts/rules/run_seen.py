"""What all rules want to know of a run: the plan, the last step, the length of steps, and how the run has ended."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from paceline.spec.amounts import in_steps
from paceline.spec.journal.kinds import RunEnded, RunStarted, StepRecord
from paceline.spec.journal.record import Record, number
from paceline.spec.watch.alerts import AlertsSpec
from paceline.units import parse_amount

STEPS_KEPT = 64
FIRST_STEPS = 3  # of a start, whose time says little of the others'


class AlertSeen:
    """The state of a run, from its records in the order in which they were written."""

    def __init__(self, spec: AlertsSpec) -> None:
        self.spec = spec
        self.start: RunStarted | None = None
        self.ended: RunEnded | None = None
        self.step = 0
        self.steps_made = 0  # in this start
        self.step_time: float | None = None  # when the last one was written
        self.seconds: deque[float] = deque(maxlen=STEPS_KEPT)

    def add(self, record: Record) -> None:
        """Take a record."""
        if isinstance(record, RunStarted):
            self.start, self.ended, self.step_time, self.steps_made = record, None, None, 0
            self.step = record.step or 0
            self.seconds.clear()
        elif isinstance(record, StepRecord):
            self.step, self.step_time = record.step or self.step, record.time
            self.steps_made += 1
            total = record.seconds.get("total")
            if total is not None and self.steps_made > FIRST_STEPS:
                self.seconds.append(total)
        elif isinstance(record, RunEnded):
            self.ended = record

    @property
    def median_seconds(self) -> float | None:
        """The median time of the last steps; None where too few were made."""
        return statistics.median(self.seconds) if len(self.seconds) >= FIRST_STEPS else None

    @property
    def planned_steps(self) -> int | None:
        """How many steps the run is to make."""
        steps = number(self.start.forecast.get("steps")) if self.start else None
        return int(steps) if steps else None

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are a CPU's."""
        device = self.start.cluster.get("device") if self.start else None
        return isinstance(device, Mapping) and device.get("kind") == "cpu"

    def figure(self, *keys: str) -> float | None:
        """Return a number of the start's forecast or cluster, such as ("forecast", "step_seconds", "value")."""
        found: object = vars(self.start) if self.start else {}
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return number(found)

    def option(self, *keys: str) -> Any:
        """Return an option of the spec that the start has on record, such as ("run", "checkpoint_every")."""
        found: object = self.start.spec if self.start else {}
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def steps_between(self, *keys: str) -> int | None:
        """Return the steps that an option such as `run.checkpoint_every` means; None where there are none."""
        text = self.option(*keys)
        if self.start is None or not isinstance(text, str) or text == "none":
            return None
        amount, told = parse_amount(text), self.start.facts
        batch = number(self.start.plan.get("batch_samples")) or 1.0
        items, samples = (number(told.get(name)) or 1.0 for name in ("items_per_sample", "samples"))
        return in_steps(amount, int(batch), int(items), int(samples))
