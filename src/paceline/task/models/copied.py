"""Copies of a model, with what hooks have made of its weights."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def copied(model: Model, known: dict[int, object] | None = None) -> Model:
    """Return a copy of a model. `known` are copies that are there already, by the id of what they are copies of.

    Hooks such as those of torch.nn.utils.weight_norm and of pruning keep weights that they compute as attributes, which
    `copy.deepcopy` refuses: they are steps of a graph. Of these the values are copied; the hooks compute them again.
    """
    made = {id(value): value.detach().clone() for module in model.modules() for value in vars(module).values()
            if isinstance(value, Tensor) and not value.is_leaf}  # fmt: skip
    return copy.deepcopy(model, {**made, **(known or {})})  # deepcopy takes what its memo already has
