"""An optimizer of one's own that sees all parameters together sees them so in the reference too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests_shared import decoder_task, plan_of
from torch import nn

from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.update import GroupSpec, OptimizerSpec
from paceline.verify.compare.layout import compare
from paceline.verify.reference.plain_optimizer import plain_optimizers


class Together(torch.optim.Optimizer):
    """Moves against the gradient of all parameters, which together has norm one."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every weight."""
        own = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        norm = torch.stack([weight.grad.norm() for weight in own]).norm()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight -= group["lr"] * (weight.grad / norm + group["weight_decay"] * weight)


class ByPlace(Together):
    """Has a smaller rate for each further parameter of its list, as rates by depth are written by hand."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every weight."""
        for at, weight in enumerate(weight for group in self.param_groups for weight in group["params"]):
            if weight.grad is not None:
                weight -= 0.8**at * self.param_groups[0]["lr"] * weight.grad


def _on_one_device(spec: OptimizerSpec) -> CheckProof:
    task = dataclasses.replace(decoder_task(), optimizer=spec)
    source: Any = task.data
    return compare(task, plan_of(Layout(), precision="fp64"), join_world("cpu"), source, source.items_per_sample, 2, {})


@pytest.mark.parametrize("groups", [(), (GroupSpec(match=("*norm*",), lr_scale=0.5, weight_decay=0.3),)])
def test_a_norm_of_all_gradients_is_that_of_all(groups: tuple[GroupSpec, ...]) -> None:
    """The reference had an optimizer for matrices and one for vectors: every layout was told "not equal"."""
    found = _on_one_device(OptimizerSpec(Together, lr=1e-2, weight_decay=0.1, groups=groups))
    assert found.equal, found.first_difference


@pytest.mark.parametrize("groups", [(), (GroupSpec(match=("*norm*", "*up_proj*"), weight_decay=0.05),)])
def test_a_rate_by_the_place_in_the_list_of_parameters_is_that_of_the_run(groups: tuple[GroupSpec, ...]) -> None:
    """The reference listed its groups in another order than the run: "not equal" on every layout."""
    found = _on_one_device(OptimizerSpec(ByPlace, lr=1e-2, weight_decay=0.1, groups=groups))
    assert found.equal, found.first_difference


def test_one_instance_has_all_parameters_with_a_factor_for_each_group() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    spec = OptimizerSpec(Together, lr=1e-2, groups=(GroupSpec(match=("1.*",), lr_scale=0.5),))
    ((optimizer, factor),) = plain_optimizers(spec, model)
    assert factor == 1.0 and sum(len(group["params"]) for group in optimizer.param_groups) == 4
    assert {group["factor"] for group in optimizer.param_groups} == {1.0, 0.5}
    assert len(plain_optimizers(OptimizerSpec("adamw", lr=1e-2), model)) == 2
