"""Decoders of transformers share sequences: attention over ranks by their own interface, equal to one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from distributed import run_ranks
from hf_models import causal, hf_task
from tests_shared import plan_of
from torch import nn

from paceline.errors import ConfigError
from paceline.plan.layout import Layout
from paceline.plan.plan import Plan
from paceline.run.assemble import assemble
from paceline.run.world import join_world
from paceline.task.models.interface import why_unshared
from paceline.task.objective import next_token
from paceline.task.profile_traced import profile_module
from paceline.task.task import Task
from paceline.verify.compare import compare

Case = tuple[Task, Plan]


def fp64(layout: Layout, **changes: Any) -> Plan:
    return plan_of(layout, precision="fp64", **changes)


def proofs(cases: list[Case]) -> list[dict[str, Any]]:
    world = join_world("cpu", threads=1)
    return [compare(task, plan, world, task.data, task.data.items_per_sample, 2) for task, plan in cases]


def assert_equal(cases: list[Case]) -> None:
    for (_, plan), found in zip(cases, run_ranks(proofs, cases[0][1].layout.devices, cases)[0], strict=True):
        assert found["equal"], (str(plan), found["first_difference"])


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "GPTNeoX"])
def test_two_ranks_share_sequences(family: str) -> None:
    two = Layout(cp=2)
    assert_equal([(hf_task(family), fp64(two)), (hf_task(family, 13), fp64(two, cp_method="ring"))])
