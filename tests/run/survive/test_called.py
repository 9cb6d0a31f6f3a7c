"""A rank that cannot be built again in its process does not answer a call to another world, which would end its run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.task import Task
from paceline.supervise.control import CALL_NAME, CONTROL_VARIABLE
from paceline.supervise.supervisor import ERROR_FOLDER
from paceline.supervise.told.brief import Brief
from paceline.task.models.decoder import Decoder
from paceline.task.models.sizes import resolve_decoder


def a_module(task: Task) -> Task:
    """Return the task with its decoder as an object."""
    return dataclasses.replace(task, model=Decoder(resolve_decoder(task.model, 0, SEQ_LEN)))


@pytest.mark.parametrize("is_object", [False, True])
def test_only_a_model_that_can_be_built_again_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_object: bool
) -> None:
    monkeypatch.setenv(CONTROL_VARIABLE, str(tmp_path / "control"))
    monkeypatch.setenv(ERROR_FOLDER, str(tmp_path))
    task = decoder_task()
    task = a_module(task) if is_object else task
    spec = Spec(task=task, cluster=ClusterSpec(learn=False), run=RunSpec(evaluate_every=None))
    brief = Brief(plan_of(Layout()), 8, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    training = Training(spec, brief, World(0, 1, 0, torch.device("cpu")), tmp_path / "run")
    (tmp_path / CALL_NAME).touch()
    assert training._is_called() is not is_object
    training.take_down()
