"""Health as a run has it: steps are measured, judged on rank 0, and told."""

from __future__ import annotations

from paceline.run.loop.step import Stepper, StepStats
from paceline.run.observe.health.judge import HealthJudge
from paceline.run.observe.health.meter import HealthMeter
from paceline.run.process.world import World
from paceline.spec.journal.watching import HealthSample

DIGITS = 6


class TrainingHealth:
    """A rank's part in watching the health of training. Every rank has one where `run.observe.health` is on."""

    def __init__(self, every: int, judge: HealthJudge) -> None:
        """Every `every`-th step is measured; `judge` goes on over worlds."""
        self._every, self._judge = every, judge
        self._meter: HealthMeter | None = None

    def of(self, stepper: Stepper, world: World) -> None:
        """Watch this stepper from now on. Every rank calls it."""
        self._meter = stepper.health = HealthMeter(stepper, world, self._every)
        self._is_first = world.is_first

    def after(self, stats: StepStats) -> HealthSample | None:
        """Return what is to be recorded after a step: of one that was measured, or in which something stands out."""
        assert self._meter is not None
        measured = self._meter.take(stats.step)
        if not self._is_first:
            return None
        load_min = stats.router.as_dict()["load_min"] if stats.router else None
        told = self._judge.step(stats.loss, stats.grad_norm, load_min)
        if measured is None:
            return HealthSample(stats.step, {}, {}, tuple(told), None) if told else None
        told += self._judge.measured(measured.values)
        values = {block: {name: float(f"{value:.{DIGITS}g}") for name, value in own.items()}
                  for block, own in measured.values.items()}  # fmt: skip
        return HealthSample(stats.step, values, dict(measured.absent), tuple(told), measured.seconds)
