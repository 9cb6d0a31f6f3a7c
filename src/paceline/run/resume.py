"""Resume: what a run keeps between starts, and what may change from one start to the next.

The machines may change, and so may the plan; the experiment may not. Checkpoints hold weights, optimizer state, the
loss scale and one number for the data: the position. Random numbers need nothing: they are a function of the seed
and the position.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline import __version__
from paceline.errors import ConfigError
from paceline.plan.layout import Layout
from paceline.plan.plan import Plan
from paceline.run.checkpoint import (
    CheckpointInfo,
    load_latest,
    materialise_optimizer_state,
    save_checkpoint,
    training_state,
)
from paceline.run.precision import LossScaler
from paceline.run.world import World
from paceline.spec import Spec, spec_to_dict
from paceline.task.task import DataSpec

# The parts of a Task that make it another experiment when they change.
FIXED = ("model", "data", "objective", "global_batch", "seed", "optimizer.name")


@dataclass(frozen=True)
class Progress:
    """How far training is: updates made and samples consumed."""

    step: int
    position: int


@dataclass(frozen=True)
class Restored:
    """The checkpoint a run goes on from."""

    path: Path
    progress: Progress
    notes: list[str] = field(default_factory=list)


def checkpoint_root(run_dir: Path) -> Path:
    """Return the folder that holds a run's checkpoints."""
    return run_dir / "checkpoints"


def save(
    run_dir: Path,
    spec: Spec,
    plan: Plan,
    fingerprint: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler | None,
    progress: Progress,
) -> CheckpointInfo:
    """Write a checkpoint of this moment. Every rank calls it."""
    materialise_optimizer_state(optimizer)
    extra = {
        "progress": dataclasses.asdict(progress),
        "scaler": scaler.state() if scaler else None,
        "data_fingerprint": fingerprint,
        "spec": spec_to_dict(spec),
        "plan": dataclasses.asdict(plan),
        "versions": {"paceline": __version__, "torch": str(torch.__version__)},
    }
    return save_checkpoint(
        checkpoint_root(run_dir),
        progress.step,
        training_state(model, optimizer),
        extra,
        keep_last=spec.run.keep_last,
    )


def restore(
    run_dir: Path,
    spec: Spec,
    plan: Plan,
    fingerprint: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler | None,
    world: World,
) -> Restored | None:
    """Load the newest sound checkpoint of a run into model and optimizer, or return None where there is none.

    Raises ConfigError where the task is not the one that the checkpoint belongs to.
    """
    root = checkpoint_root(run_dir)
    if not world.share("yes" if root.is_dir() else ""):
        return None
    materialise_optimizer_state(optimizer)
    found = load_latest(root, training_state(model, optimizer))
    if found is None:
        return None
    path, extra, skipped = found
    _check_same_experiment(spec_to_dict(spec)["task"], extra["spec"]["task"], run_dir)
    if fingerprint != extra["data_fingerprint"] and isinstance(spec.task.data, DataSpec):
        raise ConfigError(
            f"{run_dir} was trained on other data",
            f"fingerprint {extra['data_fingerprint']} in the checkpoint, {fingerprint} now",
            "restore the data, or start a new run in another run.dir",
        )
    if scaler is not None and extra["scaler"]:
        scaler.load(extra["scaler"])
    notes = [f"skipped {reason}" for reason in skipped]
    layout = dataclasses.asdict(plan.layout)
    if extra["plan"]["layout"] != layout:
        notes.append(f"resharded from layout {Layout(**extra['plan']['layout'])} to {plan.layout}")
    return Restored(path, Progress(**extra["progress"]), notes)


def _check_same_experiment(now: dict[str, Any], then: dict[str, Any], run_dir: Path) -> None:
    """Raise ConfigError where a fixed part of the task differs, naming it."""
    for key in FIXED:
        new, old = now, then
        for part in key.split("."):
            new, old = new[part], old[part]
        if new != old:
            raise ConfigError(
                f"{run_dir} holds a run of another task: task.{key} differs",
                f"it was {old!r} and is now {new!r}",
                "undo the change, or start a new run in another run.dir",
            )
