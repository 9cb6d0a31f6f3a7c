"""What the first and the last stage of a pipeline share has both stages' gradient, whichever of them was reached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from paceline.run.parallel.pipeline.split import PipelineGradients


class Missed:
    """Gradients of a stage none of whose ranks reached its parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def unreached(self) -> int:
        self.parameter.grad = None  # as where nobody has news (settled_weights.py)
        return 1

    def settle(self) -> None:
        self.parameter.grad = None


def test_a_stage_that_reached_no_shared_weight_keeps_its_partners_gradient() -> None:
    shared, own = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    stages = [SimpleNamespace(gradients=Missed(parameter)) for parameter in (shared, own)]
    pipeline: Any = SimpleNamespace(stages=stages, shared_parameters=lambda: [shared])
    gradients = PipelineGradients(pipeline)
    shared.grad, own.grad = torch.tensor([1.0, 2.0]), torch.zeros(2)  # after both ends have told each other theirs
    assert gradients.unreached() == 2
    assert shared.grad is not None and shared.grad.tolist() == [1.0, 2.0] and own.grad is None
    gradients.settle()
    assert shared.grad is not None and shared.grad.tolist() == [1.0, 2.0] and own.grad is None
