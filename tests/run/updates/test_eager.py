"""Optimizers of torch without its compiler: nothing imports it for an update, and updates are torch's own."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.spec.optimizers import RULES
from paceline.task.optimizer.eager import DISABLES, MARKED, USES_GRAD, EagerOptimizer, eager
from paceline.task.optimizer.lion import Lion

OF_TORCH = sorted(rule.path.partition(":")[2] for rule in RULES.values() if rule.path.startswith("torch.optim:"))


def _steps(kind: type[torch.optim.Optimizer]) -> torch.Tensor:
    """Make an optimizer, a few updates of a matrix, and what a run asks of it, and return the matrix."""
    weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
    optimizer = kind([{"params": [weight]}], lr=0.1)  # type: ignore[call-arg]
    for step in range(3):
        optimizer.zero_grad()
        weight.grad = torch.sin(weight.detach() * (step + 2))
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return weight.detach()


@pytest.mark.parametrize("name", OF_TORCH)
def test_an_update_is_torchs_own_and_imports_no_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(torch.optim, name)
    expected = _steps(kind)
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # who imports it now fails
    assert torch.equal(_steps(eager(kind)), expected)
    assert eager(kind).__name__ == name and eager(kind).__module__ == kind.__module__ and issubclass(eager(kind), kind)


@pytest.mark.parametrize("kind", [EagerOptimizer, Lion, *(eager(getattr(torch.optim, name)) for name in OF_TORCH)])
def test_no_method_is_left_that_would_import_it(kind: type[torch.optim.Optimizer]) -> None:
    """torch remembers what it has imported for a method: only the first call in a process would show it."""
    assert {getattr(kind, name).__code__.co_qualname for name in MARKED}.isdisjoint({DISABLES})
    assert inspect.unwrap(kind.step, stop=lambda step: step.__code__.co_qualname == USES_GRAD) is inspect.unwrap(
        kind.step
    )


def test_hooks_of_every_optimizer_hear_of_its_steps() -> None:
    """Tools count updates by them, whichever class makes these."""
    heard: list[str] = []
    weight = nn.Parameter(torch.ones(2))
    handle = register_optimizer_step_post_hook(lambda made, *_: heard.append(type(made).__name__))
    try:
        optimizer = eager(torch.optim.AdamW)([weight])
        weight.grad = torch.ones(2)
        optimizer.step()
    finally:
        handle.remove()
    assert heard == ["AdamW"] and isinstance(optimizer, torch.optim.AdamW)


def test_what_is_no_class_of_torchs_is_left_as_it_is() -> None:
    class Own(torch.optim.SGD):
        pass

    for factory in (Own, Lion, lambda groups, lr: torch.optim.SGD(groups, lr=lr), {}.get):
        assert eager(factory) is factory
    assert eager(eager(torch.optim.SGD)) is eager(torch.optim.SGD)
