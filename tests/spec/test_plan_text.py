"""The text of a plan: as options have it, as Python callers write it, and as layouts are printed."""

import pytest

from paceline.errors import ConfigError
from paceline.spec.arguments import plan_spec
from paceline.spec.plan import PlanSpec


@pytest.mark.parametrize(
    "text", ["dp_shard=2,tp=4", "dp_shard=2, tp=4", "dp_shard=2 tp=4", " dp_shard = 2  tp = 4 ", "dp_shard=2 ,tp=4"]
)
def test_commas_and_spaces_both_part_what_is_asked(text: str) -> None:
    assert plan_spec(text) == PlanSpec(dp_shard=2, tp=4)


@pytest.mark.parametrize("text", ["dp_shard=2 4", "dp_shard", "dp_shard=2 tp=", "tp=2,,pp=2", "dp shard=2"])
def test_what_is_no_plan_is_refused_in_whole(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a plan"):
        plan_spec(text)
