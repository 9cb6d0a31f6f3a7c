"""What a finished run leaves for the next forecast: an observation, made from its journal alone. Torch-free."""

from __future__ import annotations

import datetime
import statistics
from pathlib import Path
from typing import Any

from paceline.cluster.plain import cluster_from_dict
from paceline.errors import DataError
from paceline.plan.learn.observation import Observation, machine_key
from paceline.plan.learn.store import write_observation
from paceline.run.record.journal import read_journal
from paceline.run.record.steady import BUSY, unsteady
from paceline.spec.cluster import Cluster
from paceline.spec.plan import plan_from_dict
from paceline.task.profile.plain import unpack_profile

FEWEST = 3  # steady steps that a step time is the median of
IQR_SIGMAS = 1.349  # interquartile range of a normal distribution in standard deviations


def observe_run(run_dir: Path) -> tuple[Observation, Cluster]:
    """Return what the run in `run_dir` measured under its last plan, and the cluster that it was planned on.

    The step time is the median of steady steps (run/record/steady.py). Raises DataError where the journal does not
    tell, with the reason.
    """
    records = list(read_journal(run_dir))
    starts = [record for record in records if record["kind"] == "run_started"]
    if not starts:
        raise DataError(f"{run_dir} tells no step time", "its journal has no start", "a run that `paceline train` made")
    last = starts[-1]
    if not isinstance(last.get("profile"), dict):
        raise DataError(f"{run_dir} cannot be forecast again", "its journal holds no profile", "train once more")
    same = {start["attempt"] for start in starts if start.get("plan") == last["plan"]}
    steps = [step for step in _steady(records) if step["attempt"] in same]
    if len(steps) < FEWEST:
        because = f"it has {len(steps)} steady step(s) and {FEWEST} are needed"
        raise DataError(f"{run_dir} tells no step time", because, "train for more steps")
    try:
        return _observation(run_dir, last, records, steps), cluster_from_dict(last["cluster"])
    except (KeyError, TypeError, ValueError) as error:
        because = f"its journal is of another version ({type(error).__name__}: {error})"
        raise DataError(f"{run_dir} cannot be forecast again", because, "train once more") from error


def remember_run(run_dir: Path) -> Path:
    """Keep what the run measured for the next forecast on this machine, and return the file.

    Raises DataError where the run tells nothing, StorageError where the cache cannot be written.
    """
    return write_observation(observe_run(run_dir)[0])


def runs_under(folder: Path) -> list[Path]:
    """Return the directories of runs at or below a folder, in the order of their names."""
    if (folder / "journal").is_dir():
        return [folder]
    return sorted(found.parent for found in folder.glob("**/journal") if found.is_dir())


def _steady(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = [record for record in records if record["kind"] == "step"]
    busy = [(record["kind"], (record["attempt"], record.get("step"))) for record in records if record["kind"] in BUSY]
    left_out = unsteady(((step["attempt"], step["step"]) for step in steps), busy)
    return [step for step in steps if (step["attempt"], step["step"]) not in left_out]


def _observation(
    run_dir: Path, start: dict[str, Any], records: list[dict[str, Any]], steps: list[dict[str, Any]]
) -> Observation:
    cluster = cluster_from_dict(start["cluster"])
    totals = [step["seconds"]["total"] for step in steps]
    median = statistics.median(totals)
    quartiles = statistics.quantiles(totals, n=4, method="inclusive")
    spec = start["spec"]["task"]
    peaks = [step["peak_bytes"] for step in steps if step.get("peak_bytes")]
    peaks += [record["peak_bytes"] for record in records if record["kind"] == "memory" and record.get("peak_bytes")]
    terms = {term["name"]: float(term["value"]) for term in start["forecast"]["time"]}
    return Observation(
        date=datetime.datetime.fromtimestamp(steps[-1]["time"], datetime.UTC).isoformat(timespec="seconds"),
        run=str(run_dir),
        machine=machine_key(cluster),
        name=str(spec["name"]),
        profile=unpack_profile(start["profile"]),
        optimizer=str(start["optimizer"]),
        plan=plan_from_dict(start["plan"]),
        devices=cluster.devices,
        devices_per_node=cluster.devices_per_node,
        steps=len(steps),
        step_seconds=median,
        spread=(quartiles[2] - quartiles[0]) / IQR_SIGMAS / median,
        peak_bytes=max(peaks, default=None),
        core_share=_core_share(steps) if start["world_size"] == 1 else None,
        forecast=terms,
        measured={
            name: statistics.median(step["seconds"].get(name, 0.0) for step in steps) for name in steps[-1]["seconds"]
        },
        versions=dict(start["versions"]),
    )


def _core_share(steps: list[dict[str, Any]]) -> float | None:
    """Return the part of its computing time in which a process that waits for no peer had its core; None if unknown."""
    shares = []
    for step in steps:
        waiting = step.get("waiting_seconds")
        computing = step["seconds"].get("forward_backward", 0.0) + step["seconds"].get("reduce", 0.0)
        if waiting is None or not computing > 0:
            return None
        shares.append(1 - waiting / computing)
    return statistics.median(shares)
