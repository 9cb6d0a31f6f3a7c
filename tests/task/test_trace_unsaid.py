"""A model whose shapes are wrong gets the error of ours; torch's log of fake tensors prints no tracebacks before it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.task.objective import classification
from paceline.task.profile.traced import profile_module


def test_torch_logs_nothing_of_a_model_that_cannot_be_traced(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    filters = list(log.filters)
    try:
        batch = torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)
        with pytest.raises(ConfigError, match="cannot be traced"):
            profile_module(nn.Linear(5, 2), batch, classification)
    finally:
        log.removeHandler(caplog.handler)
    assert not caplog.records and log.filters == filters  # what torch logs elsewhere is left as it is
