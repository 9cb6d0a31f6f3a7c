"""The built-in model: a Llama-style decoder (Touvron et al. 2023, arXiv:2302.13971; Dubey et al. 2024, 2407.21783).

RMSNorm, rotary positions, grouped-query attention and SwiGLU, without biases but those of Qwen2's queries, keys and
values. Module names equal those of Hugging Face's LlamaForCausalLM below its prefix `model.`. Nothing is cached between
calls, so a model built on the meta device is complete once its parameters are filled.

Weights may be of a lower precision than the input, or the other way round: each layer computes in its weights' dtype.
"""

from __future__ import annotations

import math
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.task.models.layers.absent import Absent
from paceline.task.models.layers.attention import CausalAttention, Mask
from paceline.task.models.layers.chunks import LOGITS_LIMIT_ELEMENTS
from paceline.task.models.layers.loss import LossLabels, cross_entropy_sum, head_logits
from paceline.task.models.layers.norm import RMSNorm
from paceline.task.models.shape import DecoderConfig
from paceline.task.rules import Rules, decoder_rules


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


def rotary_tables(config: DecoderConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines, [..., seq, 1, head_dim] each, of `positions` [..., seq].

    Computed in fp32, given in `dtype`.
    """
    angles = positions.float().unsqueeze(-1) * rotary_frequencies(config, positions.device)
    angles = angles.unsqueeze(-2)  # [..., seq, 1, head_dim / 2]
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
        self.attend = CausalAttention()
        self.q_proj = nn.Linear(config.hidden, config.q_width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden, config.kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden, config.kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.q_width, config.hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        """Return [rows, seq, hidden] for x of that shape; `mask` as in CausalAttention."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [rows, seq, heads, head_dim]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [rows, seq, kv_heads, head_dim]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [rows, heads, seq, head_dim]
        out = self.attend(q, k, v, mask)
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        """Return the stream [rows, seq, hidden] after this layer; `mask` as in CausalAttention."""
        dtype = self.input_layernorm.weight.dtype
        x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The whole decoder. A tied model has no `lm_head`: it uses the embedding, which must be gathered with the root."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.logits_elements = LOGITS_LIMIT_ELEMENTS  # that exist at a time
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)

    @property
    def paceline_rules(self) -> Rules:
        """How the model may be split."""
        return decoder_rules(self.config.tied, self.config.heads, self.config.kv_heads, self.config.qk_norm)

    @overload
    def forward(
        self, tokens: Tensor, labels: None = None, positions: Tensor | None = None, mask: Mask | None = None
    ) -> Tensor: ...

    @overload
    def forward(
        self, tokens: Tensor, labels: LossLabels, positions: Tensor | None = None, mask: Mask | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        tokens: Tensor,
        labels: LossLabels | None = None,
        positions: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [rows, seq, vocab]; with `labels`, (loss_sum, weight) without ever holding all logits.

        `tokens` and `labels` are int64 [rows, seq]; labels are the next tokens, -100 is ignored. `loss_sum` is the
        summed cross-entropy in nats, an fp32 scalar (fp64 for an fp64 model); `weight` counts the labels.
        `positions` [rows, seq] or [seq] say where the tokens stand, by default 0, 1, 2, ...; `mask` [rows, 1, seq,
        keys] which keys each token sees, by default all up to its own.
        """
        x, cos, sin = self.begin(tokens, positions)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        if isinstance(self.norm, Absent):
            return x  # a pipeline stage before the last; later stages get this in place of the tokens
        return self.finish(x, labels, tokens.shape[1])

    def begin(self, tokens: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first layer's input [rows, seq, hidden] and the rotary tables of the tokens' positions."""
        x = self.embed_tokens(tokens)  # [rows, seq, hidden]
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=x.device)
        return x, *rotary_tables(self.config, positions, x.dtype)

    def finish(self, x: Tensor, labels: LossLabels | None, seq: int) -> Tensor | tuple[Tensor, Tensor]:
        """Return what `forward` does, from the output of the last layer [rows, seq, hidden]."""
        x = self.norm(x)
        head = self.embed_tokens.weight if self.config.tied else self.lm_head.weight  # [vocab, hidden]
        x = x.to(head.dtype)
        if labels is None:
            return head_logits(x, head, seq)
        return cross_entropy_sum(x, head, labels, self.logits_elements)
