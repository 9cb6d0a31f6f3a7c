"""The global batch as it grows during a run: by the Task's schedule, or by the gradient noise scale that is measured.

McCandlish et al. 2018, arXiv 1812.06162, appendix A.1: with the squared gradient norms of two batches, of b and B
samples at the same weights, |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b) and S = (|G_b|^2 - |G_B|^2) / (1/b - 1/B) have
the expectations of the true gradient's square and of the trace of its covariance over samples. S / |G|^2 is the simple
noise scale: at that batch a step makes half the progress that one on the true gradient would make. Both are averaged
before they are divided.

The small batch is the first samples of the global batch, whatever the layout, and the norms are sums over all ranks: so
every layout, and a run that is killed and resumed, decides alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.plan import Plan
from paceline.spec.steps.growth import BatchCourse, GrowthSpec, course_of, rate_factor, whole_samples
from paceline.spec.task import Task

SMALL_PART = 8  # of the global batch, that the small one is
WHAT = "global_batch"


class BatchGrowth:
    """Says how many samples each step has, and what the learning rate is multiplied by. Alike on all ranks."""

    def __init__(self, growth: GrowthSpec, course: BatchCourse, largest: int = 0) -> None:
        """`largest` is the largest batch of a growth by noise."""
        self._spec, self._course, self._largest = growth, course, largest
        self._grown: list[tuple[int, int]] = []  # (last step before, samples), of what noise has decided
        self._measured: deque[tuple[float, float]] = deque(maxlen=growth.measurements)  # (S, |G|^2)
        self._told = course.at(1, 0)  # the batch of which the journal knows
        self.decisions: list[DecisionRecord] = []

    def at(self, step: int, position: int) -> int:
        """Return the samples of update `step`, before which `position` samples are consumed."""
        grown = [samples for after, samples in self._grown if after < step]
        return grown[-1] if grown else self._course.at(step, position)

    def at_once(self, position: int, samples: int, micro_batch: int) -> int:
        """Return the micro-batch: a larger batch takes more passes."""
        return micro_batch

    def rate_factor(self, samples: int) -> float:
        """Return what the learning rate of a step of so many samples is multiplied by."""
        return rate_factor(self._spec.learning_rate, samples, self._course.first)

    def small(self, step: int, samples: int) -> int:
        """Return how many samples the small batch of a step has; 0 in a step in which nothing is measured."""
        if self._spec.by != "noise" or step % self._spec.measure_every or samples >= self._largest:
            return 0
        return max(1, samples // SMALL_PART) if samples > 1 else 0

    def begin(self, step: int, samples: int) -> None:
        """Note the batch of the step that comes, which the journal is told where it is another one."""
        if samples != self._told and self._spec.by == "schedule":
            evidence = {"step": step, "rule": "schedule", **self._rate(samples)}
            because = f"task.growth's schedule from step {step} on"
            self.decisions.append(DecisionRecord(WHAT, self._told, samples, because, evidence))
        self._told = samples

    def measured(self, step: int, samples: int, norm: float, small: int, small_norm: float) -> bool:
        """Take the gradient norms of a step and of its first `small` samples; return whether the batch grows."""
        if not (math.isfinite(norm) and math.isfinite(small_norm)):
            return False
        squares, first = norm**2, small_norm**2
        spread = (first - squares) / (1 / small - 1 / samples)
        self._measured.append((spread, (samples * squares - small * first) / (samples - small)))
        if len(self._measured) < (self._measured.maxlen or 0):
            return False
        mean_spread, mean_square = (sum(each[part] for each in self._measured) / len(self._measured) for part in (0, 1))
        # An estimate of the true gradient's square that is none: noise is all there is to see at this batch.
        noise = mean_spread / mean_square if mean_square > 0 else math.inf
        if not noise >= self._spec.noise_ratio * samples:
            return False
        after = min(self._largest, 2 * samples)
        evidence = {
            "step": step,
            "rule": "noise",
            "noise_scale_samples": noise if math.isfinite(noise) else None,
            "covariance_trace": mean_spread,
            "gradient_square": mean_square,
            "noise_ratio": self._spec.noise_ratio,
            "measurements": len(self._measured),
            "small_samples": small,
            **self._rate(after),
        }
        known = f"{noise:.4g} samples" if math.isfinite(noise) else "larger than can be told"
        because = f"after step {step} the gradient noise scale is {known}, and the batch has {samples}"
        self.decisions.append(DecisionRecord(WHAT, samples, after, because, evidence))
        self._grown.append((step, after))
        self._measured.clear()
        return True

    def take(self) -> list[DecisionRecord]:
        """Return the decisions since the last call."""
        found, self.decisions = self.decisions, []
        return found

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, as plain data."""
        return {"grown": [list(each) for each in self._grown], "told": self._told,
                "measured": [list(each) for each in self._measured]}  # fmt: skip

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what a checkpoint holds."""
        if state is None:
            return
        self._grown = [(int(after), int(samples)) for after, samples in state["grown"]]
        self._measured.clear()
        self._measured.extend((spread, square) for spread, square in state["measured"])
        self._told, self.decisions = int(state["told"]), []

    def _rate(self, samples: int) -> dict[str, object]:
        return {"learning_rate": self._spec.learning_rate, "rate_factor": self.rate_factor(samples)}


def growth_of(task: Task, plan: Plan, items_per_sample: int) -> BatchGrowth | None:
    """Return how a task's batch grows under a plan; None where it does not.

    Raises ConfigError for growth by noise that has no largest batch, or whose copies go on by themselves.
    """
    growth = task.growth
    if not growth.grows:
        return None
    course = course_of(growth, plan.batch_samples, items_per_sample)
    if growth.by == "schedule":
        return BatchGrowth(growth, course)
    if not plan.sync.is_plain:
        because = f"with {plan.sync} the norm of a step is that of copies that have gone apart"
        raise ConfigError("task.growth.by = 'noise'", because, 'plan.sync = "every-step", or growth by a schedule')
    if growth.largest is None:
        example = f'task.growth.largest = "{8 * plan.batch_samples} samples"'
        raise ConfigError("task.growth.by = 'noise'", "no largest batch is given", example)
    return BatchGrowth(growth, course, whole_samples(growth.largest, items_per_sample, "task.growth.largest"))
