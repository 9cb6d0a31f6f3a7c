"""Noise on embeddings: its size, when there is none, and the same numbers on every layout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from distributed import run_ranks
from tests_shared import SEQ_LEN, VOCAB, PaddedText, decoder_task, plan_of
from torch import nn

from paceline.errors import ConfigError
from paceline.run.process.world import join_world
from paceline.spec.adapt.adapter import Adaptation, AdapterSpec
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.task.adapt.noise import noises
from paceline.task.models.build import build_model
from paceline.verify.compare.layout import compare

ALPHA = 5.0
LORA = AdapterSpec(kind="lora", rank=3, init="random")


def built(adapter: AdapterSpec = AdapterSpec()) -> Any:  # noqa: B008 (frozen)
    return build_model(decoder_task().model, VOCAB, SEQ_LEN, 3, adaptation=Adaptation(adapter, noise=ALPHA))


def test_noise_is_as_large_as_the_paper_has_it_and_off_in_evaluation() -> None:
    model, tokens = built(), torch.arange(4 * SEQ_LEN).view(4, SEQ_LEN) % VOCAB
    plain = nn.functional.embedding(tokens, model.embed_tokens.weight)
    noise = (model.embed_tokens(tokens) - plain).detach()
    bound = ALPHA / math.sqrt(SEQ_LEN * plain.shape[-1])
    assert 0.95 * bound < float(noise.abs().max()) <= 1.0001 * bound and abs(float(noise.mean())) < 0.1 * bound
    assert torch.equal(model.eval().embed_tokens(tokens), plain)


def test_noise_is_added_once_and_where_the_embedding_is_known() -> None:
    adaptation = Adaptation(noise=ALPHA)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    for _ in range(2):
        build_model(model, 0, 0, 1, adaptation=adaptation)
    assert len(list(noises(model))) == 1
    for other in (nn.Linear(2, 2), nn.Sequential(nn.Embedding(5, 4), nn.Embedding(5, 4))):
        with pytest.raises(ConfigError, match="embedding_noise"):
            build_model(other, 0, 0, 1, adaptation=adaptation)
    with pytest.raises(ConfigError, match="other noise"):
        build_model(model, 0, 0, 1, adaptation=dataclasses.replace(adaptation, noise=1.0))


def compared(plans: list[Plan]) -> list[CheckProof]:
    """Return comparisons with one device, of a whole model and of adapters."""
    world = join_world("cpu", threads=1)
    tasks = [decoder_task(embedding_noise=ALPHA), decoder_task(embedding_noise=ALPHA, adapter=LORA)]
    return [compare(task, plan, world, PaddedText(), SEQ_LEN, 2) for plan in plans for task in tasks[: len(plans)]]


@pytest.mark.parametrize(
    "plans",
    [
        [plan_of(Layout(tp=2), precision="fp64"), plan_of(Layout(dp_shard=2), precision="fp64", zero=3)],
        pytest.param([plan_of(Layout(cp=2), precision="fp64")], marks=pytest.mark.deep),
        pytest.param([plan_of(Layout(pp=2), precision="fp64", schedule="1f1b")], marks=pytest.mark.deep),
    ],
    ids=lambda plans: str(plans[0].layout),
)
def test_noise_is_that_of_its_samples(plans: list[Plan]) -> None:
    for proof in run_ranks(compared, 2, plans)[0]:
        assert proof.equal, proof.first_difference
