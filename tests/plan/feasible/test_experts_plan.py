"""The expert axis before anything runs: parameters, layouts that spread experts, what they cost, and refusals."""

from __future__ import annotations

import dataclasses

import pytest
from plan_examples import cluster, plans_of

from paceline.errors import DoesNotFit
from paceline.plan.feasible.experts import refusal
from paceline.plan.search.search import search
from paceline.spec.layout import Layout
from paceline.spec.plan import PlanSpec
from paceline.spec.profile import ModelProfile
from paceline.task.models.shape import MoEConfig
from paceline.task.models.sizes import NAMED_SIZES
from paceline.task.profile.decoder import profile_decoder
from paceline.task.profile.moe import profile_moe
from paceline.verify.twin.layout import twin_layout


def profile_of(name: str, seq: int = 512) -> ModelProfile:
    config = NAMED_SIZES[name]
    assert isinstance(config, MoEConfig)
    return profile_moe(dataclasses.replace(config, vocab=config.vocab or 257, max_seq=config.max_seq or seq), seq)


@pytest.mark.parametrize("name", ["moe-2m", "mixtral-8x7b", "deepseek-moe-16b"])
def test_the_profile_counts_all_parameters_and_those_a_token_passes(name: str) -> None:
    config, profile = NAMED_SIZES[name], profile_of(name)
    assert isinstance(config, MoEConfig)
    config = dataclasses.replace(config, vocab=config.vocab or 257)
    assert profile.parameters == config.parameters
    assert profile.active_parameters == config.active_parameters
    assert profile.expert_parameters == config.routed_layers * config.expert_parameters
    # 2 FLOPs per active weight and token, but for norms, and the embedding that is looked up.
    weights = config.active_parameters - (0 if config.tied else config.vocab * config.hidden)
    products = sum(block.matmul_flops for block in profile.blocks)
    assert products / (2 * profile.tokens_per_sample * weights) == pytest.approx(1, rel=0.01)


def test_the_search_opens_the_axis_for_models_with_experts_only() -> None:
    constraints = PlanSpec(dp_shard=4)
    found = search(profile_of("moe-2m"), cluster(4), constraints, batch_samples=32, steps=10)
    assert {each.layout.ep for each in plans_of(found)} == {1, 2, 4}
    spread = next(c for c in found.candidates if c.plan.layout.ep == 4)
    assert any(term.name == "expert all-to-all" and term.value > 0 for term in spread.forecast.time)
    config = dataclasses.replace(NAMED_SIZES["llama-1m"], vocab=257, max_seq=512)
    plain = search(profile_decoder(config, 512), cluster(4), constraints, batch_samples=32, steps=10)
    assert {each.layout.ep for each in plans_of(plain)} == {1}
    with pytest.raises(DoesNotFit, match="no experts"):
        search(profile_decoder(config, 512), cluster(4), PlanSpec(ep=2), batch_samples=32, steps=10)


def test_the_search_prices_every_axis_and_product() -> None:
    found = search(profile_of("moe-2m"), cluster(8), PlanSpec(), batch_samples=32, steps=10)
    layouts = {each.layout for each in plans_of(found)}
    for layout in (
        Layout(dp_shard=2, tp=2, pp=2, ep=2),
        Layout(cp=2, tp=2, pp=2, ep=2),
        Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2),
    ):
        assert layout in layouts
    with pytest.raises(DoesNotFit, match="heads = 4 cannot be shared evenly by tp = 8"):
        search(profile_of("moe-2m"), cluster(8), PlanSpec(tp=8), batch_samples=32, steps=10)


def test_demanded_degrees_are_kept_or_refused_with_the_reason() -> None:
    found = search(profile_of("moe-2m"), cluster(4), PlanSpec(ep=2), batch_samples=32, steps=10)
    assert all(each.layout.ep == 2 for each in plans_of(found))
    with pytest.raises(DoesNotFit, match=r"plan.ep = 3"):
        search(profile_of("moe-2m"), cluster(4), PlanSpec(ep=3), batch_samples=32, steps=10)


def test_refusals_name_what_does_not_divide() -> None:
    profile = profile_of("moe-2m")
    assert refusal(Layout(dp_shard=4, ep=2), profile) is None
    assert "8 experts cannot be spread evenly over 3" in str(refusal(Layout(dp_shard=3, ep=3), profile))
    assert "width 128 and 96 cannot be sharded over dp_shard x cp / ep = 5" in str(
        refusal(Layout(dp_shard=10, ep=2), profile)
    )
    assert refusal(Layout(dp_shard=6, ep=2), profile) is None, "the experts' own width can be sharded"
    assert "width 128 cannot" in str(refusal(Layout(dp_shard=6, ep=2, tp=2), profile)), "unless tp splits it"


@pytest.mark.parametrize(
    ("layout", "twin"),
    [
        (Layout(dp_shard=4, ep=2), Layout(dp_shard=4, ep=2)),
        (Layout(dp_shard=8, ep=8), Layout(dp_shard=4, ep=4)),
        (Layout(dp_shard=64, ep=8), Layout(dp_shard=4, ep=2)),
        (Layout(dp_replicate=2, dp_shard=32, ep=8), Layout(dp_replicate=2, dp_shard=2, ep=2)),
        (Layout(dp_shard=6, ep=2), Layout(dp_shard=3, ep=3)),
    ],
    ids=str,
)
def test_twins_keep_whether_devices_share_experts(layout: Layout, twin: Layout) -> None:
    assert twin_layout(layout) == twin
