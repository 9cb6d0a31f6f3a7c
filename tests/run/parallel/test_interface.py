"""Decoders of transformers share sequences: attention over ranks by their own interface, equal to one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from distributed import run_kept, run_ranks
from tests_huggingface import causal, hf_task
from tests_shared import coarse_plan as plan_of
from tests_shared import world_here
from torch import nn

from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import Task
from paceline.task.models.huggingface.interface import why_unshared
from paceline.task.objective import next_token
from paceline.task.profile.traced import profile_module
from paceline.verify.compare.layout import compare

Case = tuple[Task, Plan]


def fp64(layout: Layout, **changes: Any) -> Plan:
    return plan_of(layout, precision="fp64", **changes)


def proofs(cases: list[Case]) -> list[CheckProof]:
    world = world_here()
    return [compare(task, plan, world, task.data, task.data.items_per_sample, 2) for task, plan in cases]


def assert_equal(cases: list[Case]) -> None:
    for (_, plan), found in zip(cases, run_kept(proofs, cases[0][1].layout.devices, cases)[0], strict=True):
        assert found.equal, (str(plan), found.first_difference)


@pytest.mark.parametrize(
    "family", ["Qwen3", "GPTNeoX", *(pytest.param(name, marks=pytest.mark.deep) for name in ("Llama", "Mistral"))]
)
def test_two_ranks_share_sequences(family: str) -> None:
    two = Layout(cp=2)
    assert_equal([(hf_task(family), fp64(two)), (hf_task(family, 13), fp64(two, cp_method="ring"))])


@pytest.mark.deep
def test_three_ranks_share_sequences() -> None:
    three = Layout(cp=3)
    cases = [(hf_task(family, 13), fp64(three, cp_method="ring")) for family in ("Llama", "GPTNeoX")]
    assert_equal([*cases, (hf_task("Qwen3", 18), fp64(three)), (hf_task("Mistral", 5), fp64(three, batch=3))])


def test_a_loss_in_chunks_is_shared_too() -> None:
    """The parts are compared by their logits, which training never has: its head computes the loss."""
    assert_equal([(hf_task("Llama", 13), fp64(Layout(cp=2), logits_elements=64))])


def test_scales_widths_and_learnt_positions() -> None:
    """Granite has its own scale, DeepSeek's keys are wider than its values, GPT-2 learns its positions."""
    assert_equal([(hf_task(family, 13), fp64(Layout(cp=2))) for family in ("Granite", "DeepseekV3", "GPT2")])


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.deep)])
def test_padding_is_not_attended_to_on_any_rank(side: str) -> None:
    cases = [(hf_task(family, 13, side), fp64(Layout(cp=2))) for family in ("Llama", "GPT2")]
    assert_equal([*cases, (hf_task("Llama", 13, side), fp64(Layout(cp=2), recompute="full"))])


@pytest.mark.deep
@pytest.mark.parametrize(
    "layout", [Layout(cp=2, dp_shard=2), Layout(cp=2, tp=2), Layout(cp=2, pp=2), Layout(cp=4)], ids=str
)
def test_compositions(layout: Layout) -> None:
    assert_equal(
        [
            (hf_task("Llama", 19), fp64(layout, recompute="selective")),
            (hf_task("Llama", 19, "left"), fp64(layout, recompute="full", cp_method="ring")),
        ]
    )


CLOSED = {
    "Gemma2": "caps the scores",
    "GptOss": "sinks",
    "Falcon": "attention interface",
    "Mamba2": "attention interface",
}


@pytest.mark.parametrize(("family", "because"), CLOSED.items(), ids=CLOSED)
def test_the_plan_says_why_sequences_cannot_be_shared(family: str, because: str) -> None:
    assert because in closed(hf_task(family, sliding_window=64) if family == "GptOss" else hf_task(family))["cp"]


def closed(task: Task) -> dict[str, str]:
    batch = task.data.read(torch.arange(3).numpy())
    found = profile_module(task.model(), batch, next_token).closed_axes
    assert found is not None
    return found


def test_the_plan_opens_what_is_plain_causal_attention() -> None:
    for family in ("Llama", "Mistral", "GPT2", "Mixtral", "DeepseekV3"):
        assert "cp" not in closed(hf_task(family)), family
    mistral = hf_task("Mistral", sliding_window=12)
    assert "slides over 12 of 16 tokens" in closed(mistral)["cp"]
    assert "cp" not in closed(hf_task("Mistral", 12, sliding_window=12)), "a window of the whole row is none"
    assert "attention_dropout" in closed(hf_task("Llama", attention_dropout=0.1))["cp"]
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    assert "largest position" in closed(hf_task("Llama", rope_parameters=rope))["cp"]


def test_bidirectional_attention_is_not_shared() -> None:
    model = causal("Bert", is_decoder=False)
    assert "not causal" in why_unshared(model, 16)


class Smeared(nn.Module):
    """A feed-forward layer in which every token also sees the one before it: no rank has that one of its first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, tokens, hidden]."""
        return self.inner(x + nn.functional.pad(x, (0, 0, 1, -1)))


def smeared() -> nn.Module:
    model: Any = causal("Llama")
    model.model.layers[1].mlp = Smeared(model.model.layers[1].mlp)
    return model


def share(task: Task, plan: Plan) -> None:
    assemble(task, plan, world_here(), task.data, task.data.items_per_sample)


def test_a_model_whose_tokens_meet_elsewhere_is_refused_before_it_trains() -> None:
    task = dataclasses.replace(hf_task("Llama"), model=smeared)
    with pytest.raises(ConfigError, match="others than of the whole row"):
        run_ranks(share, 2, task, plan_of(Layout(cp=2)))


def test_a_sliding_window_is_refused_whoever_asks_for_cp() -> None:
    with pytest.raises(ConfigError, match="slides over 6"):
        run_ranks(share, 2, hf_task("Mistral", sliding_window=6), plan_of(Layout(cp=2)))
