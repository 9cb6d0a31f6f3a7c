"""The resume contract: every option has its clause, and one function enforces it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.spec.data.mix import MixSpec
from paceline.spec.load import Spec, load_spec, spec_to_dict
from paceline.spec.survive.contract import CLAUSES, OnResume, check_contract, clause_of
from paceline.spec.task import DataSpec, Task

DEFAULTS = spec_to_dict(Spec())


def options(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the options of nested tables by dotted name."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= options(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


def changed(option: str) -> dict[str, Any]:
    """Return the default spec as data with another value of one option."""
    values = copy.deepcopy(DEFAULTS)
    *tables, last = option.split(".")
    inner = values
    for table in tables:
        inner = inner[table]
    inner[last] = "something else"
    return values


@pytest.mark.parametrize("option", options(DEFAULTS))
def test_every_option_has_a_clause_that_is_enforced(option: str) -> None:
    clause = clause_of(option)
    assert clause is not None, "decide in spec/survive/contract.py what its change means on resume"
    if clause.on_resume == OnResume.REFUSED:
        with pytest.raises(ConfigError, match=f"{option} differs"):
            check_contract(DEFAULTS, changed(option), "runs/x")
    else:
        told = check_contract(DEFAULTS, changed(option), "runs/x")
        assert [change.option for change in told] == ([option] if clause.on_resume == OnResume.NOTICE else [])


def test_the_longest_clause_counts_and_none_is_idle() -> None:
    assert clause_of("task.data.cache_dir").on_resume == OnResume.FREE  # type: ignore[union-attr]
    assert clause_of("task.data.source").on_resume == OnResume.NOTICE  # type: ignore[union-attr]
    assert clause_of("task.optimizer.name").on_resume == OnResume.REFUSED  # type: ignore[union-attr]
    assert clause_of("tasks.seed") is None and clause_of("task") is None
    used = {clause_of(option) for option in options(DEFAULTS)}
    assert used == set(CLAUSES)


def test_no_option_is_free_by_the_table_that_it_came_into() -> None:
    """A new option of a table that is free would change what is trained without a word: somebody has to say so here."""
    tables = {
        clause.of for clause in CLAUSES if any(option.startswith(f"{clause.of}.") for option in options(DEFAULTS))
    }
    taken = {
        option
        for option in options(DEFAULTS)
        if (clause := clause_of(option)) is not None and clause.of in tables and clause.on_resume == OnResume.FREE
    }
    known = set((Path(__file__).parent / "free_by_table.txt").read_text("utf-8").split())
    assert taken - known == set(), "a clause in spec/survive/contract.py, or their names in free_by_table.txt"
    assert known - taken == set(), "these are no options, or have a clause of their own"


def test_arguments_that_come_go_or_change_are_seen() -> None:
    def with_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
        values = copy.deepcopy(DEFAULTS)
        values["task"]["model"]["arguments"] = arguments
        return values

    for then, now in (({}, {"width": 4}), ({"width": 4}, {}), ({"width": 4}, {"width": 8}),
                      ({"width": 4}, {"width": 4, "depth": 2})):  # fmt: skip
        with pytest.raises(ConfigError, match=r"task\.model\.arguments"):
            check_contract(with_arguments(then), with_arguments(now), "runs/x")
    assert check_contract(with_arguments({"width": 4}), with_arguments({"width": 4}), "runs/x") == []


def test_an_option_that_an_earlier_release_did_not_know_had_its_default() -> None:
    then = copy.deepcopy(DEFAULTS)
    del then["task"]["turns"], then["task"]["model"]["balance"], then["run"]["tf32"]
    assert check_contract(then, DEFAULTS, "runs/x") == []
    now = copy.deepcopy(DEFAULTS)
    now["task"]["model"]["balance"] = "bias"
    with pytest.raises(ConfigError, match="balance"):
        check_contract(then, now, "runs/x")


def test_all_refused_changes_are_named_at_once() -> None:
    now = spec_to_dict(load_spec(None, ["task.seed=9", "task.global_batch=3 samples", "task.stop=9 steps"]))
    with pytest.raises(ConfigError) as refused:
        check_contract(DEFAULTS, now, "runs/x")
    assert "task.global_batch, task.seed differ" in refused.value.what
    assert "task.stop" not in f"{refused.value}"


def test_what_a_source_of_a_mixture_could_not_say_in_an_earlier_release_is_no_change() -> None:
    def mixed(**options: Any) -> dict[str, Any]:
        parts = (MixSpec("notes", **options), MixSpec("numbers"))
        return spec_to_dict(Spec(task=Task(data=DataSpec(mix=parts))))

    before = mixed(weight=2.0)
    for part in before["task"]["data"]["mix"]:
        del part["score_field"]
    assert check_contract(before, mixed(weight=2.0), "runs/x") == []
    for options in ({"weight": 3.0}, {"weight": 2.0, "score_field": "quality"}):
        with pytest.raises(ConfigError, match=r"task\.data\.mix differs"):
            check_contract(before, mixed(**options), "runs/x")
