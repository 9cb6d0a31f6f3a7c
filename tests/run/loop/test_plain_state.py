"""What a checkpoint holds as plain data is read back as it was written, or the resume says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.errors import VerificationFailed
from paceline.run.loop.training import Training
from paceline.run.numerics.precision import LossScaler
from paceline.run.process.world import World
from paceline.run.updates.growth import BatchGrowth
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.steps.growth import GrowthSpec
from paceline.supervise.told.brief import Brief
from paceline.units import Amount

BATCH = 12
NOISE = GrowthSpec(by="noise", largest=Amount(96, "samples"), measure_every=1, measurements=4)


def training(run_dir: Path, steps: int, precision: str = "fp32", **task: Any) -> Training:
    run = RunSpec(checkpoint_every=Amount(2, "steps"), evaluate_every=None)
    plan = plan_of(Layout(), batch=BATCH, precision=precision)
    brief = Brief(plan, steps, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    made = decoder_task(stop=Amount(steps, "steps"), **task)
    spec = Spec(task=made, cluster=ClusterSpec(learn=False), run=run)
    return Training(spec, brief, World(0, 1, 0, torch.device("cpu")), run_dir)


def changed_load(kind: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., None]:
    load = kind.load
    return lambda self, state: load(self, change(dict(state)))


@pytest.mark.parametrize(
    ("kind", "change", "options"),
    [
        (LossScaler, lambda state: {**state, "scale": 2 * state["scale"]}, {"precision": "fp16"}),
        (BatchGrowth, lambda state: {**state, "measured": state["measured"][1:]}, {"growth": NOISE}),
        (BatchGrowth, lambda state: {**state, "grown": [[7, 24]]}, {"growth": NOISE}),
    ],
    ids=["scale", "measurements", "growth"],
)
def test_what_is_read_otherwise_than_it_was_written_is_no_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, change: Any, options: dict[str, Any]
) -> None:
    run = training(tmp_path, 2, **options)
    for batch in run:
        run.step(batch)
    assert training(tmp_path, 2, **options).progress.step == 2, "as it was written"
    monkeypatch.setattr(kind, "load", changed_load(kind, change))
    with pytest.raises(VerificationFailed, match="is not the one that was saved"):
        training(tmp_path, 2, **options)
