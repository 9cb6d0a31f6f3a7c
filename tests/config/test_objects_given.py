"""Objects in the place of names: what cannot be used says what can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.errors import ConfigError


class Rows:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": index}


class Stream:
    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter([{"x": 1}])


@pytest.mark.parametrize("data", [Stream(), iter([{"x": 1}]), ({"x": at} for at in range(3)), map(int, "12"), {1, 2}])
def test_samples_without_numbers_say_how_they_get_them(data: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        paceline.Task(data=data)
    assert "by its number" in caught.value.because and "list(...)" in caught.value.try_


def test_what_makes_batches_or_holds_weights_says_what_is_wanted() -> None:
    with pytest.raises(ConfigError) as caught:
        paceline.Task(data=DataLoader([1, 2, 3], batch_size=2, shuffle=True))
    assert "loader.dataset" in caught.value.try_ and 'task.global_batch = "2 samples"' in caught.value.try_
    with pytest.raises(ConfigError) as caught:
        paceline.Task(optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.5))  # type: ignore[arg-type]
    assert '{"name": "torch.optim:SGD", "lr": 0.5}' in caught.value.try_


def test_a_class_in_the_place_of_its_object() -> None:
    with pytest.raises(ConfigError) as caught:
        paceline.Task(data=Rows)
    assert "it is a class" in caught.value.because and caught.value.try_ == "Rows(...)"


def test_objects_that_can_be_used_stay() -> None:
    data, listed = Rows(), [{"x": 1}]
    assert paceline.Task(data=data).data is data and paceline.Task(data=listed).data is listed
    assert paceline.Task(model=Rows).model is Rows, "a class makes a model"
