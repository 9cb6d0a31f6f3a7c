"""The state that a forecast counts for an optimizer is what the optimizer of torch keeps after a step."""

from __future__ import annotations

import pytest
import torch

from paceline.spec.optimizers import RULES, optimizer_key, state_values, use_of
from paceline.spec.steps.update import GroupSpec, OptimizerSpec

MORE = {"adamw": {"amsgrad": True}, "adam": {"amsgrad": True}, "rmsprop": {"momentum": 0.9, "centered": True}}
CASES = [
    *((name, {}) for name, rule in RULES.items() if not rule.extra),
    *MORE.items(),
    ("rmsprop", {"centered": True}),
    ("adamw", {"amsgrad": False}),
]


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=lambda value: str(value))
def test_the_state_of_a_matrix_is_as_large_as_is_forecast(name: str, arguments: dict[str, object]) -> None:
    weight = torch.nn.Parameter(torch.ones(128, 128))
    spec = OptimizerSpec(name, arguments=arguments)
    use = use_of(spec, name, arguments)
    optimizer = use.factory([{"params": [weight], **use.arguments}], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = sum(value.numel() for value in optimizer.state[weight].values() if torch.is_tensor(value))
    key = optimizer_key(spec).partition("+")[0]  # without the one that trains what has no matrix
    assert kept / weight.numel() == pytest.approx(state_values(key), abs=0.02)


def test_the_name_in_prices_says_what_keeps_more_state() -> None:
    amsgrad = {"amsgrad": True}
    assert optimizer_key(OptimizerSpec("adamw")) == "adamw"
    assert optimizer_key(OptimizerSpec("adamw", arguments=amsgrad)) == "adamw(amsgrad)"
    assert optimizer_key(OptimizerSpec("muon", arguments={"ns_steps": 3})) == "muon+adamw"
    of_a_group = OptimizerSpec("sgd", groups=(GroupSpec(match=("*",), name="adamw", arguments=amsgrad),))
    assert optimizer_key(of_a_group) == "sgd+adamw(amsgrad)" and state_values(optimizer_key(of_a_group)) == 3
    assert (
        optimizer_key(OptimizerSpec("adamw", groups=(GroupSpec(match=("*",), arguments=amsgrad),))) == "adamw(amsgrad)"
    )
