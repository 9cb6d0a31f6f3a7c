"""How copies stay in step, as a spec asks, as text has it, and as a record brings it back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.spec.arguments import make_spec, plan_spec
from paceline.spec.layout import Layout
from paceline.spec.load import parse_spec, spec_from_dict, spec_to_dict
from paceline.spec.plan import Plan, PlanSpec, plan_from_dict
from paceline.spec.sync import Sync
from paceline.spec.task import Task

OUTER = Sync("outer", every=8, lr=0.7, momentum=0.9)
TABLE = "[plan]\ndp_replicate = 2\n[plan.sync]\nkind = 'outer'\nevery = 8\nlr = 0.7\nmomentum = 0.9\n"


def test_a_table_a_name_and_a_text_say_the_same() -> None:
    spec = parse_spec(TABLE)
    assert spec.plan.sync == OUTER and spec_from_dict(json.loads(json.dumps(spec_to_dict(spec)))) == spec
    assert parse_spec("[plan]\ndp_replicate = 2\nsync = 'outer'").plan.sync == Sync("outer")
    text = plan_spec("dp_replicate=2 sync=outer sync.every=8, sync.lr=0.7 sync.momentum=0.9")
    assert text == PlanSpec(dp_replicate=2, sync=OUTER)
    plan = Plan(Layout(dp_replicate=2), sync=OUTER)
    assert make_spec(Task(), plan).plan.sync == OUTER


def test_a_plan_says_it_and_comes_back_from_its_record() -> None:
    plan = Plan(Layout(dp_replicate=2), sync=OUTER)
    assert str(plan).endswith("outer step every 8 (lr 0.7, momentum 0.9)")
    assert "exact sums" not in str(Plan(Layout(dp_replicate=2)))
    assert plan_from_dict(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan
    earlier = {name: value for name, value in dataclasses.asdict(Plan()).items() if name != "sync"}
    assert plan_from_dict(earlier) == Plan()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kind": "sometimes"}, "every-step, outer"),
        ({"wire": "fp8"}, "full, bf16"),
        ({"every": 4}, "they are of the outer step"),
        ({"kind": "outer", "wire": "bf16"}, "copies sum in every step"),
    ],
)
def test_what_contradicts_itself_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Sync(**given)
    assert says in caught.value.because and caught.value.try_


@pytest.mark.parametrize("copies", ["", "dp_replicate = 1\n"])
def test_the_planner_does_not_choose_how_many_copies_compute_something_else(copies: str) -> None:
    with pytest.raises(ConfigError, match=r"plan\.sync\.kind = 'outer'") as caught:
        parse_spec(f"[plan]\n{copies}sync = 'outer'")
    assert "the planner does not choose it" in caught.value.because and "plan.dp_replicate = 2" in caught.value.try_


def test_copies_differ_between_outer_steps_alone() -> None:
    assert [step for step in range(1, 17) if not OUTER.differs_after(step)] == [8, 16]
    assert not any(Sync(wire="bf16").differs_after(step) for step in range(1, 9))
