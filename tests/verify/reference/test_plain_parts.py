"""Adapters and noise are ours: layout and reference would share a mistake in them, so the reference has its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from distributed import run_ranks
from set_ups import Text
from tests_shared import SEQ_LEN, decoder_task, plan_of
from torch import nn

from paceline.run.process.world import join_world
from paceline.spec.adapt.adapter import AdapterSpec, proof_adapter
from paceline.spec.layout import Layout
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import Task
from paceline.task.adapt import linear
from paceline.task.adapt.linear import AdaptedLinear
from paceline.task.adapt.noise import EmbeddingNoise
from paceline.verify.process.checks import CHECKS
from paceline.verify.reference.plain_parts import add_plainly

PRODUCT, NOISE = linear.adapted_product, EmbeddingNoise.__call__


def task_of(kind: str = "lora", noise: float = 0.0) -> Task:
    adapter = proof_adapter(AdapterSpec(kind, rank=2, dropout=0.3))
    return decoder_task(adapter=adapter, embedding_noise=noise, optimizer=OptimizerSpec(lr=3e-3, eps=1e-4))


def without_dropout() -> None:
    def product(layer: Any, *rest: Any) -> Any:
        layer.lora_dropout.eval()
        return PRODUCT(layer, *rest)

    linear.adapted_product = product


def at_twice_the_scale() -> None:
    def product(layer: Any, *rest: Any) -> Any:
        spec = layer.spec
        layer.spec = dataclasses.replace(spec, alpha=2 * spec.alpha)
        try:
            return PRODUCT(layer, *rest)
        finally:
            layer.spec = spec

    linear.adapted_product = product


def louder() -> None:
    def add(self: EmbeddingNoise, module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        return out + 2 * (NOISE(self, module, args, out) - out)

    EmbeddingNoise.__call__ = add


PLANTED = {"": None, "dropout": without_dropout, "scale": at_twice_the_scale, "noise": louder}


def held(planted: str, task: Task) -> CheckProof:
    world, plan = join_world("cpu", threads=1), plan_of(Layout(dp_replicate=2), batch=5, precision="fp64")
    if (plant := PLANTED[planted]) is not None:
        plant()
    return CHECKS["steps"](task, plan, world, task.data, SEQ_LEN, 2, {})


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_what_nobody_planted_is_equal(kind: str) -> None:
    record = run_ranks(held, 2, "", task_of(kind, noise=5.0))[0]
    assert record.equal, record.first_difference


def shared(length: int) -> CheckProof:
    world, plan = join_world("cpu", threads=1), plan_of(Layout(cp=2), batch=3, precision="fp64")
    task = decoder_task(embedding_noise=5.0, data=Text(length), optimizer=OptimizerSpec(lr=3e-3, eps=1e-4))
    return CHECKS["steps"](task, plan, world, task.data, length, 2, {})


def test_noise_is_of_the_whole_length_where_the_ranks_parts_are_filled_up() -> None:
    record = run_ranks(shared, 2, 7)[0]
    assert record.equal, record.first_difference


@pytest.mark.parametrize("planted", ["dropout", "scale", "noise"])
def test_a_mistake_in_what_both_would_share_is_seen(planted: str) -> None:
    record = run_ranks(held, 2, planted, task_of(noise=5.0))[0]
    assert not record.equal
    assert record.first_difference.quantity == "loss"


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_layer_written_plainly_is_ours_with_a_bias_and_without_its_adapter(kind: str) -> None:
    torch.manual_seed(0)
    layer = linear.adapted(nn.Linear(6, 4).double(), AdapterSpec(kind, rank=2)).eval()
    with torch.no_grad():
        for weight in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
            if weight is not None:
                weight.uniform_(0.5, 1.0)
    x = torch.randn(3, 6, dtype=torch.float64)
    for on in (True, False):
        layer.is_on = on
        ours = AdaptedLinear.forward(layer, x)
        add_plainly(layer)
        assert torch.allclose(layer(x), ours, rtol=1e-12)
