"""Correct set-ups are never called unequal, however badly conditioned; a mistake in one of them still is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from distributed import run_ranks
from set_ups import SetUp, set_ups

from paceline.run.world import join_world
from paceline.verify.compare import compare
from paceline.verify.low import low

SECONDS = 300.0
ALL = set_ups()
STEPS = 3


def prove(chosen: list[SetUp]) -> list[list[dict[str, Any]]]:
    """Return the records of set-ups of one number of ranks: in fp32 and fp64, or in their own low precision."""
    world = join_world("cpu", threads=1)
    found = []
    for one in chosen:
        source = one.task.data
        precisions = ("fp32", "fp64") if one.plan.precision == "fp32" else (one.plan.precision,)
        check = compare if len(precisions) > 1 else low
        plans = [dataclasses.replace(one.plan, precision=precision) for precision in precisions]
        found.append([check(one.task, plan, world, source, source.items_per_sample, STEPS) for plan in plans])
    return found


def verdict(records: list[dict[str, Any]]) -> str:
    """Return what is said of a set-up."""
    if not all(record["equal"] for record in records):
        return "unequal"
    ill = any(record.get("ill_conditioned") for record in records)
    return "ill-conditioned" if ill else "equal"


def verdicts(chosen: list[SetUp]) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """Return the verdict and the records of every set-up, by name."""
    found = {}
    for ranks in sorted({one.plan.layout.devices for one in chosen}):
        mine = [one for one in chosen if one.plan.layout.devices == ranks]
        for one, records in zip(mine, run_ranks(prove, ranks, mine, timeout_seconds=SECONDS)[0], strict=True):
            found[one.name] = (verdict(records), records)
    return found


@pytest.fixture(scope="module")
def cheap() -> dict[str, Any]:
    return verdicts([one for one in ALL if one.cheap])


@pytest.fixture(scope="module")
def dear() -> dict[str, Any]:
    return verdicts([one for one in ALL if not one.cheap])


def assert_told(one: SetUp, found: dict[str, Any]) -> None:
    said, records = found[one.name]
    assert said in one.verdicts, (said, [(r["first_difference"], r.get("ill_conditioned")) for r in records])


def test_there_are_sixty() -> None:
    assert len({one.name for one in ALL}) == len(ALL) >= 60
    assert sum(one.cheap for one in ALL) == 9
    assert {one.plan.layout.devices for one in ALL} == {2, 3, 4, 5}


@pytest.mark.parametrize("one", [one for one in ALL if one.cheap], ids=lambda one: one.name)
def test_a_correct_set_up_is_not_called_unequal(one: SetUp, cheap: dict[str, Any]) -> None:
    assert_told(one, cheap)


@pytest.mark.deep
@pytest.mark.parametrize("one", [one for one in ALL if not one.cheap], ids=lambda one: one.name)
def test_more_correct_set_ups_are_not_called_unequal(one: SetUp, dear: dict[str, Any]) -> None:
    assert_told(one, dear)
