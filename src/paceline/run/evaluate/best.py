"""Which evaluation is the best so far, and whether so many without a better one end training.

Both are a function of the evaluations on record, so nothing is saved for them: a start that resumes a run, in whatever
world, reads the journal and goes on judging as if it had never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigError, suggestion
from paceline.run.loop.evaluate import EvaluationResult
from paceline.run.process.world import World
from paceline.spec.journal.kinds import DecisionRecord, EvaluationRecord
from paceline.spec.journal.reading import read_kind
from paceline.spec.journal.record import number
from paceline.spec.journal.records.decided import CALLED_OFF
from paceline.spec.watch.evaluate import LOSS, EvaluateSpec

EARLY = "early stopping"  # the `what` of the decision


@dataclass
class BestEvaluation:
    """Judges evaluations by one metric. Alike on all ranks."""

    spec: EvaluateSpec
    steps: int  # of the whole run
    values: dict[int, float] = field(default_factory=dict)  # of the metric, by step

    def add(self, step: int, measured: EvaluationResult) -> float:
        """Take note of an evaluation and return its value of the metric; raise ConfigError where it is not measured."""
        named = {LOSS: measured.loss, **measured.metrics}
        if self.spec.judged not in named:
            raise ConfigError(
                f"task.evaluate.metric = '{self.spec.metric}' is not measured",
                f"an evaluation gave {', '.join(named)}",
                suggestion(self.spec.judged, named),
            )
        self.values[step] = named[self.spec.judged]
        return named[self.spec.judged]

    def forget_after(self, step: int) -> None:
        """Forget evaluations of later steps, which the run has gone back before."""
        self.values = {at: value for at, value in self.values.items() if at <= step}

    def score(self, value: float) -> float:
        """Return a value of the metric as a number of which less is better; infinite where it is none."""
        return self.spec.sign * value if math.isfinite(value) else math.inf

    @property
    def best(self) -> tuple[int, int] | None:
        """The step of the best evaluation, and how many have followed it; None before the first."""
        found, since, least = None, 0, math.inf
        for step in sorted(self.values):
            score = self.score(self.values[step])
            if score < least - (self.spec.min_delta if math.isfinite(least) else 0.0):
                found, since, least = step, 0, score
            else:
                since += 1
        return None if found is None else (found, since)

    @property
    def is_over(self) -> bool:
        """Whether training ends early."""
        waited = self.best[1] if self.best else len(self.values)
        return bool(self.spec.patience) and waited >= self.spec.patience

    def decision(self) -> DecisionRecord:
        """Return what is decided where training ends early."""
        step, name = max(self.values), self.spec.judged
        if self.best is None:
            because = f"no evaluation of {len(self.values)} gave a finite {name}"
        else:
            at, since = self.best
            by = f" by {self.spec.min_delta:g}" if self.spec.min_delta else ""
            because = (
                f"{name} was {self.values[at]:.6g} after step {at}, and none of the {since} evaluations since"
                f" is better{by}: task.evaluate.patience = {self.spec.patience}"
            )
        evidence = {"metric": name, "values": {str(at): self.values[at] for at in sorted(self.values)}}
        return DecisionRecord(EARLY, f"{self.steps} steps", f"{step} steps", because, evidence)


def called_off(name: str, because: str, step: int, steps: int) -> DecisionRecord:
    """Return the decision of a callback that training ends after a step."""
    return DecisionRecord(
        CALLED_OFF, f"{steps} steps", f"{step} steps", f"{name}: {because}", {"step": step, "steps": steps}
    )


def judged_so_far(
    run_dir: Path, world: World, spec: EvaluateSpec, step: int, steps: int,
    known: tuple[BestEvaluation, bool] | None = None,
) -> tuple[BestEvaluation, bool]:  # fmt: skip
    """Return what judges evaluations of a run of so many steps, with those up to one, and if a callback has ended it.

    Every rank calls it. The first rank reads the journal; where that rank survives a world it gives what is `known` so
    far instead, since a long run's journal is not read while all wait.
    """
    values, stopped = dict[int, float](), False
    if world.is_first and (step or known):  # an evaluation may come before the first step
        judge, may_have_stopped = known or (None, True)
        if judge is None:
            values = values_on_record(run_dir, spec.judged, step)
        else:
            judge.forget_after(step)
            values = judge.values
        stopped = may_have_stopped and was_stopped(run_dir, step, steps)
    return BestEvaluation(spec, steps, world.share(values)), bool(world.share(stopped))


def was_stopped(run_dir: Path, step: int, steps: int) -> bool:
    """Return whether a callback has ended a run of so many steps after this step."""
    found = [record.evidence for record in read_kind(run_dir, DecisionRecord) if record.what == CALLED_OFF]
    return {"step": step, "steps": steps} in found


def values_on_record(run_dir: Path, metric: str, last_step: int) -> dict[int, float]:
    """Return the metric of the evaluations on record up to a step, by step; the newest record of each counts."""
    found: dict[int, float] = {}
    for record in read_kind(run_dir, EvaluationRecord):
        if record.step is not None and record.step <= last_step:
            named: Mapping[str, object] = {LOSS: record.loss, **(record.metrics or {})}
            value = number(named.get(metric))
            if metric in named:
                found[record.step] = math.nan if value is None else value
    return found
