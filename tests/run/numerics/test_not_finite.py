"""A loss that is no number is blamed on the sample that has such a value, and on nothing where none has."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import NumericalStop
from paceline.run.loop.loader import MicroBatch, StepBatch
from paceline.run.numerics.not_finite import of_the_data
from paceline.task.objective import classification, regression

ALONE: Any = SimpleNamespace(gather=lambda mine: [mine])
STOP = NumericalStop("step 1: loss nan, gradient norm nan", "they are not finite numbers", "lower the rate")


def told(data: object, objective: Any = classification, counts: bool = True, world: Any = ALONE) -> NumericalStop:
    micro = MicroBatch(data, np.array([40, 7, 12]), 0, counts)
    return of_the_data(STOP, StepBatch(1, 0, 3, (micro,)), objective, world)


def rows(bad: float = math.nan) -> torch.Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, bad], [5.0, 6.0]])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_sample_and_its_entry_are_named(bad: float) -> None:
    error = told((rows(bad), torch.tensor([0, 1, 0])))
    assert error.exit_code == 6 and error.what == STOP.what and error.names_ranks
    assert "sample 7 " in error.because and "entry 0" in error.because and "others" not in error.because
    assert "entry 'images'" in told({"images": rows(bad), "labels": torch.tensor([0, 1, 0])}).because


def test_what_explains_nothing_is_told_as_before() -> None:
    whole = torch.ones(3, 2)
    assert told((whole, torch.tensor([0, 1, 0]))) is STOP
    assert told({"tokens": torch.ones(3, 2, dtype=torch.int64), "attention_mask": rows(-math.inf)}) is STOP
    assert told((rows(), torch.tensor([0, 1, 0])), counts=False) is STOP  # rows that stand in for none
    assert told((whole, rows()[:, 1]), regression) is STOP  # a label of NaN counts nothing there
    assert told((whole, rows()[:, 1])) is not STOP


def test_ranks_tell_the_same() -> None:
    world: Any = SimpleNamespace(gather=lambda mine: [mine, [(3, "entry 0")]])
    error = told((torch.ones(3, 2), torch.zeros(3)), world=world)
    assert "sample 3 " in error.because
    assert "such as sample 7" in told((rows(), torch.zeros(3)), world=world).because
