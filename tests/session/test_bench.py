"""`paceline bench data`: what a step takes with its loader, and on batches that were read before."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import paceline, write_spec
from tests_shared import PaddedText, plan_of

from paceline.run.loop.loader import BatchStream, RepeatedBatches, StepBatch
from paceline.spec.layout import Layout


class SlowRows:
    """A data set that waits for each of its rows, as a slow disk does."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.04)  # what is slow, and no synchronisation
        tokens = torch.arange(index, index + 9) % 61
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def test_batches_are_repeated_at_their_own_positions() -> None:
    asked: list[int] = []

    class Watched(PaddedText):
        def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
            asked.append(len(ids))
            return super().read(ids, positions)

    plan = plan_of(Layout())
    batches = RepeatedBatches(BatchStream(Watched(), 1, plan, 0, torch.device("cpu")).at, last_read=2)

    def at(step: int) -> StepBatch:
        return batches.at((step - 1) * plan.batch_samples, step)

    read = [at(1), at(2)]
    reads = len(asked)
    again = [at(3), at(4), at(5)]
    assert len(asked) == reads, "nothing is read any more"
    assert [(each.step, each.position) for each in again] == [(step, (step - 1) * 13) for step in (3, 4, 5)]
    for each, old in zip(again, [read[1], read[0], read[1]], strict=True):
        for micro, before in zip(each.micro_batches, old.micro_batches, strict=True):
            assert micro.data is before.data and micro.step == each.step


@pytest.mark.deep
def test_a_slow_loader_is_found_and_the_run_left_alone(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, tmp_path / "run", devices=2, plan="dp_replicate = 2", steps=999)
    data = "task.data={source = 'test_bench:SlowRows', validation_fraction = 0.0}"
    words = [word for value in (data, "task.model.vocab=61", "task.objective=next_token") for word in ("--set", value)]
    done = paceline("bench", "data", spec, "--steps", 3, "--json", *words, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["steps"] == 3 and not (tmp_path / "run").exists()
    assert found["data_seconds"] >= 7 * 0.04, "rows that a rank must wait for"
    assert found["reading_seconds"] > found["repeated_seconds"]
    assert found["bound"]["kind"] == "data" and found["bound"]["steps"] >= 3
