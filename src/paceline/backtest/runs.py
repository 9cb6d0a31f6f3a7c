"""Scores forecasts of one's own finished runs: by the formulas alone, and as each run would have been forecast after
learning from the runs before it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.backtest.backtest import FileResult, FileScore, Unscored
from paceline.backtest.price import Interval, Priced
from paceline.backtest.rows import Case
from paceline.backtest.schema import Origin, StepRow
from paceline.backtest.score import Scored, choice_score, memory_score, time_score
from paceline.plan.cost.memory.usable import usable_bytes
from paceline.plan.learn.correct import Learnt, LearntRun
from paceline.plan.learn.observation import Observation
from paceline.plan.learn.recall import forecast_runs
from paceline.spec.cluster import Cluster
from paceline.spec.forecast import Z80, Z95


@dataclass(frozen=True)
class FinishedRun:
    """A run's observation, and the cluster that it was planned on."""

    observation: Observation
    cluster: Cluster


def score_runs(folder: str, runs: Sequence[FinishedRun], refused: Sequence[tuple[str, str]]) -> FileResult:
    """Return the scores of the runs under a folder. `refused` are (directory, reason) of those that tell nothing."""
    ordered = sorted(runs, key=lambda run: (run.observation.date, run.observation.run))
    clusters = {id(run.observation): run.cluster for run in ordered}
    forecast = forecast_runs([run.observation for run in ordered], lambda one: clusters[id(one)])
    found = {id(one.observation): one for one in forecast}
    known = [one for run in ordered if (one := found.get(id(run.observation))) and math.isfinite(one.time_residual)]
    plain = [_scored(one, clusters[id(one.observation)], at, folder) for at, one in enumerate(known, start=1)]
    learnt = [_learnt(item, one, known[:at]) for at, (item, one) in enumerate(zip(plain, known, strict=True))]
    unscored = [Unscored(Origin(directory, 0, reason), reason) for directory, reason in refused]
    unscored += [
        Unscored(Origin(run.observation.run, 0), "a rate of the cluster is unknown")
        for run in ordered
        if not any(one.observation is run.observation for one in known)
    ]
    score = FileScore(
        file=folder,
        kind="own runs",
        rows=len(ordered) + len(refused),
        scored=len(plain),
        not_scored=dict(Counter(item.reason for item in unscored).most_common()),
        marks={},
        ignored_columns=(),
        step_time=time_score(plain),
        memory=memory_score(plain),
        choice=choice_score(plain),
        learnt=time_score(learnt),
    )
    return FileResult(score, tuple(plain), (), tuple(unscored))


def _scored(run: LearntRun, cluster: Cluster, line: int, folder: str) -> Scored:
    """Return a run as a row of a table would stand, with what the formulas say of it."""
    found, plan = run.observation, run.observation.plan
    row = StepRow(
        file=folder,
        line=line,
        source=folder,  # runs of one model under one folder are one choice
        model=found.name,
        accelerator=cluster.device.name,
        n_devices=found.devices,
        precision=plan.precision,
        seq_len=found.profile.tokens_per_sample,
        measured_step_s=found.step_seconds,
        measured_memory_gib=found.peak_bytes / 2**30 if found.peak_bytes else None,
    )
    case = Case(
        row=row,
        profile=found.profile,
        cluster=cluster,
        plans=(plan,),
        sequence_parallel=True,
        marks=(),
        flops_per_step=3 * found.profile.forward_flops * plan.batch_samples,
        step_seconds=found.step_seconds,
        time_excluded="",
        memory_bytes=found.peak_bytes,
        memory_kind="device",
    )
    fits = run.forecast_bytes * math.exp(Z80 * run.memory_spread) <= usable_bytes(cluster)
    interval = _interval(run.forecast_seconds, run.time_spread)
    return Scored(case, Priced(plan, interval, run.forecast_bytes, fits, ()))


def _learnt(item: Scored, run: LearntRun, earlier: Sequence[LearntRun]) -> Scored:
    """Return a scored run as it would have been forecast after the runs before it."""
    if not earlier:
        return item
    mean, spread = Learnt(run.observation.task, tuple(earlier)).correct_run(run)
    seconds = run.forecast_seconds * math.exp(mean)
    return replace(item, priced=replace(item.priced, step_seconds=_interval(seconds, spread)))


def _interval(value: float, spread: float) -> Interval:
    narrow, wide = math.exp(Z80 * spread), math.exp(Z95 * spread)
    return Interval(value, value / narrow, value * narrow, value / wide, value * wide)
