"""Rules of the loss: no number, a spike, a plateau."""

from __future__ import annotations

import math
import statistics
from collections import deque

from paceline.observe.alerts.rules.rule import AlertRule, Trouble
from paceline.observe.alerts.rules.run_seen import AlertSeen
from paceline.robust import middle_and_above
from paceline.spec.journal.kinds import RunStarted, StepRecord
from paceline.spec.journal.record import Record, plain_mean
from paceline.units import format_loss

WINDOW, LEAST_WINDOW = 64, 32
CALM_STEPS = 10  # with a finite loss, after which it is over
SHORTEST_PLATEAU = 200  # steps
FALLS = 2e-3  # of the loss in a window, that it falls at most where it is a plateau
SURE = 2.0  # standard errors
LOOKS = 10  # in each window


class NotFinite(AlertRule):
    """A loss that is no finite number. A gradient norm that is none may be fp16's, which looks for its scale."""

    name = "not_finite"

    def __init__(self, seen: AlertSeen) -> None:
        super().__init__(seen)
        self._found: tuple[int, float] | None = None
        self._calm = 0

    def add(self, record: Record) -> None:
        """Take a record."""
        if isinstance(record, StepRecord) and record.loss is not None:
            if math.isfinite(record.loss):
                self._calm += 1
            else:
                self._found, self._calm = (record.step or 0, record.loss), 0
        elif isinstance(record, RunStarted):
            self._found = None

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return the step whose loss was none."""
        if self._found is None or self._calm >= CALM_STEPS:
            return None
        step, loss = self._found
        advice = "run.health.on_nonfinite = 'skip' leaves such an update out; a lower learning rate, or bf16 for fp16"
        return Trouble(f"the loss of step {step} is {loss}", {"step": step, "loss": loss}, advice)


class LossSpike(AlertRule):
    """A loss far above those of the steps before."""

    name = "spike"

    def __init__(self, seen: AlertSeen) -> None:
        super().__init__(seen)
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._found: Trouble | None = None

    def add(self, record: Record) -> None:
        """Take a record."""
        if isinstance(record, RunStarted):
            self._window.clear()
            self._found = None
        if not isinstance(record, StepRecord) or record.loss is None or not math.isfinite(record.loss):
            return
        if len(self._window) >= LEAST_WINDOW:
            median, deviation = middle_and_above(self._window)
            deviations = (record.loss - median) / max(deviation, 1e-12)
            if deviations > self.spec.spike_deviations:
                above = f"{deviations:.0f} deviations above {median:.4g}"
                title = f"the loss of step {record.step} is {format_loss(record.loss)}, {above}"
                evidence = {"step": record.step, "loss": record.loss, "median": median, "deviations": deviations}
                advice = "run.health.on_spike = 'skip' or 'rollback' answers spikes by itself"
                self._found = Trouble(title, evidence, advice)
            elif deviations < self.spec.spike_deviations / 2:
                self._found = None
        self._window.append(record.loss)

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return the spike, until the loss is near the median again."""
        return self._found


class Plateau(AlertRule):
    """A loss that has not fallen for a part of the planned steps, as far as its noise lets that be told."""

    name = "plateau"

    def __init__(self, seen: AlertSeen) -> None:
        super().__init__(seen)
        self._losses: deque[float] = deque()
        self._fresh = 0  # since the last comparison
        self._found: Trouble | None = None

    def add(self, record: Record) -> None:
        """Take a record."""
        if isinstance(record, RunStarted):
            self._losses.clear()
            self._found = None
        if not isinstance(record, StepRecord) or record.loss is None or not math.isfinite(record.loss):
            return
        window = max(SHORTEST_PLATEAU, round(self.spec.plateau_share * (self.seen.planned_steps or 0)))
        self._losses.append(record.loss)
        self._fresh += 1
        if len(self._losses) > window:
            self._losses.popleft()
        if len(self._losses) == window and self._fresh >= window // LOOKS:
            self._fresh = 0
            self._compare(window)

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return the plateau that the last comparison found."""
        return self._found

    def _compare(self, window: int) -> None:
        losses, half = list(self._losses), window // 2
        before, after = losses[:half], losses[half:]
        fall = plain_mean(before) - plain_mean(after)
        error = math.sqrt(statistics.variance(before) / len(before) + statistics.variance(after) / len(after))
        most, level = fall + SURE * error, abs(plain_mean(before))
        if most > FALLS * level * (2.0 if self._found else 1.0):
            self._found = None
            return
        now = plain_mean(after)
        was = format_loss(plain_mean(before))
        title = f"the loss has not fallen in {window:,} steps: {format_loss(now)}, after {was}"
        evidence = {"steps": window, "fall": fall, "most_fall": most, "loss": now}
        advice = "stop here, or change the learning rate: task.evaluate.patience ends such runs by held-out loss"
        self._found = Trouble(title, evidence, advice)
