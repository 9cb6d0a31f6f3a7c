"""Copies with an outer step whose own part is cut up: by tp, pp, cp and shards, trained, saved, and gone on with.

Each is held against a plain loop that takes the copies in turn; the run goes on between two outer steps.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from copies import by_hand, copies_plan, copies_task
from distributed import run_ranks
from rounding import FP64, adam_error
from test_copies_resume import DILOCO, STEPS, trained

from paceline.spec.layout import Layout
from paceline.spec.task import Task

SAVED = 4  # one step after an outer step, so that copies differ
CUT = {
    "copies": Layout(dp_replicate=2),
    "shards": Layout(dp_replicate=2, dp_shard=2),
    "tp": Layout(dp_replicate=2, tp=2),
    "pp": Layout(dp_replicate=2, pp=2),
    "cp": Layout(dp_replicate=2, cp=2),
}
Copies = list[dict[str, torch.Tensor]]


def check(layout: Layout, ranks: list[dict[str, torch.Tensor]], copies: Copies, task: Task, steps: int) -> None:
    """Hold each rank's weights against those of its copy; all ranks of a copy hold all of them together."""
    bound = adam_error(task.optimizer.lr, task.optimizer.eps, steps, FP64)
    seen: list[set[str]] = [set(), set()]
    for rank, held in enumerate(ranks):
        copy = layout.coordinates(rank)["dp_replicate"]
        seen[copy] |= set(held)
        for name, weight in held.items():
            told = f"{name} of rank {rank}"
            torch.testing.assert_close(weight, copies[copy][name], rtol=0, atol=bound, msg=told)
    assert seen[0] == seen[1] == set(copies[0])
    assert not all(torch.equal(copies[0][name], copies[1][name]) for name in seen[0]), "copies do differ"


def pairs_from(before: str, after: list[str], folder: Path) -> None:
    """Train on one layout and go on from the same checkpoint on each of the others."""
    task = copies_task()
    copies = by_hand(task, DILOCO, 2, STEPS)[1]
    first = CUT[before]
    saved = folder / "saved"
    ranks = run_ranks(trained, first.devices, task, copies_plan(DILOCO, first), str(saved), SAVED)
    check(first, ranks, by_hand(task, DILOCO, 2, SAVED)[1], task, SAVED)
    for name in after:
        layout, own = CUT[name], str(folder / name)
        shutil.copytree(saved, own)
        ranks = run_ranks(trained, layout.devices, task, copies_plan(DILOCO, layout), own, STEPS)
        check(layout, ranks, copies, task, STEPS)


@pytest.mark.parametrize(("before", "after"), [("tp", "pp"), ("cp", "tp")])
def test_copies_that_are_cut_up_go_on_on_another_cut(before: str, after: str, tmp_path: Path) -> None:
    pairs_from(before, [after], tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("before", CUT)
def test_every_pair_of_cuts(before: str, tmp_path: Path) -> None:
    pairs_from(before, list(CUT), tmp_path)
