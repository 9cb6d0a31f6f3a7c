"""Samples that get longer in the middle of a run: ranks go on with a smaller micro-batch before the first of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks
from runs import records_of, steps_of
from tests_shared import SEQ_LEN, PaddedText, decoder_task, plan_of, world_here

from paceline.run.loop.training import Training
from paceline.run.memory.spent import MemoryMeter
from paceline.run.process.world import World
from paceline.run.survive.health import pressure
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import PlanSpec
from paceline.spec.run import RunSpec
from paceline.supervise.told.brief import Brief
from paceline.task.data.order.of_source import FiledOrder
from paceline.units import Amount

STEPS, BATCH, SHORT, MICRO = 16, 8, 4, 4
LONGER_AFTER = 13  # steps: none of the first ten, after which memory is looked at in any case
USED, HELD, FREE = 100, 60, 80


class GetsLonger(PaddedText):
    """Rows that are padded to the longest of their batch: short ones, and long ones from a step on."""

    samples = STEPS * BATCH
    order = FiledOrder(STEPS * BATCH)
    lengths = np.where(np.arange(STEPS * BATCH) < LONGER_AFTER * BATCH, SHORT, SEQ_LEN)

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return the rows, cut to the longest."""
        found = super().read(ids, positions)
        longest = int(self.lengths[ids].max())
        labels = found["labels"][:, :longest].clone()
        labels[:, 0] = 1  # a row learns something
        return {"tokens": found["tokens"][:, :longest], "labels": labels}


def _train(folder: str, memory: str) -> None:
    """Train on two ranks; the second one's memory is `memory`: "ample", "short" or "plain" (not looked at)."""
    world = world_here()
    free = FREE if world.rank == 1 and memory == "short" else 10**6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryMeter, "recent_bytes", lambda self: USED)
        patch.setattr(MemoryMeter, "now_bytes", lambda self: USED)
        patch.setattr(pressure, "free_bytes", lambda device: (free, "a test's limit"))
        patch.setattr(pressure, "held_bytes", lambda model, optimizer: {"weights": HELD})
        task = decoder_task(stop=Amount(STEPS, "steps"), data=GetsLonger(), global_batch=Amount(BATCH, "samples"))
        plan = plan_of(Layout(dp_replicate=2), batch=BATCH, micro_batch=MICRO, precision="fp64")
        asked = PlanSpec() if memory == "plain" else PlanSpec(micro_batch="auto")  # type: ignore[arg-type]
        run = RunSpec(checkpoint_every=None, evaluate_every=None, record_samples=True, check_every=Amount(100, "steps"))
        nan = math.nan
        brief = Brief(plan, STEPS, SEQ_LEN, "tokens", "cpu", 1, 1.0, nan, 1.0, nan, PlannedRecord())
        spec = Spec(task=task, plan=asked, cluster=ClusterSpec(learn=False), run=run)
        training = Training(spec, brief, world, Path(folder))
        for batch in training:
            assert len(batch.micro_batches) == (2 if memory == "short" and batch.step > LONGER_AFTER else 1)
            training.step(batch)


def micro_batches(folder: Path) -> list[dict[str, Any]]:
    return [each for each in records_of(folder, "decision") if each["what"] == "micro_batch"]


def test_the_micro_batch_is_halved_before_the_first_longer_sample_and_the_gradients_are_the_same(
    tmp_path: Path,
) -> None:
    """Rank 1 would use 60 + 40 x 4 of 180 bytes; with half the rows 60 + 80, which is below the limit of 0.92."""
    for memory in ("plain", "ample", "short"):
        (tmp_path / memory).mkdir()
        run_ranks(_train, 2, str(tmp_path / memory), memory)
    assert micro_batches(tmp_path / "plain") == micro_batches(tmp_path / "ample") == []
    (told,) = micro_batches(tmp_path / "short")
    assert (told["from"], told["to"]) == (MICRO, MICRO // 2)
    assert told["evidence"]["step"] == LONGER_AFTER and told["evidence"]["rank"] == 1
    growth = SEQ_LEN / SHORT
    assert told["evidence"]["growth"] == growth
    assert told["evidence"]["part"] == pytest.approx((HELD + (USED - HELD) * growth) / (USED + FREE))
    assert f"whose longest sample is {growth:.3g} times as long as any before" in told["because"]
    for own, other in zip(steps_of(tmp_path / "short"), steps_of(tmp_path / "plain"), strict=True):
        assert own["sample_ids"] == other["sample_ids"] and own["loss"] == pytest.approx(other["loss"], rel=1e-10)
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-10)


def test_growth_is_told_once_of_the_longest_so_far() -> None:
    watch = pressure.MemoryPressure(World(0, 1, 0, torch.device("cpu")), None, None, 0.9)  # type: ignore[arg-type]
    assert [watch.growth(*each) for each in ((4, 4), (4, 8), (8, 6), (6, 8), (8, 12))] == [1, 2, 1, 1, 1.5]
    unknown = pressure.MemoryPressure(World(0, 1, 0, torch.device("cpu")), None, None, 0.9)  # type: ignore[arg-type]
    assert unknown.growth(0, 0) == 1.0, "the data do not say lengths"
