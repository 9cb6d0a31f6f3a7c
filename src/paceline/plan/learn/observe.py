"""What a finished run leaves for the next forecast: an observation, made from its journal alone. Torch-free."""

from __future__ import annotations

import datetime
import statistics
from pathlib import Path

from paceline.cluster.plain import cluster_from_dict
from paceline.errors import DataError
from paceline.plan.learn.observation import Observation, machine_key
from paceline.plan.learn.store import write_observation
from paceline.spec.cluster import Cluster
from paceline.spec.journal.kinds import (
    CheckpointRecord,
    DecisionRecord,
    MemoryRecord,
    RanksRecord,
    RunStarted,
    StepRecord,
)
from paceline.spec.journal.reading import read_records
from paceline.spec.journal.record import Record
from paceline.spec.journal.records.decided import MICRO_BATCH
from paceline.spec.journal.steady import BUSY, Step, unsteady
from paceline.spec.plan import plan_from_dict
from paceline.task.profile.plain import unpack_profile
from paceline.units import plural

FEWEST = 3  # steady steps that a step time is the median of
IQR_SIGMAS = 1.349  # interquartile range of a normal distribution in standard deviations


def observe_run(run_dir: Path) -> tuple[Observation, Cluster]:
    """Return what the run in `run_dir` measured under its last plan, and the cluster that it was planned on.

    The step time is the median of steady steps (spec/journal/steady.py). Raises DataError where the journal does not
    tell, with the reason.
    """
    records = list(read_records(run_dir))
    starts = [record for record in records if isinstance(record, RunStarted)]
    if not starts:
        raise DataError(f"{run_dir} tells no step time", "its journal has no start", "a run that `paceline train` made")
    last = starts[-1]
    if not last.profile:
        raise DataError(f"{run_dir} cannot be forecast again", "its journal holds no profile", "train once more")
    same = {start.attempt for start in starts if start.plan == last.plan}
    steps = [step for step in _as_planned(records, last) if step.attempt in same]
    if len(steps) < FEWEST:
        because = f"it has {plural(len(steps), 'steady step')} of the plan's batch, and {FEWEST} are needed"
        raise DataError(f"{run_dir} tells no step time", because, "train for more steps")
    if last.cluster.get("paces"):
        raise DataError(f"{run_dir} teaches nothing", "its devices differ, and a step is that of the slowest part",
                        "a run on devices of one kind")  # fmt: skip
    try:
        return _observation(run_dir, last, records, steps), cluster_from_dict(dict(last.cluster))
    except (KeyError, TypeError, ValueError) as error:
        because = f"its journal is of another version ({type(error).__name__}: {error})"
        raise DataError(f"{run_dir} cannot be forecast again", because, "train once more") from error


def remember_run(run_dir: Path) -> Path:
    """Keep what the run measured for the next forecast on this machine, and return the file.

    Raises DataError where the run tells nothing, StorageError where the cache cannot be written.
    """
    return write_observation(observe_run(run_dir)[0])


def _steady(records: list[Record]) -> list[StepRecord]:
    steps = [record for record in records if isinstance(record, StepRecord) and record.step is not None]
    busy = [(record.KIND, place) for record in records if record.KIND in BUSY and (place := _place(record))]
    left_out = unsteady(filter(None, map(_place, steps)), busy)
    return [step for step in steps if _place(step) not in left_out]


def _as_planned(records: list[Record], start: RunStarted) -> list[StepRecord]:
    """Return the steady steps of the plan's batch and micro-batch: either may have changed during the run."""
    batch, changed = start.plan.get("batch_samples"), dict[int | None, int]()
    for each in records:
        if isinstance(each, DecisionRecord) and each.what == MICRO_BATCH and "step" in (each.evidence or {}):
            changed.setdefault(each.attempt, each.evidence["step"])

    def is_planned(step: StepRecord) -> bool:
        before, after = step.position_before, step.position_after
        has_batch = batch is None or before is None or after is None or after - before == batch
        return has_batch and (step.step or 0) <= changed.get(step.attempt, step.step or 0)

    return [step for step in _steady(records) if is_planned(step)]


def _place(record: Record) -> Step | None:
    """Return the start and the step of a record, None where it has none."""
    step = getattr(record, "step", None)
    return None if record.attempt is None or step is None else (record.attempt, step)


def _observation(run_dir: Path, start: RunStarted, records: list[Record], steps: list[StepRecord]) -> Observation:
    cluster = cluster_from_dict(dict(start.cluster))
    totals = [step.seconds["total"] for step in steps]
    median = statistics.median(totals)
    quartiles = statistics.quantiles(totals, n=4, method="inclusive")
    told: list[float | None] = [step.peak_bytes for step in steps]
    told += [record.peak_bytes for record in records if isinstance(record, MemoryRecord)]
    peaks = [peak for peak in told if peak]
    return Observation(
        date=datetime.datetime.fromtimestamp(steps[-1].time or 0.0, datetime.UTC).isoformat(timespec="seconds"),
        run=str(run_dir),
        machine=machine_key(cluster),
        name=str(start.spec["task"]["name"]),
        profile=unpack_profile(dict(start.profile)),
        optimizer=start.optimizer,
        plan=plan_from_dict(dict(start.plan)),
        devices=cluster.devices,
        devices_per_node=cluster.devices_per_node,
        steps=len(steps),
        step_seconds=median,
        spread=(quartiles[2] - quartiles[0]) / IQR_SIGMAS / median,
        peak_bytes=max(peaks, default=None),
        staged=_has_staged(records, steps),
        core_share=_core_share(steps) if start.world_size == 1 else _core_share_of_ranks(records, start, cluster),
        forecast={term["name"]: float(term["value"]) for term in start.forecast["time"]},
        measured={name: statistics.median(step.seconds.get(name, 0.0) for step in steps) for name in steps[-1].seconds},
        versions={name: str(version) for name, version in start.versions.items()},
    )


def _has_staged(records: list[Record], steps: list[StepRecord]) -> bool:
    """Return whether a step came after a save beside training, whose copy then lay in memory.

    A run that was stopped before its first save has none, nor one whose host had no room for it.
    """
    last = {step.attempt: step.step or 0 for step in steps}
    beside = [each for each in records if isinstance(each, CheckpointRecord) and each.is_beside]
    return any((save.step or 0) < last.get(save.attempt, 0) for save in beside)


def _core_share(steps: list[StepRecord]) -> float | None:
    """Return the part of its computing time in which a process that waits for no peer had its core; None if unknown."""
    shares = []
    for step in steps:
        computing = step.seconds.get("forward_backward", 0.0) + step.seconds.get("reduce", 0.0)
        if step.waiting_seconds is None or not computing > 0:
            return None
        shares.append(1 - step.waiting_seconds / computing)
    return statistics.median(shares)


def _core_share_of_ranks(records: list[Record], start: RunStarted, cluster: Cluster) -> float | None:
    """Return the part of a step in which the training thread of a typical rank was not kept waiting for a core.

    None where no record tells, or where ranks share cores among themselves: then they wait for each other.
    """
    if cluster.device.core_share < 1:
        return None
    told = [record for record in records if isinstance(record, RanksRecord) and record.attempt == start.attempt]
    shares = []
    for record in told:
        median = {name: each.median for name in record.spreads if (each := record.spread(name)) is not None}
        passes = median.get("forward_backward", 0.0) + median.get("reduce", 0.0)
        if "queued_here" in median and passes > 0:
            shares.append(max(0.0, 1 - median["queued_here"] / passes))
    return statistics.median(shares) if shares else None
