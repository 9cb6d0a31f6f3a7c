"""Adapters in one process: which layers get them, what they begin with, what they compute, and how they are merged."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.spec.adapt.adapter import Adaptation, AdapterSpec
from paceline.spec.task import ModelSpec
from paceline.task.adapt.fill import adapted_layers
from paceline.task.adapt.linear import AdaptedLinear, is_adapter
from paceline.task.adapt.merge import MergedTensors
from paceline.task.models.build import build_model
from paceline.task.models.unfilled import build_unfilled

VOCAB, SEQ = 61, 8
MODEL = ModelSpec("llama-1m", hidden=32, layers=2, heads=4, kv_heads=2, ffn=40, vocab=VOCAB, tied=False)
TOKENS = torch.arange(2 * SEQ).view(2, SEQ) % VOCAB


def built(adapter: AdapterSpec, *train: str) -> nn.Module:
    return build_model(MODEL, VOCAB, SEQ, seed=3, adaptation=Adaptation(adapter, train))


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_training_begins_at_the_model_as_it_is(kind: str, init: str) -> None:
    plain = build_model(MODEL, VOCAB, SEQ, seed=3)
    model = built(AdapterSpec(kind=kind, rank=4, init=init))
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=1e-5, atol=1e-6)
    weights = {name: weight for name, weight in model.named_parameters() if not is_adapter(name)}
    assert all(torch.equal(weight, weights[name]) for name, weight in plain.named_parameters())


def test_an_adapted_layer_computes_what_the_papers_say() -> None:
    for kind, scale in (("lora", 6.0 / 4), ("rslora", 6.0 / 2)):
        layer = built(AdapterSpec(kind=kind, rank=4, alpha=6.0, init="random")).layers[0].mlp.up_proj  # type: ignore
        x = torch.randn(3, 32)
        by_hand = x @ layer.weight.T + scale * (x @ layer.lora_A.T) @ layer.lora_B
        torch.testing.assert_close(layer(x), by_hand)
    layer = built(AdapterSpec(kind="dora", rank=4, init="random")).layers[0].mlp.up_proj  # type: ignore
    direction = layer.weight + 16.0 / 4 * layer.lora_B.T @ layer.lora_A
    by_hand = x @ (layer.lora_magnitude_vector[:, None] * direction / direction.norm(dim=1, keepdim=True)).T
    torch.testing.assert_close(layer(x), by_hand)
    torch.testing.assert_close(layer.lora_magnitude_vector, layer.weight.norm(dim=1))


def test_the_norm_of_dora_is_a_constant_for_gradients() -> None:
    layer = built(AdapterSpec(kind="dora", rank=4, init="random")).layers[0].mlp.up_proj  # type: ignore
    x = torch.randn(3, 32)
    layer(x).sum().backward()
    ratio = (layer.lora_magnitude_vector / (layer.weight + 4.0 * layer.lora_B.T @ layer.lora_A).norm(dim=1)).detach()
    expected = 4.0 * torch.outer((x @ layer.lora_A.T).sum(0), ratio)
    torch.testing.assert_close(layer.lora_B.grad, expected)


def test_targets_are_all_linear_layers_of_blocks_or_those_that_are_named() -> None:
    every = adapted_layers(built(AdapterSpec(kind="lora")))
    assert len(every) == 2 * 7 and "lm_head" not in every
    some = adapted_layers(built(AdapterSpec(kind="lora", targets=("q_proj", "layers.1.mlp.*"))))
    assert sorted(some) == ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "layers.1.mlp.gate_proj",
                            "layers.1.mlp.up_proj", "layers.1.self_attn.q_proj"]  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "train", "said"),
    [
        (("q_prj",), (), "did you mean 'q_proj'"),
        (("embed_tokens",), (), "no nn.Linear"),
        (("lm_head",), (), "task.train = ['lm_head.*']"),
        ((), ("layer.1.*",), "names no parameter"),
    ],
)
def test_patterns_that_name_nothing_are_refused(targets: tuple[str, ...], train: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        built(AdapterSpec(kind="lora", targets=targets), *train)
    assert said in str(found.value)


def test_only_adapters_and_what_patterns_name_is_trained() -> None:
    trained = {n for n, p in built(AdapterSpec(kind="lora"), "lm_head.*", "norm").named_parameters() if p.requires_grad}
    assert {name for name in trained if not is_adapter(name)} == {"lm_head.weight", "norm.weight"}
    assert len(trained) == 2 + 2 * 14
    trained = {n for n, p in built(AdapterSpec(), "layers.1.*").named_parameters() if p.requires_grad}
    assert trained and all(name.startswith("layers.1.") for name in trained)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_weights_compute_the_same(kind: str) -> None:
    spec = AdapterSpec(kind=kind, rank=4, init="random", base_dtype="bf16" if kind == "lora" else "")
    model = built(spec)
    merged = build_model(MODEL, VOCAB, SEQ, seed=4)
    merged.load_state_dict(dict(MergedTensors(model.state_dict(), spec)))
    torch.testing.assert_close(merged(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)
    assert not any(map(is_adapter, MergedTensors(model.state_dict(), spec)))


def test_the_frozen_weight_rests_in_its_dtype_whatever_happens_to_the_model() -> None:
    model = built(AdapterSpec(kind="lora", base_dtype="bf16")).double()
    layer = model.layers[0].mlp.up_proj  # type: ignore
    assert layer.weight.dtype == torch.bfloat16 and layer.lora_A.dtype == torch.float64
    assert model(TOKENS).dtype == torch.float64


class Wide(nn.Module):
    """Layers of torch whose weights are read without calling them, and one that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
        self.plain = nn.Linear(8, 8)


def test_layers_that_are_read_without_a_call_get_no_adapter() -> None:
    with pytest.raises(ConfigError, match="without calling it"):
        build_model(Wide, 0, 0, seed=1, adaptation=Adaptation(AdapterSpec(kind="lora")))
    model = build_model(Wide, 0, 0, seed=1, adaptation=Adaptation(AdapterSpec(kind="lora", targets=("plain",))))
    assert isinstance(model.plain, AdaptedLinear)


def test_a_model_that_has_its_adapters_is_trained_on_as_it_is() -> None:
    adaptation = Adaptation(AdapterSpec(kind="lora", targets=("0",)))
    model = build_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 0, 0, seed=1, adaptation=adaptation)
    with torch.no_grad():
        model[0].lora_B.fill_(3.0)  # type: ignore
    again = build_model(model, 0, 0, seed=2, adaptation=adaptation)
    assert again is model and bool(torch.equal(again[0].lora_B, torch.full((8, 4), 3.0)))  # type: ignore
    with pytest.raises(ConfigError, match="other adapters"):
        build_model(model, 0, 0, seed=2, adaptation=dataclasses.replace(adaptation, adapter=AdapterSpec(kind="dora")))


def test_first_values_depend_on_the_seed_and_the_name_alone() -> None:
    spec = AdapterSpec(kind="lora", rank=4)
    first, same = built(spec), built(dataclasses.replace(spec, targets=("q_proj",)))
    name = "layers.1.self_attn.q_proj.lora_A"
    assert torch.equal(first.get_parameter(name), same.get_parameter(name))
    assert bool((first.get_parameter(name).abs() <= 1 / math.sqrt(32)).all())
    unfilled = build_unfilled(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 3, Adaptation(spec)).model
    assert unfilled is not None and unfilled.get_parameter("1.lora_A").is_meta
