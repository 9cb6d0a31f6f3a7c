"""An option of the plan that asks for a layout is a constraint on it; one that the layout ignores is said."""

import pytest
from plan_examples import cluster, opened

from paceline.plan.search.search import search
from paceline.plan.unused import unused_options
from paceline.spec.arguments import make_spec
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan, PlanSpec


def layouts(devices=4, **asked):
    found = search(opened(), cluster(devices), PlanSpec(**asked), batch_samples=64, steps=10)
    return {candidate.plan.layout for candidate in found.candidates}


def test_a_class_of_shards_asks_for_shards():
    assert all(layout.state_degree > 1 for layout in layouts(zero=3))
    assert any(layout.state_degree == 1 for layout in layouts()), "the control: copies are priced without it"


def test_blocks_of_stages_ask_for_a_pipeline():
    found = layouts(stages="2+2")
    assert found and all(layout.pp == 2 for layout in found)


@pytest.mark.parametrize(("devices", "asked"), [(1, {}), (2, {"dp_replicate": 2})])
def test_where_nothing_can_be_sharded_the_plan_stands_and_says_so(devices, asked):
    (layout,) = layouts(devices, zero=3, **asked)
    (said,) = unused_options(Plan(layout), PlanSpec(zero=3, **asked))
    assert said.startswith("plan.zero = 3 changes nothing: ")


@pytest.mark.parametrize(
    "asked",
    [
        {"zero": 1}, {"schedule": "gpipe"}, {"schedule": "interleaved", "virtual_stages": 2}, {"stages": "2+2"},
        {"cp_method": "ring"}, {"expert_slots": 1.5}, {"recompute": "full", "recompute_save": ("products",)},
    ],
)  # fmt: skip
def test_every_option_that_a_layout_ignores_is_said_by_its_name_and_no_other(asked):
    said = unused_options(Plan(Layout(dp_replicate=2)), PlanSpec(**asked))
    assert [line.split(" = ")[0] for line in said] == [f"plan.{name}" for name in asked if name != "recompute"]
    used = Plan(Layout(dp_shard=2, cp=2, pp=2, ep=2), recompute="selective", cp_method="ring")
    assert not unused_options(used, PlanSpec(**asked))


def test_defaults_and_a_plan_made_into_constraints_say_nothing():
    assert not unused_options(Plan(Layout(dp_replicate=2)), PlanSpec())
    for layout in (Layout(), Layout(dp_replicate=2), Layout(dp_shard=2), Layout(pp=2)):
        given = make_spec({"data": {"source": "text.txt"}}, Plan(layout)).plan
        assert not unused_options(Plan(layout), given), layout
