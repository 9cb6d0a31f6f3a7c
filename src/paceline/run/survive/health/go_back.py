"""Going back: a run that returns to its newest checkpoint and passes over the samples that a spike came from."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from paceline.run.loop.loader import StepBatch
from paceline.run.loop.resume import Progress, RunIdentity
from paceline.run.loop.step import StepStats
from paceline.run.loop.under_plan import UnderPlan
from paceline.run.survive.health.guard import RollBack, refuse_beyond
from paceline.run.survive.health.passed_over import Passage, PassedOver
from paceline.spec.journal.kinds import DecisionRecord

MOST_IDS = 4096  # in the journal


@dataclass(frozen=True)
class GoneBack:
    """Where a run goes on from, what of the step is told to its caller, and the decision for the journal."""

    progress: Progress
    stats: StepStats
    decisions: tuple[DecisionRecord, ...]
    is_restored: bool  # whether the state is that of a checkpoint, and not the one from before the step


def go_back(
    batch: StepBatch, spike: RollBack, under: UnderPlan, run: RunIdentity, passed: PassedOver, progress: Progress
) -> GoneBack:
    """Pass over a batch from now on, and put the run into the state of its newest checkpoint. Every rank calls it.

    Without a checkpoint the run goes on from before the step: the spike has changed no weight. Raises NumericalStop
    where the run has gone back too often.
    """
    refuse_beyond([each.step for each in passed.passages], batch.step, run.spec.run.health, spike.because)
    passage = Passage(batch.step, batch.position, batch.samples)
    passed.add(passage)
    restored = under.go_back(run)
    goes_on = restored.progress if restored else progress
    positions = batch.position + np.arange(batch.samples, dtype=np.int64)
    ids = under.order.ids(run.spec.task.seed, positions).tolist()
    evidence = {
        **spike.evidence,
        "passed_over": asdict(passage),
        "sample_ids": ids if len(ids) <= MOST_IDS else None,
        "checkpoint": str(restored.path) if restored else None,
    }
    after = f"back to step {goes_on.step}; the samples at positions {batch.position} to {positions[-1]} are passed over"
    decision = DecisionRecord("rollback", f"step {batch.step}", after, spike.because, evidence)
    stats = StepStats(
        step=batch.step,
        position_before=batch.position,
        position_after=batch.position + batch.samples,
        loss=spike.loss,
        weight=0.0,
        grad_norm=spike.grad_norm,
        lr=0.0,
        seconds={"total": 0.0},
        updated=False,
        stop_requested=False,
    )
    return GoneBack(goes_on, stats, (decision,), restored is not None)
