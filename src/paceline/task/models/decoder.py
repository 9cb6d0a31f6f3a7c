"""The built-in model: a Llama-style decoder (Touvron et al. 2023, arXiv:2302.13971; Dubey et al. 2024, 2407.21783).

RMSNorm, rotary positions, grouped-query attention and SwiGLU, without biases. Module names equal those of Hugging
Face's LlamaForCausalLM below its prefix `model.`. Nothing is cached between calls, so a model built on the meta
device is complete once its parameters are filled.

Weights may be of a lower precision than the input, or the other way round: each layer computes in its weights' dtype.
"""

from __future__ import annotations

import math
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.task.models.absent import Absent
from paceline.task.models.loss import cross_entropy_sum
from paceline.task.models.norm import RMSNorm
from paceline.task.models.sizes import DecoderConfig


def rotary_frequencies(config: DecoderConfig, device: torch.device) -> Tensor:
    """Return the angles per position, [head_dim / 2] in fp32 (Su et al. 2021, arXiv:2104.09864).

    With `rope_scaling`, wavelengths longer than the original context are stretched by `factor`, short ones are kept,
    and those between are interpolated (Llama 3.1, as `_compute_llama3_parameters` in transformers).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_seq / wavelengths
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotary_tables(config: DecoderConfig, seq: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines, [seq, 1, head_dim] each: computed in fp32, given in `dtype`."""
    positions = torch.arange(seq, dtype=torch.float32, device=device)
    angles = torch.outer(positions, rotary_frequencies(config, device)).unsqueeze(1)  # [seq, 1, head_dim / 2]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys [rows, seq, heads, head_dim] turned by their positions; the halves are the pairs."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)


class Attention(nn.Module):
    """Causal self-attention in which `heads / kv_heads` query heads share a key/value head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.kv_heads != config.heads
        self.q_proj = nn.Linear(config.hidden, config.q_width, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_width, bias=False)
        self.o_proj = nn.Linear(config.q_width, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [rows, seq, hidden]
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [rows, seq, heads, head_dim]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [rows, seq, kv_heads, head_dim]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [rows, heads, seq, head_dim]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # [rows, seq, hidden]


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [rows, seq, hidden]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One repeated block: attention and feed-forward, each after a norm and added to the stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [rows, seq, hidden]
        dtype = self.input_layernorm.weight.dtype
        x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The whole decoder. A tied model has no `lm_head`: it uses the embedding, which must be gathered with the root."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)

    @overload
    def forward(self, tokens: Tensor, labels: None = None) -> Tensor: ...

    @overload
    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [rows, seq, vocab]; with `labels`, (loss_sum, weight) without ever holding all logits.

        `tokens` and `labels` are int64 [rows, seq]; labels are the next tokens, -100 is ignored. `loss_sum` is the
        summed cross-entropy in nats, an fp32 scalar (fp64 for an fp64 model); `weight` counts the labels.
        """
        x = self.embed_tokens(tokens)  # [rows, seq, hidden]
        cos, sin = rotary_tables(self.config, tokens.shape[1], x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        if isinstance(self.norm, Absent):
            return x  # a pipeline stage before the last; later stages get this in place of the tokens
        x = self.norm(x)
        head = self.embed_tokens.weight if self.config.tied else self.lm_head.weight  # [vocab, hidden]
        x = x.to(head.dtype)
        if labels is None:
            return F.linear(x, head)
        return cross_entropy_sum(x.flatten(0, 1), head, labels.flatten())
