"""The global batch as it grows during a run: by the Task's schedule, or by the gradient noise scale that is measured.

McCandlish et al. 2018, arXiv 1812.06162, appendix A.1: with the squared gradient norms of two batches, of b and B
samples at the same weights, |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b) and S = (|G_b|^2 - |G_B|^2) / (1/b - 1/B) have
the expectations of the true gradient's square and of the trace of its covariance over samples. S / |G|^2 is the simple
noise scale: at that batch a step makes half the progress that one on the true gradient would make. Both are averaged
before they are divided.

The small batch is the first samples of the global batch, whatever the layout, and the norms are sums over all ranks: so
every layout decides alike, but for rounding. Of steps that a killed run makes again the journal has the decisions, and
they are repeated: the noise scale is a quotient of differences, and another layout might come to the other side.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.spec.journal.kinds import DecisionRecord, StepRecord
from paceline.spec.journal.reading import reading_of, records_back_to, starts_on
from paceline.spec.journal.records.decided import GLOBAL_BATCH
from paceline.spec.plan import Plan
from paceline.spec.steps.growth import BatchCourse, GrowthSpec, course_of, rate_factor, whole_samples
from paceline.spec.task import Task

SMALL_PART = 8  # of the global batch, that the small one is
Followed = Mapping[tuple[int, int], int]  # by step and the position before it: the samples of the step that followed


class BatchGrowth:
    """Says how many samples each step has, and what the learning rate is multiplied by. Alike on all ranks."""

    def __init__(self, growth: GrowthSpec, course: BatchCourse, largest: int = 0) -> None:
        """`largest` is the largest batch of a growth by noise."""
        self._spec, self._course, self._largest = growth, course, largest
        self._grown: list[tuple[int, int]] = []  # (last step before, samples), of what noise has decided
        self._measured: deque[tuple[float, float]] = deque(maxlen=growth.measurements)  # (S, |G|^2)
        self._followed: Followed = {}  # of steps that earlier starts have made
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
            self.decisions.append(DecisionRecord(GLOBAL_BATCH, self._told, samples, because, evidence))
        self._told = samples

    @property
    def measures(self) -> bool:
        """Whether the batch grows by a measured noise scale, and not by a schedule."""
        return self._spec.by == "noise"

    def repeat(self, followed: Followed) -> None:
        """Decide after steps that are made again as the journal says, see `followed_before`. Every rank calls it."""
        self._followed = followed

    def measured(self, step: int, position: int, samples: int, norm: float, small: int, small_norm: float) -> bool:
        """Take the gradient norms of a step and of its first `small` samples; return whether the batch grows.

        The step began at a position. One that was made before is followed by the batch that followed it then.
        """
        if math.isfinite(norm) and math.isfinite(small_norm):
            squares, first = norm**2, small_norm**2
            spread = (first - squares) / (1 / small - 1 / samples)
            self._measured.append((spread, (samples * squares - small * first) / (samples - small)))
            is_known = len(self._measured) == self._measured.maxlen
        else:
            is_known = False
        count = max(1, len(self._measured))
        mean_spread, mean_square = (sum(each[part] for each in self._measured) / count for part in (0, 1))
        # An estimate of the true gradient's square that is none: noise is all there is to see at this batch.
        noise = mean_spread / mean_square if mean_square > 0 else math.inf
        after = min(self._largest, 2 * samples) if is_known and noise >= self._spec.noise_ratio * samples else samples
        before = self._followed.get((step, position))
        after = after if before is None else before
        if after <= samples:
            return False
        evidence = {
            "step": step,
            "position": position,
            "rule": "noise",
            "noise_scale_samples": noise if math.isfinite(noise) else None,
            "covariance_trace": mean_spread,
            "gradient_square": mean_square,
            "noise_ratio": self._spec.noise_ratio,
            "measurements": len(self._measured),
            "small_samples": small,
            "repeated": before is not None,
            **self._rate(after),
        }
        known = f"{noise:.4g} samples" if math.isfinite(noise) else "larger than can be told"
        because = f"after step {step} the gradient noise scale is {known}, and the batch has {samples}"
        because += "; an earlier start has decided so" if before is not None else ""
        self.decisions.append(DecisionRecord(GLOBAL_BATCH, samples, after, because, evidence))
        self._grown.append((step, after))
        self._measured.clear()
        return True

    def take(self) -> list[DecisionRecord]:
        """Return the decisions since the last call."""
        found, self.decisions = self.decisions, []
        return found

    def state(self) -> dict[str, object]:
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


def followed_before(run_dir: Path, step: int, fingerprint: str | None = None) -> dict[tuple[int, int], int]:
    """Return which batch followed the steps after `step` that earlier starts of a run have made on the same data: see
    `Followed`.

    That is what the step after it had, or what was decided where there was none. Of a step made several times the last
    counts, and a run that went back and passed over samples comes to later steps at other positions.
    """
    found: dict[tuple[int, int], int] = {}
    with reading_of(run_dir):
        starts = [records_back_to(path, step) for _, path in starts_on(run_dir, fingerprint)]
    for records in starts:
        last: dict[str, Any] = {}
        for record in records:
            if record["kind"] == StepRecord.KIND:
                if last and last["step"] == record["step"] - 1:
                    found[last["step"], last["position_before"]] = record["position_after"] - record["position_before"]
                last = record
            elif record["kind"] == DecisionRecord.KIND and record.get("what") == GLOBAL_BATCH:
                evidence = record.get("evidence") or {}
                if evidence.get("rule") == "noise" and "position" in evidence:
                    found[evidence["step"], evidence["position"]] = record["to"]
    return {place: samples for place, samples in found.items() if place[0] > step}


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
    if course.first < 2:
        because = "a batch of one sample has no part whose gradient could be held against the whole one's"
        raise ConfigError("task.growth.by = 'noise'", because, "a task.global_batch of two samples or more")
    if growth.largest is None:
        example = f'task.growth.largest = "{8 * plan.batch_samples} samples"'
        raise ConfigError("task.growth.by = 'noise'", "no largest batch is given", example)
    return BatchGrowth(growth, course, whole_samples(growth.largest, items_per_sample, "task.growth.largest"))
