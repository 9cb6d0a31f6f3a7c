"""Learning rates of the user's: functions and torch's schedulers are pure functions of the step, and are checked."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR, SequentialLR, StepLR

from paceline.errors import ConfigError
from paceline.spec.steps.update import ScheduleSpec
from paceline.task.optimizer.schedule import course_of, learning_rate

PEAK, STEPS = 0.02, 40


def rate(schedule: ScheduleSpec, step: int) -> float:
    return learning_rate(schedule, PEAK, step, STEPS, 0, 1)


def stairs(step: int, steps: int, height: float = 1.0) -> float:
    return height * (1 if step <= steps // 2 else 0.5)


def in_two_parts(optimizer: torch.optim.Optimizer) -> SequentialLR:
    first = LambdaLR(optimizer, lambda step: (step + 1) / 10)
    return SequentialLR(optimizer, [first, StepLR(optimizer, 5, 0.5)], [10])


def plainly(factory: Any, **arguments: Any) -> list[float]:
    """Return the rates of torch's own loop."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler, found = factory(optimizer, **arguments), []
        for _ in range(STEPS):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return found


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("torch.optim.lr_scheduler:CosineAnnealingWarmRestarts", {"T_0": 7, "eta_min": 1e-4}),
        ("torch.optim.lr_scheduler:OneCycleLR", {"max_lr": 0.1, "total_steps": STEPS + 1, "cycle_momentum": False}),
        (StepLR, {"step_size": 3}),
        (in_two_parts, {}),
    ],
)
def test_schedulers_are_torchs_own_at_any_step(kind: Any, arguments: dict[str, Any]) -> None:
    known = {"CosineAnnealingWarmRestarts": CosineAnnealingWarmRestarts, "OneCycleLR": OneCycleLR}
    factory = known[kind.partition(":")[2]] if isinstance(kind, str) else kind
    expected, schedule = plainly(factory, **arguments), ScheduleSpec(kind=kind, arguments=arguments)
    assert [rate(schedule, step) for step in (40, 1, 17)] == [expected[39], expected[0], expected[16]], "in any order"
    assert [rate(schedule, step) for step in range(1, STEPS + 1)] == expected


def test_functions_are_called_with_the_step_and_with_what_they_ask_for() -> None:
    assert rate(ScheduleSpec(kind=stairs), 20) == 1.0
    assert rate(ScheduleSpec(kind=stairs, arguments={"height": 0.1}), 21) == 0.05
    assert rate(ScheduleSpec(kind=lambda step: 1 / step), 8) == 0.125
    course = course_of(ScheduleSpec(kind=stairs), PEAK, STEPS, 0, 1)
    assert course.rates[0] == (1, 1.0) and course.rates[-1] == (STEPS, 0.5)
    assert course != course_of(ScheduleSpec(kind=stairs, arguments={"height": 2.0}), PEAK, STEPS, 0, 1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "cosin"}, "cosine"),
        ({"kind": stairs, "warmup": "3 steps"}, "without effect"),
        ({"kind": "cosine", "arguments": {"T_0": 3}}, "without effect"),
        ({"kind": stairs, "arguments": {"hight": 3}}, "hight"),
        ({"kind": lambda step: -1.0}, "0 or more"),
        ({"kind": lambda step: "fast"}, "0 or more"),
        ({"kind": "torch.optim.lr_scheduler:ReduceLROnPlateau"}, "no function of the step"),
        ({"kind": "torch.optim.lr_scheduler:OneCycleLR", "arguments": {"max_lr": 0.1, "total_steps": 9}}, "betas"),
        ({"kind": "torch.optim.lr_scheduler:StepLR"}, "step_size"),
        ({"kind": OneCycleLR, "arguments": {"max_lr": 0.1, "total_steps": 9, "cycle_momentum": False}}, "step 11"),
        ({"kind": "torch.optim.lr_scheduler:NoSuch"}, "NoSuch"),
    ],
)
def test_what_gives_no_rate_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        rate(ScheduleSpec(**options), 30)
