"""Families whose blocks are compiled compute what one device does without a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks
from foreign_catalogue import HF_MODELS, MORE_FAMILIES, Foreign
from foreign_held import task_of
from tests_shared import plan_of
from vectors import needs_vectors

from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.spec.proof.records import CheckProof
from paceline.task.data.source import open_sources
from paceline.verify.compare.layout import compare

BATCH, STEPS = 7, 2
ROWS = {row.name: row for row in (*HF_MODELS, *MORE_FAMILIES)}
# Of each kind of block one: what the compiler makes of others is alike.
FAMILIES = (
    "Llama", "Qwen2", "Gemma2", "Phi", "GPTNeoX", "Falcon", "GPT2", "Bloom", "Mixtral", "Qwen3Moe", "DeepseekV3",
    "GptOss", "Mamba", "Mamba2", "Rwkv", "RecurrentGemma", "Qwen3Next", "Lfm2", "T5", "BERT", "ViT", "ConvNeXt",
    "Whisper", "GPT2 with dropout", "BERT with dropout",
)  # fmt: skip


def compiled(row: Foreign, layout: Layout, **changes: Any) -> CheckProof:
    """Return how the compiled blocks of a family stand to one device, whose blocks are not."""
    torch._dynamo.reset()
    task = task_of(row)
    source = open_sources(task.data, task.seed)[0]
    plan = plan_of(layout, BATCH, 2, **{"precision": "fp64", "compile": True, **changes})
    return compare(task, plan, join_world("cpu", threads=1), source, source.items_per_sample, STEPS)


@needs_vectors
@pytest.mark.deep
@pytest.mark.parametrize("name", FAMILIES)
def test_a_compiled_family_equals_one_device(name: str) -> None:
    found = compiled(ROWS[name], Layout())
    assert found.equal, found.first_difference


@needs_vectors
@pytest.mark.parametrize(
    ("name", "layout", "changes"),
    [
        ("Llama", Layout(dp_shard=2), {"recompute": "full"}),
        pytest.param("Qwen2", Layout(tp=2), {}, marks=pytest.mark.deep),
        pytest.param("T5", Layout(dp_shard=2), {"recompute": "selective"}, marks=pytest.mark.deep),
        pytest.param("Mixtral", Layout(dp_shard=2, ep=2), {}, marks=pytest.mark.deep),
        pytest.param("BERT with dropout", Layout(dp_replicate=2), {}, marks=pytest.mark.deep),
    ],
)
def test_a_compiled_layout_of_a_family_equals_one_device(name: str, layout: Layout, changes: dict[str, Any]) -> None:
    found = run_ranks(compiled, layout.devices, ROWS[name], layout, timeout_seconds=200, **changes)[0]
    assert found.equal, found.first_difference
