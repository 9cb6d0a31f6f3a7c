"""State that no checkpoint would bring back is refused before anything is planned, by its name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.task.models.build import build_model
from paceline.task.savable import refuse_state


class Told(nn.Linear):
    """A layer whose state dict has more than its weights."""

    def __init__(self, told: Any) -> None:
        super().__init__(2, 2)
        self.told = told
        self.register_buffer("size", torch.ones(()))
        self.size: Tensor

    def get_extra_state(self) -> Any:
        return self.told(self)

    def set_extra_state(self, state: Any) -> None:
        pass


def joined(model: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
    """Join two weights into one, as hooks for other programs' files do."""
    state["both.weight"] = torch.cat([state.pop("0.weight"), state.pop("1.weight")])


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_state_dict_post_hook(joined)
    return model


@pytest.mark.parametrize(("model", "says"), [
    (lambda: nn.Sequential(Told(lambda layer: {"calls": 3})), "'0._extra_state'.*it is a dict"),
    (lambda: Told(lambda layer: None), "'_extra_state'.*it is a NoneType"),
    (lambda: Told(lambda layer: torch.tensor(3)), "'_extra_state'.*made anew for every state dict"),
    (hooked, "'both.weight'.*made anew"),
    (lambda: nn.Sequential(nn.LazyLinear(3)), "has no shape yet"),
])  # fmt: skip
def test_state_that_is_not_the_models_own_is_refused(model: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_model(model, 0, 0, 1)
    assert re.search(says, f"{error.value.what} {error.value.because}")


def test_state_that_is_a_buffer_of_the_model_is_kept() -> None:
    told = Told(lambda layer: layer.size)
    refuse_state(told)
    assert told.state_dict()["_extra_state"] is told.size, "it is refused only where it is made anew"


def test_what_needs_values_is_not_asked_for_without_any() -> None:
    told = Told(lambda layer: {"size": layer.size.item()})
    with pytest.raises(ConfigError, match="_extra_state"):
        refuse_state(told)
    refuse_state(told.to("meta"))
