"""PooledDecoder: the built-in decoder with a head for a whole text: a class, a number, or several labels at once.

The head `score` reads the mean of the last hidden states over a row's real tokens. Attention is causal and rows are
filled up at their ends, so no real token sees what fills a row up: a row's outputs do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.spec.task import ModelSpec
from paceline.task.models.decoder import DecoderLayer, rotary_tables
from paceline.task.models.init import initial_part
from paceline.task.models.layers.absent import Absent
from paceline.task.models.layers.norm import RMSNorm
from paceline.task.models.shape import DecoderConfig, MoEConfig
from paceline.task.models.sizes import resolve_decoder
from paceline.task.rules import Rules, decoder_rules

HEAD = "score"  # as in Hugging Face's models for sequence classification
NOT_SPLIT = ("sequence", "summed")  # styles of activations that are split along the sequence, over which the mean goes


class PooledDecoder(nn.Module):
    """A decoder whose head gives `outputs` numbers for each row."""

    def __init__(self, shape: DecoderConfig, outputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.score = nn.Linear(shape.hidden, outputs)

    @property
    def paceline_rules(self) -> Rules:
        """How the model may be split: as the decoder, but for activations, which are whole, and the head."""
        plain = decoder_rules(True, self.shape.heads, self.shape.kv_heads)
        tensor = {pattern: style for pattern, style in plain.tensor.items() if style not in NOT_SPLIT}
        return Rules(tensor, plain.first, plain.blocks, ("norm", HEAD), plain.counts)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return outputs [rows, outputs] of `tokens`, int64 [rows, seq]; `attention_mask` is 1 where they are real."""
        x = self.embed_tokens(tokens)  # [rows, seq, hidden]
        cos, sin = rotary_tables(self.shape, torch.arange(x.shape[1], device=x.device), x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        if isinstance(self.norm, Absent):
            return x  # a pipeline stage before the last
        x = self.norm(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        real = torch.ones_like(x[..., 0]) if attention_mask is None else attention_mask
        real = real.to(wide).unsqueeze(-1)  # [rows, seq, 1]
        mean = (x.to(wide) * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)  # [rows, hidden]
        return self.score(mean.to(self.score.weight.dtype))


def pooled_decoder(size: str, outputs: int, vocab: int, seq_len: int = 1, **overrides: Any) -> PooledDecoder:
    """Return a decoder of a named size with a head of `outputs`; `overrides` are those of task.model.

    Its weights are drawn as the decoder's, by torch's seed; the head's bias is zero. Raises ConfigError for sizes with
    experts.
    """
    shape = resolve_decoder(ModelSpec(name=size, **overrides), vocab, seq_len)
    if isinstance(shape, MoEConfig):
        raise ConfigError(
            f"model {size} with labels for whole texts", "its routers' balance is a loss of tokens", "a llama size"
        )
    model = PooledDecoder(shape, outputs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == f"{HEAD}.bias":
                parameter.zero_()
            elif parameter.dim() > 1 and not parameter.is_meta:
                whole = tuple(parameter.shape)
                drawn = initial_part(name, whole, shape.layers, torch.initial_seed(), (0,) * len(whole), whole)
                parameter.copy_(drawn)
    return model
