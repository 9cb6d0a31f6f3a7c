"""Objects in the place of names: what cannot be used says what can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import paceline
from paceline.errors import ConfigError, DataError
from paceline.task.data.sources.mapped import MapSource


class Rows:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": index}


class Stream:
    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter([{"x": 1}])


class InTurn(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class InTurnWithALength(InTurn):
    def __len__(self) -> int:
        return 3


IN_TURN = [Stream(), InTurn(), InTurnWithALength()]


@pytest.mark.parametrize("data", [*IN_TURN, iter([{"x": 1}]), ({"x": at} for at in range(3)), map(int, "12"), {1, 2}])
def test_samples_without_numbers_say_how_they_get_them(data: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        paceline.Task(data=data)
    assert "by its number" in caught.value.because and "list(...)" in caught.value.try_


class StreamOfColumns(InTurn):
    """A stream as the package datasets has it: columns by their names, no samples by their numbers, no length."""

    def __getitem__(self, name: str) -> list[int]:
        raise KeyError(name)


class Shown(Rows):
    """Rows that are shown in several lines, as those of the package datasets."""

    def __repr__(self) -> str:
        return "Shown({\n    rows: 3\n})"


def test_a_stream_of_columns_has_no_samples_by_their_numbers_either(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, told in (("anybodys", False), ("datasets.iterable_dataset", True)):
        monkeypatch.setattr(StreamOfColumns, "__module__", package)
        for error, call in (
            (ConfigError, lambda data: paceline.Task(data=data)),
            (DataError, lambda data: MapSource(data, 7)),
        ):
            with pytest.raises(error) as caught:
                call(StreamOfColumns())
            assert "by its number" in caught.value.because and "list(...)" in caught.value.try_
            assert ("without streaming" in caught.value.try_) == told


def test_splits_by_name_are_no_samples_and_no_options() -> None:
    for given in ({"train": Shown(), "test": Shown()}, {"train": InTurn()}):
        with pytest.raises(ConfigError) as caught:
            paceline.Task(data=given)
        assert "have names" in caught.value.because and "data['train']" in caught.value.try_
        assert "train" in caught.value.what and "\n" not in caught.value.what
        with pytest.raises(DataError) as of_factory:
            MapSource(given, 7)
        assert "train" in of_factory.value.because and "pair" in of_factory.value.try_
    assert MapSource({0: 1.0, 1: 2.0}, 7).samples == 2, "samples by their numbers, in a dict"
    with pytest.raises(ConfigError, match=r"unknown option 'task\.data\.sorce'"):
        paceline.Task(data={"sorce": "notes"})


def test_a_data_set_of_torch_that_gives_samples_in_turn_is_told_so_where_a_factory_returns_it() -> None:
    with pytest.raises(DataError, match="not a map-style data set") as caught:
        MapSource(InTurnWithALength(), 7)
    assert "no __getitem__" in caught.value.because and "list(...)" in caught.value.try_


def test_a_data_set_in_a_table_of_names_says_where_it_and_its_collate_go() -> None:
    with pytest.raises(ConfigError) as caught:
        paceline.DataSpec(Rows())  # type: ignore[arg-type]
    assert "Task(data=...)" in caught.value.try_ and "dataset.collate = pad" in caught.value.try_


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


def test_a_function_that_makes_the_data_is_answered_with_its_call() -> None:
    def rows() -> Rows:
        return Rows()

    with pytest.raises(ConfigError) as refused:
        paceline.Task(data=rows)  # type: ignore[arg-type]
    assert "what it returns is wanted" in str(refused.value) and refused.value.try_.endswith("rows()")
