"""Hooks on all modules or optimizers of a process see a proof's two models, and are named where numbers differ."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.spec.proof.records import CheckProof
from paceline.verify.compare.diagnosis import Diagnosis, told
from paceline.verify.compare.difference import Difference
from paceline.verify.process.process_hooks import naming_hooks

WRONG = Difference("buffers", "slow", 1, 0, 0.5, 2.0, 1.0, 0.5)
UNEQUAL = CheckProof(False, "fp64", 1, 0.1, {}, told(WRONG, [WRONG], Diagnosis("buffers", "it follows the data")))


class Averages:
    """A hook that is an object."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


def follows(*_: Any) -> None:
    """A hook that is a function."""


@pytest.mark.parametrize(
    ("register", "hook", "name", "what"),
    [
        (register_optimizer_step_post_hook, follows, "follows", "optimizers"),
        (register_optimizer_step_post_hook, Averages(), "Averages", "optimizers"),
        (register_optimizer_step_post_hook, functools.partial(follows, 1), "follows", "optimizers"),
        (register_module_forward_hook, follows, "follows", "modules"),
    ],
)
def test_a_hook_on_all_of_a_process_is_named_where_numbers_differ(
    register: Callable[[Any], Any], hook: Any, name: str, what: str
) -> None:
    """An average that it keeps was told as buffers that follow the data, and nothing led to the hook."""
    assert naming_hooks(UNEQUAL) is UNEQUAL
    handle = register(hook)
    try:
        equal = CheckProof(True, "fp64", 1, 0.1, {}, None)
        assert naming_hooks(equal) is equal
        first = naming_hooks(UNEQUAL).first_difference
        assert first is not None and first.family == "buffers" and first.likely.startswith("it follows the data; or it")
        assert f".{name}, registered for all {what} of the process" in first.likely
    finally:
        handle.remove()
    assert naming_hooks(UNEQUAL) is UNEQUAL
