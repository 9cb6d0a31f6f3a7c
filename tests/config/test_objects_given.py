"""Objects in the place of names: what cannot be used says what can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

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


def test_a_class_in_the_place_of_its_object() -> None:
    with pytest.raises(ConfigError) as caught:
        paceline.Task(data=Rows)
    assert "it is a class" in caught.value.because and caught.value.try_ == "Rows(...)"


def test_objects_that_can_be_used_stay() -> None:
    data, listed = Rows(), [{"x": 1}]
    assert paceline.Task(data=data).data is data and paceline.Task(data=listed).data is listed
    assert paceline.Task(model=Rows).model is Rows, "a class makes a model"
