"""Experts of Hugging Face models over the expert axis: the numbers of one device, found without a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks
from tensor_models import _hugging_face
from test_tensor_parallel import compared
from tests_shared import SEQ_LEN, decoder_task, plan_of
from torch import nn

from paceline.plan.layout import Layout
from paceline.task.declared import expert_axis
from paceline.task.objective import next_token
from paceline.task.profile_traced import profile_module

EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}


def mixtral() -> nn.Module:
    """Return a tiny Mixtral."""
    return _hugging_face("Mixtral", **EXPERTS)


def gpt_oss() -> nn.Module:
    """Return a tiny GPT-OSS: gates interleaved, biases, transposed weights."""
    return _hugging_face("GptOss", head_dim=8, sliding_window=6, **EXPERTS)


def qwen3_moe() -> nn.Module:
    """Return a tiny Qwen3-MoE."""
    return _hugging_face("Qwen3Moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


# Routers compute in fp32 whatever they are asked for, so sums in another order are off by that much in fp64 too.
WITHIN = {"loss": 1e-7, "gradients": 1e-5, "weights": 1e-6}


@pytest.mark.parametrize(
    ("family", "layout", "precision"),
    [(mixtral, Layout(dp_shard=2, ep=2), "fp64"), (gpt_oss, Layout(dp_shard=2, ep=2), "fp64"),
     (qwen3_moe, Layout(dp_shard=4, ep=2), "fp64"), (mixtral, Layout(dp_shard=2, ep=2), "fp32")],
    ids=str,
)  # fmt: skip
def test_experts_over_ranks(family: Any, layout: Layout, precision: str) -> None:
    task = decoder_task(model=family, objective="next_token")
    result = run_ranks(compared, layout.devices, task, plan_of(layout, batch=13, precision=precision))[0]
    limits = WITHIN if precision == "fp64" else {"loss": 1e-5, "gradients": 1e-4}
    assert all(result["differences"][name] <= limit for name, limit in limits.items()), result["differences"]


def test_the_planner_knows_them() -> None:
    model = mixtral()
    found, because = expert_axis(model)
    assert not because and len(found) == 2
    tokens = torch.randint(0, 61, (2, SEQ_LEN))
    profile = profile_module(model, {"tokens": tokens, "labels": tokens}, next_token)
    assert profile.experts == 4 and "ep" not in (profile.closed_axes or {})
    assert profile.blocks[0].routed_elements == SEQ_LEN * 32 * 2
