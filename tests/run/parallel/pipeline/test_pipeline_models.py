"""Hugging Face causal models go through a pipeline as they are; a model that is not a chain is refused."""

from __future__ import annotations

import functools
import traceback
from typing import Any

import pytest
import torch
from distributed import run_ranks
from test_pipeline import INTERLEAVED, TWO, Net, assert_equal, piped, weights_held
from tests_shared import VOCAB, decoder_task
from torch import nn

from paceline.errors import ConfigError
from paceline.spec.layout import Layout
from paceline.task.objective import next_token

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def hugging_face(family: str, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """Return a tiny causal model of a family, from its config alone."""
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def task_of(family: str, **changes: Any) -> Any:
    return decoder_task(model=functools.partial(hugging_face, family, **changes), objective="next_token")


MIXED = {"use_sliding_window": True, "sliding_window": 4,
         "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip


def test_families_from_their_configs() -> None:
    assert_equal(
        [
            (task_of("Llama", tie_word_embeddings=True), piped(TWO)),
            (task_of("Qwen2"), piped(TWO, recompute="full", **INTERLEAVED)),
            (task_of("Qwen3", **MIXED), piped(TWO, stages=(1, 3))),
            (task_of("Mistral", tie_word_embeddings=False), piped(TWO, schedule="zero-bubble")),
        ],
        ranks=2,
    )


def test_a_family_with_shards() -> None:
    sharded = Layout(pp=2, dp_shard=2)
    assert_equal(
        [
            (task_of("Llama", tie_word_embeddings=True), piped(sharded)),
            (task_of("Qwen3", tie_word_embeddings=False), piped(sharded, zero=2, **INTERLEAVED)),
        ],
        ranks=4,
    )


@pytest.mark.deep
def test_stages_of_tensor_ranks_follow_the_rules_of_the_whole_model() -> None:
    layout = Layout(pp=2, tp=2)
    gemma = {"hidden_size": 16, "query_pre_attn_scalar": 8, "sliding_window": 5}  # its embedding is no plain layer
    heads = {"num_key_value_heads": 2}
    assert_equal(
        [
            (task_of("Qwen3", tie_word_embeddings=True, **heads), piped(layout)),
            (task_of("Qwen3", tie_word_embeddings=False, **heads), piped(layout, **INTERLEAVED)),
            (task_of("Gemma2", attention="eager", **gemma, **heads), piped(layout)),
        ],
        ranks=4,
    )


class Scaled(Net):
    """Scales the embedding outside of the embedding, where it trains: every stage would do it again."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens) * (3.0 if self.training else 1.0)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Capped(Net):
    """Caps its logits outside of the head: every stage would cap what it hands on, by little."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        return 30 * torch.tanh(super().forward(tokens) / 30)


class CutAfterTwo(Net):
    """Stops the gradient after its second layer, by a count that each stage begins anew: no loss tells."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = x + layer(x)
            x = x.detach() if index == 1 else x
        return self.head(x)


class Scales(torch.autograd.Function):
    """Hands on what it is given, and a multiple of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.by, None


class ScaledOnce(Net):
    """Damps the gradient of its embedding as it enters the blocks, which every stage would do again."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        x = Scales.apply(self.embed(tokens), 0.1)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.mark.parametrize("model", [CutAfterTwo, ScaledOnce])
def test_a_chain_of_the_same_loss_and_other_gradients_is_refused(model: type[nn.Module]) -> None:
    plan = piped(TWO, precision="fp32", stages=(2, 2))
    with pytest.raises(ConfigError, match="is not the chain that its rules declare") as refused:
        run_ranks(weights_held, 2, decoder_task(model=model, objective="next_token"), plan)
    assert "give layers." in refused.value.because or "give embed." in refused.value.because
    assert "a gradient of norm" in refused.value.because and "a loss of" not in refused.value.because


class TwoOutputs(Net):
    """Gives two outputs by one head, which stages before the last lack."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Return logits [rows, seq, vocab], twice."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x), self.head(x.tanh())


def of_two(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    one, two = model(batch["tokens"])
    return one.sum() + two.sum(), torch.tensor(batch["tokens"].numel())


def test_stages_that_fail_are_told_as_no_chain() -> None:
    """It was an AttributeError, and told as the layout's."""
    with pytest.raises(ConfigError, match="TwoOutputs is not the chain that its rules declare") as refused:
        run_ranks(weights_held, 2, decoder_task(model=TwoOutputs, objective=of_two), piped(TWO, precision="fp32"))
    assert "AttributeError: 'tuple' object" in refused.value.because


@pytest.mark.parametrize("model", [Scaled, Capped])
def test_a_forward_pass_that_is_no_chain_is_refused(model: type[nn.Module]) -> None:
    with pytest.raises(ConfigError, match="is not the chain that its rules declare"):
        run_ranks(weights_held, 2, decoder_task(model=model, objective="next_token"), piped(TWO, precision="fp32"))


def without_room(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Find no memory where stages are tried in turn."""
    if any(frame.name == "_chained" for frame in traceback.extract_stack()):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return next_token(model, batch)


def test_stages_that_find_no_memory_are_not_told_as_no_chain() -> None:
    """A smaller micro-batch would have gone on; told as the rules' mistake the run ended."""
    with pytest.raises(Exception, match="out of memory") as raised:
        run_ranks(weights_held, 2, decoder_task(model=Net, objective=without_room), piped(TWO, precision="fp32"))
    assert not isinstance(raised.value, ConfigError)
