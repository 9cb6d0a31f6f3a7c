"""A reference that is wrong is not taken for rounding: what moves is held against numbers computed anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from distributed import run_ranks
from set_ups import net, task
from tests_shared import plan_of

from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.spec.proof.records import CheckProof
from paceline.verify.compare import layout as comparison
from paceline.verify.compare import whole_batch as cutting
from paceline.verify.story import story as whole_run
from paceline.verify.story.reference import Unbroken

SCALED = "layers.1.mlp.0.weight"
FACTOR = 1.01

Tensors = dict[str, torch.Tensor]


def scaled(tensors: Tensors, name: str) -> Tensors:
    """Return the tensors with one of them a hundredth too large."""
    return {**tensors, name: tensors[name] * FACTOR}


def wrong_steps(*given: Any, **named: Any) -> Any:
    """Return the reference's steps with one gradient too large; those that are computed again are right."""
    steps = RIGHT_STEPS(*given, **named)
    if named["clip_norms"]:
        return steps
    return [dataclasses.replace(step, gradients=scaled(step.gradients, SCALED)) for step in steps]


def wrong_story(*given: Any) -> Unbroken:
    """Return the story of one device with the moments of one weight too large."""
    told = RIGHT_STORY(*given)
    moments = [scaled(one.step.moments, f"{SCALED}.exp_avg") for one in told.passed]
    steps = [dataclasses.replace(one.step, moments=m) for one, m in zip(told.passed, moments, strict=True)]
    passed = [dataclasses.replace(one, step=step) for one, step in zip(told.passed, steps, strict=True)]
    return dataclasses.replace(told, passed=tuple(passed))


def wrong_whole_batch() -> Callable[..., Any]:
    """Return what gives the numbers of a batch, of which the first, those of the whole one, have a wrong gradient."""
    made: list[Any] = []

    def numbers(*given: Any, **named: Any) -> Any:
        found = RIGHT_NUMBERS(*given, **named)
        made.append(found)
        return found if len(made) > 1 else dataclasses.replace(found, gradients=scaled(found.gradients, SCALED))

    return numbers


RIGHT_STEPS, RIGHT_STORY, RIGHT_NUMBERS = comparison.reference_steps, whole_run.unbroken, cutting.numbers_of
CHECKS: dict[str, tuple[Any, str, Callable[[], Any], Callable[..., CheckProof]]] = {
    "steps": (comparison, "reference_steps", lambda: wrong_steps, comparison.compare),
    "story": (whole_run, "unbroken", lambda: wrong_story, whole_run.story),
    "whole batch": (cutting, "numbers_of", wrong_whole_batch, cutting.whole_batch),
}


def held(check: str, tampered: bool) -> CheckProof:
    """Return the record of a check on one device, whose reference is right or wrong."""
    module, name, wrong, ask = CHECKS[check]
    given, plan = task(net), plan_of(Layout(), 7, precision="fp32")
    with patch.object(module, name, wrong() if tampered else getattr(module, name)):
        return ask(given, plan, join_world("cpu", threads=1), given.data, given.data.items_per_sample, 1, {})


def held_both_ways(check: str) -> list[CheckProof]:
    return [held(check, tampered) for tampered in (False, True)]


@pytest.mark.parametrize("check", CHECKS)
def test_a_wrong_reference_is_no_movement(check: str) -> None:
    ((right, wrong),) = run_ranks(held_both_ways, 1, check)
    assert right.equal, right.first_difference
    assert not wrong.equal and wrong.ill_conditioned is None
    first = wrong.first_difference
    assert first.relative == pytest.approx(FACTOR - 1, rel=0.02)
    assert all(SCALED in name for name in first.tensors)
