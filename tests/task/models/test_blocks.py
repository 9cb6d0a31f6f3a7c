"""Repeated blocks are found in models that nobody described."""

from __future__ import annotations

import pytest
import torch
from decoders import tiny
from tests_shared import plan_of
from torch import nn

from paceline.plan.feasible.stages import pipeline_limits
from paceline.spec.layout import Layout
from paceline.task.models.blocks import find_blocks
from paceline.task.models.decoder import Decoder
from paceline.task.objective import next_token
from paceline.task.profile.traced import profile_module
from paceline.task.rules import Rules


def names(model: nn.Module) -> list[str]:
    found = find_blocks(model)
    assert all(model.get_submodule(name) is block for name, block in found)
    return [name for name, _ in found]


def transformers_model(kind: str) -> nn.Module:
    import transformers as hf

    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 3}
    with torch.device("meta"):
        if kind == "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**small, vocab_size=50))
        if kind == "gpt2":
            return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=50, n_positions=16))
        if kind == "bert":
            return hf.BertForSequenceClassification(hf.BertConfig(**small, vocab_size=50))
        if kind == "vit":
            return hf.ViTForImageClassification(hf.ViTConfig(**small, image_size=8, patch_size=4))
        if kind == "t5":
            return hf.T5ForConditionalGeneration(
                hf.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=50)
            )
        return hf.MixtralForCausalLM(hf.MixtralConfig(**small, num_key_value_heads=2, vocab_size=50))


@pytest.mark.parametrize(
    ("kind", "path", "count"),
    [("llama", "model.layers", 3), ("gpt2", "transformer.h", 3), ("bert", "bert.encoder.layer", 3),
     ("mixtral", "model.layers", 3)],
)  # fmt: skip
def test_transformers(kind: str, path: str, count: int) -> None:
    assert names(transformers_model(kind)) == [f"{path}.{index}" for index in range(count)]


def test_vit_layers() -> None:
    found = find_blocks(transformers_model("vit"))
    assert len(found) == 3
    assert {type(block).__name__ for _, block in found} == {"ViTLayer"}


def test_an_encoder_and_a_decoder_both_count() -> None:
    paths = names(transformers_model("t5"))
    assert paths == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]


def test_our_decoder() -> None:
    assert names(Decoder(tiny(layers=3))) == ["layers.0", "layers.1", "layers.2"]


def conv(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(1, outer), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(width, width), conv(width, width))


class Stages(nn.Module):
    """Like a ResNet: stages of growing width, each a Sequential of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.stage1 = nn.Sequential(Residual(4), Residual(4))
        self.stage2 = nn.Sequential(Residual(16), Residual(16))
        self.head = nn.Linear(16, 10)


def test_a_small_convolutional_network() -> None:
    model = nn.Sequential(conv(1, 8), conv(8, 8), conv(8, 16), nn.Flatten(), nn.Linear(16, 10))
    assert names(model) == ["0", "1", "2"]


def test_stages_are_looked_into() -> None:
    assert names(Stages()) == ["stage1.0", "stage1.1", "stage2.0", "stage2.1"]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4)) for _ in range(3))


def test_layers_of_experts_are_layers() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Experts(), Experts()])})
    assert names(model) == ["layers.0", "layers.1"]


class Siblings(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.out = first, second, nn.Linear(4, 2)


def test_sibling_attributes_of_one_class() -> None:
    assert names(Siblings(conv(4, 4), conv(4, 4))) == ["first", "second"]


def test_twin_towers_are_looked_into() -> None:
    found = names(Siblings(Stages(), Stages()))
    assert found == [
        f"{tower}.stage{stage}.{block}" for tower in ("first", "second") for stage in (1, 2) for block in (0, 1)
    ]


class Declared(nn.Module):
    """Says itself where its blocks are: bare layers, beside a tower that would count as blocks."""

    paceline_rules = Rules(first=("embed", "tower"), blocks="body.layers", last=("head",))

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed, self.tower = nn.Embedding(5, 4), nn.Sequential(conv(4, 4), conv(4, 4))
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, 5]."""
        x = self.embed(tokens)
        x = x + self.tower(x.transpose(1, 2)[..., None])[..., 0].transpose(1, 2)
        for layer in self.body.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@pytest.mark.parametrize("count", [4, 1])
def test_declared_blocks_are_the_blocks(count: int) -> None:
    assert names(Declared(count)) == [f"body.layers.{at}" for at in range(count)]


@pytest.mark.parametrize(
    ("count", "because"), [(4, None), (1, "the model's 1 blocks are fewer than 2 pipeline stages")]
)
def test_the_plan_cuts_the_blocks_that_the_pipeline_cuts(count: int, because: str | None) -> None:
    batch = {"tokens": torch.zeros(2, 3, dtype=torch.long), "labels": torch.zeros(2, 3, dtype=torch.long)}
    profile = profile_module(Declared(count), batch, next_token)
    assert "pp" not in (profile.closed_axes or {})
    assert pipeline_limits(plan_of(Layout(pp=2)), profile) == because


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
        nn.Identity(),
        nn.ModuleList(),
        nn.Sequential(nn.Sequential(nn.Linear(2, 2))),
    ],
)
def test_models_without_repeated_blocks(model: nn.Module) -> None:
    assert find_blocks(model) == []
