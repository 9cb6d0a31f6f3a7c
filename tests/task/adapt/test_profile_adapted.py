"""What is frozen, and what adapters add, as the planner counts it, held against the model and torch's counter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.spec.adapt.adapter import Adaptation, AdapterSpec
from paceline.spec.profile import ModelProfile
from paceline.spec.task import ModelSpec
from paceline.task.models.build import build_model
from paceline.task.models.sizes import resolve_decoder
from paceline.task.objective import next_token
from paceline.task.profile.adapted import adapted_profile
from paceline.task.profile.decoder import profile_decoder
from paceline.task.profile.plain import pack_profile, task_key, unpack_profile
from paceline.task.profile.traced import profile_module

ROWS, SEQ, VOCAB = 2, 16, 61
MODEL = ModelSpec("llama-1m", hidden=32, layers=3, heads=4, kv_heads=2, ffn=48, vocab=VOCAB, tied=False)
ADAPTATIONS = {
    "lora": Adaptation(AdapterSpec(kind="lora", rank=4)),
    "some layers": Adaptation(AdapterSpec(kind="lora", rank=4, targets=("q_proj", "layers.2.*"))),
    "and the head": Adaptation(AdapterSpec(kind="lora", rank=4), ("lm_head.*",)),
    "last block": Adaptation(AdapterSpec(), ("layers.2.*",)),
    "all": Adaptation(),
}


def built(adaptation: Adaptation) -> nn.Module:
    return build_model(MODEL, VOCAB, SEQ, 3, adaptation=adaptation)


def profiled(adaptation: Adaptation) -> ModelProfile:
    return adapted_profile(profile_decoder(resolve_decoder(MODEL, VOCAB, SEQ), SEQ), built(adaptation))


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "labels": tokens}


@pytest.mark.parametrize("name", ADAPTATIONS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    model, profile = built(ADAPTATIONS[name]), profiled(ADAPTATIONS[name])
    assert profile.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert profile.trained_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ADAPTATIONS)
def test_products_of_a_step_are_those_that_torch_counts(name: str) -> None:
    model, profile = built(ADAPTATIONS[name]), profiled(ADAPTATIONS[name])
    with FlopCounterMode(display=False) as counter:
        next_token(model, batch())[0].backward()
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(flops for op, flops in counted.items() if "attention" not in op) / ROWS
    expected = sum(block.matmul_flops * (1 + block.backward_products) for block in profile.blocks)
    # Gradients by the inputs of a first block's queries, keys and values, which frozen blocks before it do not want.
    assert products <= expected * 1.0001
    assert products == pytest.approx(expected, rel=0.0001 if name == "all" else 0.06)


def test_a_traced_profile_tells_the_same_of_what_is_frozen() -> None:
    adaptation = ADAPTATIONS["lora"]
    traced = adapted_profile(profile_module(built(adaptation), batch(), next_token, SEQ), built(adaptation))
    analytic = profiled(adaptation)
    assert traced.source == "traced" and traced.trained_parameters == analytic.trained_parameters
    ours, theirs = (next(b for b in p.blocks if b.name == "layers.1") for p in (analytic, traced))
    assert ours.frozen_parameters == theirs.frozen_parameters and ours.matmul_flops == theirs.matmul_flops
    assert ours.backward_products == theirs.backward_products
    assert ours.saved_elements == pytest.approx(theirs.saved_elements, rel=0.05)
    assert (traced.closed_axes or {}).get("pp") == (analytic.closed_axes or {}).get("pp")


def test_a_block_of_which_nothing_is_trained_closes_the_pipeline() -> None:
    assert "layers.0" in (profiled(ADAPTATIONS["last block"]).closed_axes or {})["pp"]
    assert "pp" not in (profiled(ADAPTATIONS["lora"]).closed_axes or {})


def test_a_task_that_is_trained_as_a_whole_keeps_its_key() -> None:
    profile = profiled(Adaptation())
    assert unpack_profile(pack_profile(profile)) == profile
    # What it was before anything could be frozen; but since 2026-11-28 the head holds less memory, and what
    # runs taught of the price before says nothing of this one.
    assert task_key(profile, "adamw") == "3bd582cf3f0c55a0"
    assert task_key(profile, "adamw") != task_key(profiled(ADAPTATIONS["lora"]), "adamw")
