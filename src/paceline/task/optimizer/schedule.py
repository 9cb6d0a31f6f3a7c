"""The learning rate as a pure function of the step: nothing to save, nothing that could run fast."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from paceline.config.plain import object_path
from paceline.spec.steps.update import ScheduleSpec
from paceline.task.optimizer.own_rate import own_rate, sampled


@dataclass(frozen=True)
class Course:
    """All that the learning rate of a run depends on, counted in steps: equal courses are the same at every step."""

    kind: str
    peak: float
    final: float  # fraction of the peak
    steps: int
    warmup: int
    decay: int
    rates: tuple[tuple[int, float], ...] = ()  # of a function or scheduler of the user's: some steps and their rates

    def as_dict(self) -> dict[str, object]:
        """Return the course as plain data, which `Course(**data)` reads back."""
        plain = dataclasses.asdict(self)
        return plain if self.rates else {name: value for name, value in plain.items() if name != "rates"}

    def at(self, step: int) -> float:
        """Return the learning rate of a 1-based step."""
        schedule = ScheduleSpec(kind=self.kind, final=self.final)
        return learning_rate(schedule, self.peak, step, self.steps, self.warmup, self.decay)


def _path(kind: object) -> str:
    return kind if isinstance(kind, str) else object_path(kind)


def course_of(schedule: ScheduleSpec, peak: float, steps: int, warmup: int, decay: int) -> Course:
    """Return all that the learning rate of a run depends on."""
    if schedule.is_own:
        return Course(_path(schedule.kind), peak, schedule.final, steps, 0, 0, sampled(schedule, peak, steps))
    return Course(schedule.kind, peak, schedule.final, steps, warmup, decay)


def learning_rate(
    schedule: ScheduleSpec, peak: float, step: int, total_steps: int, warmup_steps: int, decay_steps: int
) -> float:
    """Return the learning rate of 1-based update `step` of `total_steps`.

    Warm-up is linear from peak/warmup_steps. Then: `constant`; `cosine` (Loshchilov & Hutter 2017, arXiv 1608.03983,
    eq. 5) or `linear` down to `final * peak` at the last step; `wsd` (warm-up, stable, decay; Hu et al. 2024, arXiv
    2404.06395) constant until the last `decay_steps`, then linear down to `final * peak`. Or the rate of a function or
    scheduler of the user's.
    """
    if schedule.is_own:
        return own_rate(schedule, peak, total_steps).at(step)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    low = schedule.final * peak
    after = total_steps - warmup_steps
    progress = min(1.0, (step - warmup_steps) / after) if after > 0 else 1.0
    if schedule.kind == "cosine":
        return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule.kind == "linear":
        return peak + (low - peak) * progress
    if schedule.kind == "wsd" and decay_steps > 0:
        into_decay = step - (total_steps - decay_steps)
        return peak + (low - peak) * min(1.0, max(0.0, into_decay / decay_steps))
    return peak
