"""What copies keep of their own is saved, and found again on other shards of as many copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from copies import began, by_hand, copies_plan, copies_task, rounded_by_hand, steps_of, whole_weights
from distributed import run_ranks
from rounding import FP64, adam_error

from paceline.checkpoint import find_latest, full_tensors
from paceline.errors import ConfigError
from paceline.run.loop.resume import Progress, RunIdentity, restore, save
from paceline.run.replicas.build import refuse_unproven
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import Plan
from paceline.spec.run_files import checkpoints_folder
from paceline.spec.sync import Sync, refuse_between, refuse_resync
from paceline.spec.task import Task
from paceline.task.optimizer.schedule import Course

DILOCO, ROUNDED = Sync("outer", every=3, lr=0.7, momentum=0.9), Sync(wire="bf16")
STEPS = 7  # of which the fourth is saved: one step after an outer step


def trained(task: Task, plan: Plan, folder: str, *stops: int) -> dict[str, torch.Tensor]:
    """Return the weights after the last of `stops`; the run is saved at each of them and begun anew after it."""
    for stop in stops:
        world, built = began(task, plan)
        course = Course("constant", task.optimizer.lr, 1.0, STEPS, 0, 1)
        run = RunIdentity(Path(folder), Spec(task=task), "", course)
        found = restore(run, built, plan, world)
        steps_of(built, task, plan, found.progress.step + 1 if found else 1, stop)
        save(run, built, plan, world, Progress(stop, stop * plan.batch_samples))
    return whole_weights(built)


@pytest.mark.parametrize("sync", [DILOCO, ROUNDED], ids=str)
def test_a_run_goes_on_bit_for_bit_whatever_its_copies_keep(sync: Sync, tmp_path: Path) -> None:
    task, plan = copies_task(), copies_plan(sync)
    whole = run_ranks(trained, 2, task, plan, str(tmp_path / "whole"), STEPS)
    parts = run_ranks(trained, 2, task, plan, str(tmp_path / "parts"), 4, STEPS)
    for weights, held in zip(whole, parts, strict=True):
        assert all(torch.equal(weights[name], weight) for name, weight in held.items())


@pytest.mark.parametrize("sync", [DILOCO, pytest.param(ROUNDED, marks=pytest.mark.deep)], ids=str)
def test_shards_of_as_many_copies_go_on_with_what_each_copy_kept(sync: Sync, tmp_path: Path) -> None:
    task, layout = copies_task(), Layout(dp_replicate=2, dp_shard=2)
    run_ranks(trained, 2, task, copies_plan(sync), str(tmp_path), 4)
    ranks = run_ranks(trained, 4, task, copies_plan(sync, layout), str(tmp_path), STEPS)
    copies = by_hand(task, sync, 2, STEPS)[1] if sync == DILOCO else [rounded_by_hand(task, 2, STEPS)] * 2
    bound = adam_error(task.optimizer.lr, task.optimizer.eps, STEPS, FP64)
    for rank, held in enumerate(ranks):
        for name, weight in held.items():
            expected = copies[layout.coordinates(rank)["dp_replicate"]][name]
            torch.testing.assert_close(weight, expected, rtol=0, atol=bound)


def test_the_models_weights_in_a_checkpoint_are_those_that_copies_share(tmp_path: Path) -> None:
    task = copies_task()
    run_ranks(trained, 2, task, copies_plan(DILOCO), str(tmp_path), 4)
    _, after_three = by_hand(task, DILOCO, 2, 3)
    newest = find_latest(checkpoints_folder(tmp_path))
    assert newest is not None
    bound = adam_error(task.optimizer.lr, task.optimizer.eps, 3, FP64)
    stored = dict(full_tensors(newest))
    assert set(after_three[0]) <= {name.removeprefix("model.") for name in stored}
    for name, weight in after_three[0].items():
        found = stored[name] if name in stored else stored[f"model.{name}"]
        torch.testing.assert_close(found, weight, rtol=0, atol=bound)


def written(sync: dict[str, Any] | None, copies: int) -> dict[str, Any]:
    plan: dict[str, Any] = {"layout": {"dp_replicate": copies}}
    return plan if sync is None else {**plan, "sync": sync}


def test_another_number_of_copies_and_another_sync_are_refused() -> None:
    diloco = {"kind": "outer", "every": 3, "lr": 0.7, "momentum": 0.9}
    refuse_resync(written(None, 2), Sync(), 4)  # exact sums, by an earlier release, go on with other copies
    refuse_resync(written(diloco, 2), DILOCO, 2)
    cases = [(diloco, 4, DILOCO), ({"wire": "bf16"}, 4, ROUNDED), (None, 2, DILOCO), ({"kind": "outer"}, 2, Sync())]
    for before, copies, now in cases:
        with pytest.raises(ConfigError, match=r"a run of .* cannot go on with dp_replicate = 2 ") as caught:
            refuse_resync(written(before, copies), now, 2)
        assert f"plan.dp_replicate = {copies}" in caught.value.try_


def test_a_run_neither_ends_nor_is_evaluated_while_copies_differ() -> None:
    refuse_between(DILOCO, {"task.stop": 9, "run.evaluate_every": 6})
    refuse_between(DILOCO, {"task.stop": 9, "run.evaluate_every": None})
    refuse_between(Sync(), {"task.stop": 7, "run.evaluate_every": 5})
    for steps, evaluate_every, what in ((10, 6, "task.stop: 10 steps"), (9, 4, "run.evaluate_every: 4 steps")):
        with pytest.raises(ConfigError, match=what) as caught:
            refuse_between(DILOCO, {"task.stop": steps, "run.evaluate_every": evaluate_every})
        assert "no multiple of 3" in caught.value.because


def test_what_ties_copies_together_in_every_step_is_refused_by_name() -> None:
    used = {"nn.SyncBatchNorm": False, "several objectives": True}
    refuse_unproven(copies_plan(Sync()), used)
    for sync in (DILOCO, ROUNDED):
        refuse_unproven(copies_plan(sync), dict.fromkeys(used, False))
        with pytest.raises(ConfigError, match=r"plan\.sync .* with several objectives"):
            refuse_unproven(copies_plan(sync), used)
