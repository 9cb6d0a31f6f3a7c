"""Tensors that an objective holds go where its batches are. The meta device stands for a GPU: no value is looked at."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.task.coupling import gathers_rows, with_gather, without_own_rows
from paceline.task.objective import classification, takes_sequence_parts
from paceline.task.placed import PlacedObjective, objective_on

META = torch.device("meta")
CLASSES = 3


def model_and_batch(device: torch.device = META) -> tuple[nn.Module, Any]:
    inputs, labels = torch.randn(5, 4, device=device), torch.zeros(5, dtype=torch.long, device=device)
    return nn.Linear(4, CLASSES, device=device), (inputs, labels)


def weighted(model: nn.Module, batch: Any, weights: Any) -> tuple[Tensor, Tensor]:
    inputs, labels = batch
    weights = weights["of classes"][0] if isinstance(weights, dict) else weights
    assert weights.device == labels.device, f"the weights are on {weights.device}"
    return F.cross_entropy(model(inputs), labels, weight=weights, reduction="sum"), weights[labels].sum()


def in_a_closure(weights: Tensor) -> Any:
    def objective(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return weighted(model, batch, weights)

    objective.sums_over_tokens = True  # type: ignore[attr-defined]
    return objective


def in_a_container(weights: Tensor) -> Any:
    held = {"of classes": [weights]}
    return lambda model, batch: weighted(model, batch, held)


def in_a_default(weights: Tensor) -> Any:
    return lambda model, batch, weights=weights: weighted(model, batch, weights)


def in_a_keyword(weights: Tensor) -> Any:
    def objective(model: nn.Module, batch: Any, *, held: Tensor = weights) -> tuple[Tensor, Tensor]:
        return weighted(model, batch, held)

    return objective


def in_a_partial(weights: Tensor) -> Any:
    return functools.partial(weighted, weights=weights)


class Weighted:
    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return weighted(model, batch, self.weights)

    def method(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return weighted(model, batch, self.weights)


def in_a_method(weights: Tensor) -> Any:
    return Weighted(weights).method


class WeightedModule(nn.Module):
    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("weights", weights)

    def forward(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        assert isinstance(self.weights, Tensor)
        return weighted(model, batch, self.weights)


PLACES = [in_a_closure, in_a_container, in_a_default, in_a_keyword, in_a_partial, in_a_method, Weighted, WeightedModule]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_weights_of_classes_follow_the_batch(place: Any) -> None:
    model, batch = model_and_batch()
    objective = place(torch.ones(CLASSES))
    with pytest.raises(AssertionError, match="the weights are on cpu"):
        objective(model, batch)
    loss, weight = objective_on(place(torch.ones(CLASSES)), META)(model, batch)
    assert loss.device == weight.device == META


def test_what_was_given_stays_as_it_was() -> None:
    weights = torch.ones(CLASSES)
    given = Weighted(weights)
    placed = objective_on(given, META)
    assert given.weights is weights and placed.weights.device == META  # type: ignore[attr-defined]
    function = in_a_closure(weights)
    assert takes_sequence_parts(objective_on(function, META)), "it says what the function says"
    assert objective_on(function, torch.device("cpu")) is function
    assert objective_on(classification, META) is classification


def test_one_that_gathers_rows_still_does() -> None:
    weights = torch.ones(CLASSES)

    def coupled(model: nn.Module, batch: Any, gather_rows: Any) -> tuple[Tensor, Tensor]:
        everyone, own = gather_rows(batch[0])
        assert len(everyone) == own.stop == 5
        return weighted(model, batch, weights)

    placed = objective_on(with_gather(coupled), META)
    assert gathers_rows(placed) and gathers_rows(without_own_rows(placed))
    assert placed(*model_and_batch())[0].device == META
    assert without_own_rows(objective_on(in_a_closure(weights), META))(*model_and_batch())[0].device == META


GLOBAL = torch.ones(CLASSES)


@pytest.mark.parametrize(
    "said",
    ["Expected all tensors to be on the same device, but got weight is on cpu, different from other tensors on cuda:0",
     "indices should be either on cpu or on the same device as the indexed tensor (cpu)"],
)  # fmt: skip
def test_what_is_out_of_reach_is_said(said: str) -> None:
    def reads_a_global(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if GLOBAL.device != batch[1].device:
            raise RuntimeError(said)
        return weighted(model, batch, GLOBAL)

    with pytest.raises(ConfigError, match="two devices meet") as caught:
        objective_on(reads_a_global, META)(*model_and_batch())
    assert said.split(",")[0] in caught.value.because


def test_other_errors_stay_what_they_are() -> None:
    def fails(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        objective_on(fails, META)(*model_and_batch())
    with pytest.raises(AttributeError):
        _ = PlacedObjective(fails).no_such_thing
