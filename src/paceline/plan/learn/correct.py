"""Learnt: what finished runs on this machine say of the plans of a task, for whole searches at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.plan.cost.columns import AXES, Columns, Flags, Floats, columns_of
from paceline.plan.learn.observation import Observation
from paceline.plan.learn.process import RUN_NOISE, SHARES, Fitted, Kinship, fit
from paceline.spec.plan import Plan

# Of a plan besides its layout: what runs of one plan agree in.
FIELDS = ("micro_batch", "recompute", "recompute_budget", "offload", "schedule", "virtual_stages")
ONE_DEVICE_CORE = 0.9  # a process that got less of its core was not alone
# A run of few steps sees one moment of its machine: relative standard deviation between moments, and the steps after
# which they have evened out. Steps of a quiet machine differ by STEADY; what they differ by beyond it moves their
# median as well, since what disturbs a machine outlasts a step. All three are assumed.
MOMENT_NOISE, SETTLED_STEPS, STEADY = 0.05, 20, 0.05
# Noise beyond which a run tells no plan from another: a choice that it would change is one of a few per cent.
TRUSTED_NOISE = 0.12
ALIKE = 0.5  # how alike two steps are in what decides them, below which that is said


@dataclass(frozen=True)
class LearntRun:
    """A run that was learnt from: what it measured beside what it is forecast to take today."""

    observation: Observation
    forecast_seconds: float
    time_spread: float  # standard deviation of the log that the forecast states of itself
    forecast_bytes: float
    memory_spread: float
    host_share: float = 0.0  # of the forecast step, what the host decides

    def as_dict(self) -> dict[str, object]:
        """Return for people and machines which run it was, and what it measured beside today's forecast."""
        found = self.observation
        return {
            "run": found.run,
            "date": found.date,
            "name": found.name,
            "plan": str(found.plan),
            "step_seconds": found.step_seconds,
            "forecast_step_seconds": self.forecast_seconds,
            "peak_bytes": found.peak_bytes,
            "forecast_peak_bytes": self.forecast_bytes,
            "core_share": found.core_share,
            "host_share": self.host_share,
        }

    @property
    def time_residual(self) -> float:
        """Measured over forecast, as a logarithm."""
        return float(np.log(self.observation.step_seconds / self.forecast_seconds))

    @property
    def memory_residual(self) -> float:
        """Measured over forecast, as a logarithm; NaN where the run's memory is not known."""
        return float(np.log((self.observation.peak_bytes or np.nan) / self.forecast_bytes))

    @property
    def time_noise(self) -> float:
        """Standard deviation of the log of the run's step time: between runs, of its steps, of a shared machine.

        Example: 3 steps that hardly differ have 0.05 x sqrt(20 / 3 - 1) = 0.12, and 50 steps 0.03.
        """
        found = self.observation
        of_median = 1.2533 * found.spread / max(1, found.steps) ** 0.5  # of normal values: sqrt(pi / 2) of the mean's
        few = MOMENT_NOISE * max(0.0, SETTLED_STEPS / max(1, found.steps) - 1) ** 0.5
        unsteady = max(0.0, found.spread - STEADY)
        share = found.core_share
        disturbed = -np.log(max(share, 0.01)) if share is not None and share < ONE_DEVICE_CORE else 0.0
        return float(np.sqrt(RUN_NOISE**2 + of_median**2 + few**2 + unsteady**2 + disturbed**2))

    @property
    def is_trusted(self) -> bool:
        """Whether the run tells one plan from another: it had steps enough, and its machine to itself."""
        return self.time_noise <= TRUSTED_NOISE


@dataclass(frozen=True)
class Learnt:
    """What was learnt for one task: its key and the runs, all of which have finite residuals of time."""

    task: str
    runs: tuple[LearntRun, ...]

    @property
    def name(self) -> str:
        """What the term is called in a forecast."""
        return f"learnt from {len(self.runs)} run{'s' if len(self.runs) > 1 else ''} here"

    def as_dict(self) -> dict[str, object]:
        """Return the task's key and every run with its noise: a run that counts for little has much."""
        noise = self.time.noise.tolist()
        runs = [{**run.as_dict(), "noise": loud} for run, loud in zip(self.runs, noise, strict=True)]
        return {"task": self.task, "shares": SHARES, "runs": runs}

    @cached_property
    def time(self) -> Fitted:
        """What the residuals of step times say."""
        return self._fitted(self.runs, [run.time_residual for run in self.runs], "time")

    @cached_property
    def memory(self) -> Fitted | None:
        """What the residuals of memory say; None where no run's memory is known."""
        known = self._with_memory
        return self._fitted(known, [run.memory_residual for run in known], "memory") if known else None

    @property
    def _with_memory(self) -> tuple[LearntRun, ...]:
        return tuple(run for run in self.runs if np.isfinite(run.memory_residual))

    def correct_time(self, columns: Columns, spreads: Floats, hosts: Floats) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of log(measured / forecast) of every plan's step time.

        `hosts` is which part of each plan's step the host decides: what a run of the other kind missed says little.
        Runs that are too short or disturbed move all such forecasts of the task alike, and only where there are no
        others: they change no choice between plans of one kind, and make no interval narrower.
        """
        kept = np.array([run.is_trusted for run in self.runs])
        same_bound = _same_bound(hosts, self._hosts)
        if not kept.any():
            return self._levels(same_bound), spreads
        return self._of_trusted.posterior((self.kinship(columns).value * same_bound)[:, kept], spreads)

    def correct_run(self, run: LearntRun) -> tuple[float, float]:
        """Return `correct_time` of the one plan of a run that these runs are without."""
        known = (np.array([each]) for each in (run.time_spread, run.host_share))
        mean, spread = self.correct_time(columns_of([run.observation.plan]), *known)
        return float(mean[0]), float(spread[0])

    def left_open(self, pair: Columns, spreads: Floats, hosts: Floats) -> float:
        """Return the standard deviation of the log of one plan's time over another's: what runs do not tell of a pair.

        Infinite where no run tells one plan from another. `hosts` is as in `correct_time`.
        """
        kept = np.array([run.is_trusted for run in self.runs])
        if not kept.any():
            return math.inf
        layout, alike = _compare(pair.take([1]), pair.plan(0))
        between = float(Kinship(np.ones(1), layout, layout & alike).value[0] * _same_bound(hosts, hosts)[0, 1])
        kinship = self.kinship(pair).value * _same_bound(hosts, self._hosts)
        return self._of_trusted.apart(kinship[:, kept], spreads, between)

    @cached_property
    def _of_trusted(self) -> Fitted:
        runs = tuple(run for run in self.runs if run.is_trusted)
        return self._fitted(runs, [run.time_residual for run in runs], "time")

    @cached_property
    def _hosts(self) -> Floats:
        return np.array([run.host_share for run in self.runs])

    def _levels(self, same_bound: Floats) -> Floats:
        """Return what all runs say of plans of this task in a layout that none of them had."""
        same = np.array([run.observation.task == self.task for run in self.runs])
        other = np.zeros_like(same)
        spreads = np.full(len(same_bound), np.median(self.time.spreads))
        return self.time.posterior(Kinship(same, other, other).value * same_bound, spreads)[0]

    def correct_memory(self, columns: Columns, spreads: Floats) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of log(measured / forecast) of every plan's memory, as runs tell them."""
        if self.memory is None:
            return np.zeros(len(columns)), spreads
        kept = np.isfinite([run.memory_residual for run in self.runs])
        return self.memory.posterior(self.kinship(columns).value[:, kept], spreads)

    def kinship(self, columns: Columns) -> Kinship:
        """Return what plans of the task have in common with the runs, as (plan x run) flags."""
        ran = [run.observation for run in self.runs]
        task = np.broadcast_to(np.array([one.task == self.task for one in ran]), (len(columns), len(ran)))
        layout, alike = np.empty(task.shape, dtype=bool), np.empty(task.shape, dtype=bool)
        for place, one in enumerate(ran):
            layout[:, place], alike[:, place] = _compare(columns, one.plan)
        return Kinship(task, layout, task & layout & alike)

    def words(self, columns: Columns, index: int, hosts: Floats | None = None) -> str:
        """Return which runs a plan's correction rests on; with `hosts` of step times, as in `correct_time`."""
        kin = self.kinship(columns)
        task, layout, plan = kin.task[index], kin.layout[index], kin.plan[index]
        counts = {
            "of this plan": plan,
            "of this task": task & ~plan,
            "of this layout": layout & ~task,
            "of others on this machine": ~task & ~layout,
        }
        told = ", ".join(f"{int(flags.sum())} {what}" for what, flags in counts.items() if flags.any())
        other = 0 if hosts is None else int((_same_bound(hosts, self._hosts)[index] < ALIKE).sum())
        if other:
            told += f"; {other} of them count for little, as not the same decides their steps: the host, or the device"
        weak = sum(not run.is_trusted for run in self.runs)
        if not weak:
            return told
        if weak < len(self.runs):
            return f"{told}; {weak} of them too short or disturbed to count"
        return f"{told}; too short or disturbed to tell plans apart, so all alike"

    def _fitted(self, runs: tuple[LearntRun, ...], residuals: list[float], what: str) -> Fitted:
        of_time, hosts = what == "time", np.array([run.host_share for run in runs])
        return fit(
            residuals,
            [run.time_spread if of_time else run.memory_spread for run in runs],
            [run.time_noise if of_time else RUN_NOISE for run in runs],
            _between([run.observation for run in runs]) * (_same_bound(hosts, hosts) if of_time else 1.0),
        )


def _between(ran: list[Observation]) -> Floats:
    """Return the kinship of runs with each other."""
    task = np.array([[one.task == other.task for other in ran] for one in ran])
    layout = np.array([[one.layout == other.layout for other in ran] for one in ran])
    rest = [(one.plan.precision, *(getattr(one.plan, name) for name in FIELDS)) for one in ran]
    alike = np.array([[one == other for other in rest] for one in rest])
    return Kinship(task, layout, task & layout & alike).value


def _same_bound(hosts: Floats, others: Floats) -> Floats:
    """Return how alike plans are to others in what decides their steps, 0 to 1: the host, or all else.

    It is the cosine of their shares of the two, so that a product of kinships is a covariance still. Example: a step
    that the host decides to 90 %, and one to 2 %: (0.9 x 0.02 + 0.1 x 0.98) / (0.906 x 0.980) = 0.13.
    """
    one, other = (np.stack([shares, 1 - shares], axis=1) for shares in (hosts, others))
    lengths = np.linalg.norm(one, axis=1)[:, None] * np.linalg.norm(other, axis=1)
    found: Floats = one @ other.T / lengths
    return found


def _compare(columns: Columns, plan: Plan) -> tuple[Flags, Flags]:
    """Return whether plans have another's layout, and whether they agree with it in the rest."""
    layout = np.ones(len(columns), dtype=bool)
    for axis in AXES:
        layout &= getattr(columns, axis) == getattr(plan.layout, axis)
    of_class = (columns.zero == plan.zero) & (columns.whole_gradients == plan.whole_gradients)
    layout &= (columns.state_degree == 1) | of_class
    alike = np.full(len(columns), (columns.precision, columns.common.offload) == (plan.precision, plan.offload))
    alike &= columns.recomputes(plan.recompute) & (columns.budget == plan.recompute_budget)
    alike &= columns.scheduled(plan.schedule)
    alike &= (columns.micro_batch == plan.micro_batch) & (columns.virtual_stages == plan.virtual_stages)
    return layout, alike


def shares_text() -> str:
    """Return how kinship is counted, for people."""
    return ", ".join(f"{name} {share:.0%}" for name, share in SHARES.items())
