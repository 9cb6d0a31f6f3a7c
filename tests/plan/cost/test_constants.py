"""The fitted constants: few, hashed, with a physical meaning, and written as they are read."""

from __future__ import annotations

import dataclasses
import tomllib
from importlib import resources

import pytest

from paceline.plan.cost.constants import Constants, constants_text, family_of, read_constants

FILE = resources.files("paceline.plan").joinpath("constants.toml").read_text("utf-8")


def test_the_hash_in_the_file_is_that_of_its_values() -> None:
    about = tomllib.loads(FILE)["about"]
    assert about["sha256"] == read_constants().sha256 and about["files"] and about["date"]
    assert read_constants().sha256 != dataclasses.replace(read_constants(), overlap=0.1).sha256


def test_constants_are_written_as_they_are_read() -> None:
    assert constants_text(read_constants()) == FILE


def test_they_are_few_and_shares_are_shares() -> None:
    constants = read_constants()
    values = {name: value for name, value in dataclasses.asdict(constants).items() if isinstance(value, float)}
    assert len(values) + len(constants.share) + len(constants.attention) <= 28
    shares = [
        *constants.share.values(),
        *constants.attention.values(),
        *(value for name, value in values.items() if name.endswith("_share")),
    ]
    assert all(0 < share <= 1 for share in (*shares, constants.overlap, constants.operand_traffic))
    assert 0.1 < values.pop("flush_seconds") < 10, "gigabytes are given back and asked for again"
    assert all(1e-8 < value < 0.1 for name, value in values.items() if name.endswith("_seconds"))
    assert constants.time_80 < constants.time_95 and constants.memory_80 < constants.memory_95


@pytest.mark.parametrize(
    ("name", "family"),
    [("NVIDIA A100 SXM4 80GB", "ampere"), ("NVIDIA H200 SXM5 141GB", "hopper"), ("NVIDIA B200 SXM 180GB", "blackwell"),
     ("NVIDIA L4 24GB", "other"), ("AMD Instinct MI300X 192GB", "other")],
)  # fmt: skip
def test_generations_are_told_by_whole_words(name: str, family: str) -> None:
    assert family_of(name) == family
    assert read_constants().share_of(name) == read_constants().share[family]


def test_constants_of_a_device_that_nobody_fitted_are_still_there() -> None:
    assert Constants(share={"other": 0.5}).share_of("a new chip") == 0.5
