"""A rank that stays slow gets less work, or another process in its place; nothing of the training changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from rounding import FP64_TRAINED, assert_curves_close
from runs import records_of, steps_of
from storm import SURVIVES, Story, told
from tests_shared import SEQ_LEN, PaddedText, decoder_task, plan_of

from paceline.errors import ConfigError
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.spec.arguments import make_spec
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.supervise.told.brief import Brief
from paceline.task.data.order.permutation import sample_ids
from paceline.units import Amount

STEPS, STOPS, BATCH = 9, 6, 12
SLOW = {"kind": "slow", "rank": 1, "step": 1, "steps": STEPS, "factor": 5.0}
HEALTH = {"straggler_checks": 1, "straggler_factor": 2.0, "hangs": False}


def training(world: World, layout: Layout, run_dir: Path, **health: Any) -> Training:
    task = decoder_task(stop=Amount(STEPS, "steps"))
    run = {"checkpoint_every": "none", "check_every": "1 steps", "evaluate_every": "none", "record_samples": True,
           "health": {**HEALTH, **health}}  # fmt: skip
    spec = make_spec(task, cluster=ClusterSpec(learn=False), run=run, faults=[SLOW] if health else None)
    plan = plan_of(layout, batch=BATCH, micro_batch=3, precision="fp64")
    brief = Brief(plan, STEPS, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    return Training(spec, brief, world, run_dir)


def curve(run: Training, until: int = STEPS) -> list[tuple[float, float]]:
    """Return (loss, norm) of the steps up to one, at which the run is saved and left where it is not the last."""
    found = []
    for batch in run:
        stats = run.step(batch)
        found.append((stats.loss, stats.grad_norm))
        if stats.step == until < STEPS:
            run.save()
            break
    return found


def _slowed(run_dir: str) -> list[tuple[float, float]]:
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    less = training(world, Layout(dp_shard=2), Path(run_dir), on_straggler="less_work")
    began = curve(less, STOPS)
    less.take_down()
    resumed = training(world, Layout(dp_replicate=2), Path(run_dir))  # under its plan's own cut
    assert resumed.progress.step == STOPS
    return began + curve(resumed)


def test_a_slow_rank_gets_less_work_and_the_run_computes_what_one_device_does(tmp_path: Path) -> None:
    expected = curve(training(World(0, 1, 0, torch.device("cpu")), Layout(), tmp_path / "one"))
    for found in run_ranks(_slowed, 2, str(tmp_path / "two")):
        assert_curves_close(found, expected, FP64_TRAINED)
    decided = records_of(tmp_path / "two", "decision")
    named = [each for each in decided if each["what"] == "straggler"]
    assert {each["evidence"]["rank"] for each in named} == {1}
    cuts = [each["evidence"] for each in decided if each["what"] == "rows" and "rows" in each["evidence"]]
    assert cuts[0]["rows"]["from"] == [6, 6] and cuts[0]["rows"]["to"][0] > 6
    assert cuts[0]["computing_seconds"]["to"] < cuts[0]["computing_seconds"]["from"]
    ids = [i for step in steps_of(tmp_path / "two") for i in step["sample_ids"]]
    positions = np.arange(STEPS * BATCH, dtype=np.int64)
    assert ids == sample_ids(decoder_task().seed, positions, PaddedText.samples).tolist()


def test_a_slow_rank_is_replaced_once_and_no_step_is_lost(tmp_path: Path) -> None:
    run = {"health": {**HEALTH, "on_straggler": "replace"}, "checkpoint_every": "none"}
    story = Story("replaced", {"dp_shard": 2}, [SLOW], run, steps=STEPS, how=SURVIVES, micro_batch=2)
    assert [start.code for start in told(tmp_path, [story])["replaced"]] == [0]
    decided = records_of(tmp_path / "replaced", "decision")
    named = [each["evidence"] for each in decided if each["what"] == "straggler" and "slow;" in str(each["to"])]
    assert named[0]["replaced"] == 1 and sum("replaced" in each for each in named) == 1
    (recovered,) = records_of(tmp_path / "replaced", "recovery")
    assert recovered["rank"] == 1 and recovered["steps_lost"] == 0
    assert [step["step"] for step in steps_of(tmp_path / "replaced")] == list(range(1, STEPS + 1))


def test_a_run_that_promises_the_same_bits_cuts_no_rows_by_the_clock() -> None:
    run = {"deterministic": True, "health": {"on_straggler": "less_work"}}
    with pytest.raises(ConfigError, match="on_straggler"):
        make_spec(decoder_task(), run=run)


def test_a_world_of_survivors_begins_with_what_they_know_of_their_speeds(tmp_path: Path) -> None:
    """Rank 1 is slow and has fewer rows; then rank 2 is killed, and another process takes its place."""
    run = {"health": {**HEALTH, "on_straggler": "less_work"}, "checkpoint_every": "none", "check_every": "1 steps",
           "deterministic": False}  # fmt: skip
    faults = [{**SLOW, "steps": 12}, {"kind": "kill", "rank": 2, "step": 9}]
    story = Story("survivors", {"dp_replicate": 3}, faults, run, steps=12, how=SURVIVES, micro_batch=2)
    assert [start.code for start in told(tmp_path, [story])["survivors"]] == [0]
    (recovered,) = records_of(tmp_path / "survivors", "recovery")
    assert (recovered["rung"], recovered["rank"], recovered["steps_lost"] <= 1) == ("reform", 2, True)
    decided = [each for each in records_of(tmp_path / "survivors", "decision") if each["what"] == "rows"]
    (begun,) = [each["evidence"] for each in decided if "the world is another" in each["because"]]
    assert begun["rows"]["from"] == [4, 4, 5] and begun["rows"]["to"][1] < 4
    assert begun["row_seconds"][1] == max(begun["row_seconds"]) and begun["step"] == recovered["step"]
    assert [step["step"] for step in steps_of(tmp_path / "survivors")] == list(range(1, 13))
