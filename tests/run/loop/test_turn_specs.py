"""What a task may say of its turns, what is refused, and what the profile adds up."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from gans import Gan, fooled, gan_task, judged
from programs import ROWS
from test_turns import trained as trained_under
from tests_shared import plan_of

from paceline.errors import ConfigError, DoesNotFit, NumericalStop
from paceline.run.process.handover import hand_over, take_over
from paceline.spec.layout import Layout
from paceline.spec.load import Spec, parse_spec, spec_from_dict, spec_to_dict
from paceline.spec.plan import PlanSpec
from paceline.spec.task import Task
from paceline.task.data.facts import data_facts
from paceline.task.profile.of_task import profile_task
from paceline.verify.process.start import exact_plan


def spec_with(turns: str, objective: str = "") -> str:
    return f'[task]\n{objective}\n[task.model]\nname = "gans:Gan"\n[task.data]\nsource = "gans:Rows"\n{turns}'


JUDGE = '[[task.turns]]\nname = "judge"\nobjective = "gans:judged"\nmatch = ["judge.*"]\n'
MAKER = '[[task.turns]]\nname = "maker"\nobjective = "gans:fooled"\nmatch = ["maker.*"]\nevery = 5\n'
BY_NOISE = '[task.growth]\nby = "noise"\nlargest = "64 samples"\n'


def test_turns_are_plain_data_and_travel(tmp_path: Path) -> None:
    spec = parse_spec(spec_with(JUDGE + MAKER, 'objective = "judge"'))
    assert [turn.name for turn in spec.task.turns] == ["judge", "maker"]
    assert spec.task.turns[1].every == 5
    assert spec_from_dict(spec_to_dict(spec)).task == spec.task
    assert take_over(hand_over(spec, tmp_path)).task == spec.task
    objects = Spec(task=gan_task())
    assert take_over(hand_over(objects, tmp_path)).task.turns[0].match == ("judge.*",)


@pytest.mark.parametrize(
    ("turns", "objective", "says"),
    [
        (JUDGE + JUDGE, "", "under a name of its own"),
        (JUDGE + MAKER, 'objective = "next_token"', "no turn's name"),
        (JUDGE + MAKER, 'objective = "maker"', "every 5 steps only"),
        (JUDGE.replace('objective = "gans:judged"\n', ""), "", "nothing says what"),
        (JUDGE + MAKER.replace("every = 5\n", "") + BY_NOISE, 'objective = "maker"', "between the two gradient norms"),
    ],
)
def test_turns_that_contradict_each_other_are_refused(turns: str, objective: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_spec(spec_with(turns, objective))
    assert says in f"{error.value.what}: {error.value.because}"


def profile_of(task: Task) -> Any:
    return profile_task(task, data_facts(task.data, None))


def with_match(*matches: tuple[str, ...]) -> Task:
    task = gan_task()
    turns = [dataclasses.replace(turn, match=match) for turn, match in zip(task.turns, matches, strict=True)]
    return dataclasses.replace(task, turns=tuple(turns))


def test_every_parameter_has_a_turn_and_every_turn_a_parameter() -> None:
    profile_of(with_match(("judge.*",), ("*",)))  # belongs to the first that matches
    with pytest.raises(ConfigError, match="no turn trains it"):
        profile_of(with_match(("judge.*",), ("maker.0.*",)))
    with pytest.raises(ConfigError, match="trains no parameter"):
        profile_of(with_match(("*",), ("maker.*",)))
    with pytest.raises(ConfigError, match="matches no parameter"):
        profile_of(with_match(("judge.*",), ("makers.*",)))


def test_other_axes_are_closed_with_the_reason() -> None:
    task = gan_task()
    profile = profile_of(task)
    assert {"pp", "cp", "tp"} <= set(profile.closed_axes or {})
    assert "dp_shard" not in (profile.closed_axes or {})
    with pytest.raises(DoesNotFit, match=r"task\.turns"):
        exact_plan(Spec(task=task), PlanSpec(tp=2), profile)
    with pytest.raises(ConfigError, match=r"task\.turns"):
        run_ranks(trained_over_tp, 2)


def trained_over_tp() -> None:
    trained_under(gan_task(), plan_of(Layout(tp=2), batch=ROWS), 1)


def test_the_profile_adds_up_what_turns_compute() -> None:
    both = profile_of(gan_task())
    alone = [
        profile_of(dataclasses.replace(gan_task(), turns=(), objective=objective)) for objective in (judged, fooled)
    ]
    assert both.forward_flops == sum(profile.forward_flops for profile in alone)
    rare = profile_of(gan_task(every=4))
    assert rare.forward_flops == alone[0].forward_flops + alone[1].forward_flops / 4
    assert "objectives in turn" in both.note


def infinite(model: Gan, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    loss, weight = fooled(model, batch)
    return loss * torch.inf, weight


def not_a_number() -> str:
    try:
        trained_under(gan_task(maker=infinite), plan_of(Layout(), batch=ROWS), 1)
    except NumericalStop as stop:
        return f"{stop.what}: {stop.because}"
    return ""


def test_a_loss_that_is_not_finite_names_its_turn() -> None:
    (told,) = run_ranks(not_a_number, 1)
    assert "step 1, turn 'maker'" in told
    assert "by this turn" in told
