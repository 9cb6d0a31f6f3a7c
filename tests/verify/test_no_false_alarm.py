"""Correct set-ups are never called unequal, however badly conditioned; test_conditioning.py has the mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from proving import verdicts
from set_ups import SetUp, set_ups
from write_no_false_alarm import RECORD

from paceline.spec.proof.records import CheckProof

ALL = set_ups()
GUIDE = RECORD.parents[1] / "guide" / "plan" / "verifying.md"


@pytest.fixture(scope="module")
def cheap() -> dict[str, Any]:
    return verdicts([one for one in ALL if one.cheap])


@pytest.fixture(scope="module")
def dear() -> dict[str, Any]:
    return verdicts([one for one in ALL if not one.cheap])


def why(records: list[CheckProof]) -> list[Any]:
    """Return what the records of a set-up say of its differences."""
    return [(record.first_difference, record.ill_conditioned) for record in records]


def test_there_are_sixty() -> None:
    assert len({one.name for one in ALL}) == len(ALL) >= 60
    assert sum(one.cheap for one in ALL) == 8
    assert {one.plan.layout.devices for one in ALL} == {2, 3, 4, 5}


def test_the_figures_are_of_these_set_ups_and_none_is_unequal() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert list(record["set_ups"]) == [one.name for one in ALL], "run tests/verify/write_no_false_alarm.py again"
    for one in ALL:
        assert record["set_ups"][one.name]["verdict"] in one.verdicts
    counts = record["counts"]
    assert sum(counts.values()) == len(ALL)
    assert (
        f"{counts['equal']} are equal, {counts['ill-conditioned']} ill-conditioned, none unequal" in GUIDE.read_text()
    )


@pytest.mark.parametrize("one", [one for one in ALL if one.cheap], ids=lambda one: one.name)
def test_a_correct_set_up_is_not_called_unequal(one: SetUp, cheap: dict[str, Any]) -> None:
    said, records = cheap[one.name]
    assert said in one.verdicts, why(records)


@pytest.mark.deep
@pytest.mark.parametrize("one", [one for one in ALL if not one.cheap], ids=lambda one: one.name)
def test_more_correct_set_ups_are_not_called_unequal(one: SetUp, dear: dict[str, Any]) -> None:
    said, records = dear[one.name]
    assert said in one.verdicts, why(records)
