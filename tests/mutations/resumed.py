"""Mistakes in a restart that the story of a proof cannot see: a resumed run against an undisturbed one.

Both are real runs of the same ranks, with journal and checkpoints; the resumed one is started twice.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from planted import Patch, nothing, task_of
from tests_shared import SEQ_LEN, plan_of

from paceline.errors import VerificationFailed
from paceline.run import assemble as assemble_module
from paceline.run.loop.training import Training
from paceline.run.numerics.precision import LossScaler
from paceline.run.process.world import World, join_world
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import Plan
from paceline.spec.run import RunSpec
from paceline.spec.steps.update import ScheduleSpec
from paceline.supervise.told.brief import Brief
from paceline.units import Amount

STEPS, STOP = 6, 3  # a run's length, and where the disturbed one is stopped
RECORDED = {"samples": "sample_ids", "lr": "lr", "loss scale": "loss_scale", "loss": "loss"}  # in order of cause
History = list[dict[str, Any]]
Plant = Callable[[Patch, World], None]


@dataclass(frozen=True)
class Lost:
    """One mistake: its family, what is planted, into which case, and what must be named, from which step on."""

    family: str
    what: str
    case: str
    plant: Plant
    quantity: str
    step: int


PLANS: dict[str, Plan] = {
    "resumed": plan_of(Layout(dp_shard=2), batch=7),
    "resumed, fp16": plan_of(Layout(dp_replicate=2), batch=7, precision="fp16"),
    "resumed, dropout": plan_of(Layout(dp_replicate=2), batch=7),
}


def brief_of(plan: Plan) -> Brief:
    """Return what a planner would hand over, without a forecast."""
    return Brief(plan, STEPS, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())


def history(case: str, stops: tuple[int, ...], plant: Plant, world: World, folder: Path) -> History:
    """Return the step records of a run that is stopped after each of `stops` and started again, in order of writing."""
    task = dataclasses.replace(
        task_of("dropout" if case.endswith("dropout") else "copies"),
        schedule=ScheduleSpec(kind="cosine"), stop=Amount(STEPS, "steps"),
    )  # fmt: skip
    spec = Spec(task=task, run=RunSpec(record_samples=True, checkpoint_every=None, evaluate_every=None))
    run_dir = Path(world.share(tempfile.mkdtemp(dir=folder) if world.is_first else ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble_module, "scaler_for", lambda p: LossScaler(256.0, patience=2) if p == "fp16" else None)
        plant(patch, world)
        for stop in (*stops, STEPS):
            run = Training(spec, brief_of(PLANS[case]), world, run_dir)
            for batch in run:
                run.step(batch)
                if stop < STEPS and run.progress.step >= stop:
                    run.save()
                    break
    world.wait()
    return [record for record in read_journal(run_dir) if record["kind"] == "step"]


def departure(ours: History, reference: History) -> tuple[str, int] | None:
    """Return the first quantity that is not the reference's, to the last bit, and its step; None where all are."""
    for number, (mine, expected) in enumerate(zip(ours, reference, strict=False), 1):
        for quantity, field in RECORDED.items():
            if mine.get(field) != expected.get(field):
                return quantity, number
    return None if len(ours) == len(reference) else ("steps", 1 + min(len(ours), len(reference)))


# ---- what is planted -------------------------------------------------------------------------------------------------


def loss_scale_not_restored(patch: Patch, world: World) -> None:
    patch.setattr(LossScaler, "load", lambda self, state: None)


RESUMES = [
    Lost("resume state", "the loss scale is not restored", "resumed, fp16",
         loss_scale_not_restored, "scaler", STOP),
]  # fmt: skip


def resume_all() -> tuple[dict[str, tuple[str, int] | None], dict[str, tuple[str, int] | None]]:
    """Return where each planted mistake (by what is planted) and each control departs from an undisturbed run."""
    world = join_world("cpu", threads=1)
    folder = Path(world.share(tempfile.mkdtemp(prefix="resumed-") if world.is_first else ""))
    reference = {case: history(case, (), nothing, world, folder) for case in PLANS}
    controls = {case: departure(history(case, (STOP,), nothing, world, folder), reference[case]) for case in PLANS}
    found = {lost.what: _departs(lost, reference[lost.case], world, folder) for lost in RESUMES}
    if world.is_first:
        shutil.rmtree(folder)
    return found, controls


def _departs(lost: Lost, reference: History, world: World, folder: Path) -> tuple[str, int] | None:
    """Return where a planted mistake departs: what the resume itself refuses was made wrong by the step before it."""
    try:
        return departure(history(lost.case, (STOP,), lost.plant, world, folder), reference)
    except VerificationFailed as refused:
        return refused.what.split("'")[1], STOP
