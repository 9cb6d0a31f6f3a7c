"""Health as a run has it: steps are measured, judged on rank 0, and told once their numbers are on the host."""

from __future__ import annotations

from paceline.run.loop.step import Stepper, StepStats
from paceline.run.observe.health.judge import HealthJudge
from paceline.run.observe.health.meter import HealthMeter
from paceline.run.observe.health.on_the_way import HealthOnTheWay
from paceline.run.process.world import World
from paceline.spec.journal.watching import HealthSample

DIGITS = 6


class TrainingHealth:
    """A rank's part in watching the health of training. Every rank has one where `run.observe.health` is on."""

    def __init__(self, every: int, judge: HealthJudge) -> None:
        """Every `every`-th step is measured; `judge` goes on over worlds."""
        self._every, self._judge = every, judge
        self._meter: HealthMeter | None = None
        self._coming: HealthOnTheWay | None = None

    def of(self, stepper: Stepper, world: World) -> None:
        """Watch this stepper from now on. Every rank calls it. What was on its way from another one is let go."""
        self._meter = stepper.health = HealthMeter(stepper, world, self._every)
        self._is_first, self._coming = world.is_first, None

    def after(self, stats: StepStats) -> list[HealthSample]:
        """Return what is to be recorded after a step. Every rank calls it.

        That is the measurement of an earlier step, whose numbers have arrived by now, and what stands out in this step.
        """
        assert self._meter is not None
        found = self.rest()
        self._coming = self._meter.take(stats.step)
        if not self._is_first:
            return []
        load_min = stats.router.load_min if stats.router else None
        told = self._judge.step(stats.loss, stats.grad_norm, load_min)
        return [*found, *([HealthSample(stats.step, {}, {}, tuple(told), None)] if told else [])]

    def rest(self) -> list[HealthSample]:
        """Return the measurement that is still on its way, if any: where no step follows. The host waits for it."""
        coming, self._coming = self._coming, None
        if coming is None or not self._is_first:
            return []
        measured = coming.arrived()
        values = {block: {name: float(f"{value:.{DIGITS}g}") for name, value in own.items()}
                  for block, own in measured.values.items()}  # fmt: skip
        told = self._judge.measured(measured.values)
        return [HealthSample(measured.step, values, dict(measured.absent), tuple(told), measured.seconds)]
