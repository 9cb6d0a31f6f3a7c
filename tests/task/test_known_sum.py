"""Whose loss is known to be a sum: what is ours as a whole, and nothing that somebody else wrote a part of."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from paceline.plan.prepare import prepare_task
from paceline.spec.load import load_spec
from paceline.spec.task import Task
from paceline.task.known_sum import is_known_sum


def own(model: nn.Module, batch: object) -> tuple[float, int]:
    return 0.0, 1


@pytest.mark.parametrize(
    ("task", "known"),
    [
        (Task(model="llama-1m"), True),
        (Task(model="llama-1m", objective="classification"), True),
        (Task(model="llama-1m", objective="regression"), False),
        (Task(model="llama-1m", objective="somewhere:loss"), False),
        (Task(model="llama-1m", objective=own), False),
        (Task(model="somewhere:model"), False),
        (Task(model=lambda: nn.Linear(2, 2)), False),
        (
            Task(
                model="llama-1m",
                turns=(
                    {"name": "first", "objective": "somewhere:loss", "match": ["*norm*"]},
                    {"name": "second", "objective": "somewhere:loss", "match": ["*"]},
                ),
            ),
            False,
        ),
    ],
)
def test_a_sum_is_known_where_model_and_objective_are_ours(task: Task, known: bool) -> None:
    assert is_known_sum(task) is known


def test_the_planner_is_told(tmp_path: Path) -> None:
    text = tmp_path / "prose.txt"
    text.write_text("A paceline is a line of riders who share the work. " * 200)
    stated = [f"task.data.source={text}", "task.data.seq_len=32", "task.global_batch=4 samples", "task.stop=2 steps"]
    spec = load_spec(None, ["task.model=llama-1m", *stated])
    assert prepare_task(spec).profile.summed
