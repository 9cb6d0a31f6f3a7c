"""A whole run on a GPU: batches come ahead, a checkpoint is kept, the journal says what was set and what it took."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from devices import on_every_device
from rounding import assert_curves_close
from tests_shared import SEQ_LEN, PaddedText, decoder_task, plan_of

from paceline.cluster.here.prepare import Switched
from paceline.run.loop.training import Training
from paceline.run.process.world import World, join_world
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.kinds import DecisionRecord, StepRecord
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.supervise.told.brief import Brief
from paceline.units import Amount

STEPS = 4


class InThreads(PaddedText):
    """Rows that any thread may read."""

    reads_in_threads = True


def trained(folder: Path, device: str, **plan: Any) -> list[dict[str, Any]]:
    """Return the journal of a run of four steps, stopped in the middle and resumed."""
    found = join_world(device)
    switched = (Switched("run.tf32", "highest", "high", "it was asked for"),)
    world = World(0, 1, 0, found.device, switched=switched)
    for steps in (STEPS // 2, STEPS):
        task = decoder_task(data=InThreads(), stop=Amount(STEPS, "steps"))
        spec = Spec(task=task, cluster=ClusterSpec(learn=False), run=RunSpec(evaluate_every=None))
        brief = Brief(
            plan_of(Layout(), precision="fp64", **plan), steps, SEQ_LEN, "tokens", device, 1, 1.0, math.nan, 1.0,
            math.nan, PlannedRecord(),
        )  # fmt: skip
        training = Training(spec, brief, world, folder)
        for batch in training:
            assert batch.micro_batches[0].data["tokens"].device == torch.device(found.device)
            training.step(batch)
        training.take_down()
    return list(read_journal(folder))


@on_every_device
def test_a_run_is_the_run_of_a_cpu(device: str, tmp_path: Path) -> None:
    alone = [line for line in trained(tmp_path / "cpu", "cpu") if line["kind"] == StepRecord.KIND]
    here = trained(tmp_path / device / "again", device, micro_batch=5, offload="optimizer")
    steps = [line for line in here if line["kind"] == StepRecord.KIND]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert_curves_close([line["loss"] for line in steps], [line["loss"] for line in alone])
    assert all(line["seconds"]["total"] > 0 and line["peak_bytes"] > 0 for line in steps)
    told = [line for line in here if line["kind"] == DecisionRecord.KIND and line["what"] == "run.tf32"]
    assert [(line["from"], line["to"], line["because"]) for line in told] == [
        ("highest", "high", "it was asked for")
    ] * 2
