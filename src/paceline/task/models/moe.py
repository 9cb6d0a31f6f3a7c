"""The built-in decoder with mixtures of experts: Mixtral's structure, and DeepSeekMoE's with shared experts.

A router sends each token to its `top_k` experts (Jiang et al. 2024, arXiv:2401.04088; Dai et al. 2024, 2401.06066).
There is no capacity: no token is dropped and none is padded. Names below the prefix `model.` equal those of
Hugging Face's MixtralForCausalLM (transformers 5), the shared experts' those of DeepSeek's models.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.task.models.balance import SequenceSum, expert_counts, sequence_balance
from paceline.task.models.decoder import Decoder, DecoderLayer, FeedForward
from paceline.task.models.loss import IGNORED
from paceline.task.models.products import expert_products
from paceline.task.models.sizes import DecoderConfig, MoEConfig
from paceline.task.rules import Rules, moe_rules

ENTROPY, BALANCE = -2, -1  # columns of `MoEDecoder.routed` after one per expert


class Routed(NamedTuple):
    """What a layer tells of its routing besides its output."""

    balance: Tensor  # [rows], the balance loss of each sequence
    counts: Tensor  # [rows, experts], tokens that chose each expert
    entropy: Tensor  # [rows], in nats, summed over tokens


class Exchange(Protocol):
    """Sends rows to the ranks that hold their experts, and results back: see run/parallel/expert.py."""

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return (rows for this rank's experts sorted by expert, counts of them, what `combine` needs)."""

    def combine(self, results: Tensor, ticket: Any) -> Tensor:
        """Return the results of the rows that this rank sent, in the order in which it sent them."""


class Router(nn.Module):
    """Scores every expert for every token and chooses the best `top_k`."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k, self.renormalise = config.top_k, config.renormalise
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.e_score_correction_bias: Tensor | None
        bias = torch.zeros(config.experts) if config.balance == "bias" else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [rows, seq, hidden]
        """Return (probabilities [rows, seq, experts], weights and indices of the chosen [rows, seq, top_k] each).

        Probabilities are the softmax over all experts in fp32 at least.
        """
        logits = F.linear(x, self.weight)
        probabilities = logits.to(torch.promote_types(x.dtype, torch.float32)).softmax(dim=-1)
        scores = probabilities.detach()
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        chosen = scores.topk(self.top_k, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return probabilities, weights, chosen


class Experts(nn.Module):
    """The experts of a layer, SwiGLU each, their weights stacked: [experts, out, in].

    Under expert parallelism the weights are DTensors of which this rank holds some whole experts, and `exchange` moves
    the tokens.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2 * config.expert_ffn, config.hidden))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert_ffn))
        self.exchange: Exchange | None = None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs [tokens, hidden] for `rows` [tokens, hidden], sorted by expert.

        `counts` [experts] int64 says how many rows each expert gets.
        """
        gate_up, down = _held(self.gate_up_proj), _held(self.down_proj)
        if self.exchange is None:
            return expert_products(rows, counts, gate_up, down)
        rows, counts, ticket = self.exchange.dispatch(rows, counts)
        return self.exchange.combine(expert_products(rows, counts, gate_up, down), ticket)


class MoE(nn.Module):
    """A router, its experts and, where the config has them, shared experts that every token passes."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = FeedForward(_shared(config)) if config.shared_ffn else None
        self.over_sequence: SequenceSum | None = None  # set where ranks share sequences

    def forward(self, x: Tensor) -> tuple[Tensor, Routed]:  # [rows, seq, hidden]
        """Return the output [rows, seq, hidden] and what the router did."""
        probabilities, weights, chosen = self.gate(x)
        out = self._through_experts(x.flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1)).view_as(x)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        counts = expert_counts(chosen, probabilities.shape[2])
        with torch.no_grad():
            entropy = torch.special.entr(probabilities).sum(dim=(1, 2))
        return out, Routed(sequence_balance(probabilities, counts, self.over_sequence), counts, entropy)

    @torch.compiler.disable  # how many tokens an expert gets is data, and shapes follow from it
    def _through_experts(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return [tokens, hidden]: per token the weighted sum over its experts; weights and chosen [tokens, top_k]."""
        top_k = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)  # [tokens x top_k], sorted by expert
        counts = torch.bincount(chosen.flatten(), minlength=self.gate.weight.shape[0])
        results = self.experts(tokens[order // top_k], counts)
        # Back in the order of the tokens, so that a token's sum runs over its experts as it chose them: in any layout.
        results = results[order.argsort()].view(-1, top_k, tokens.shape[1])
        return torch.bmm(weights.to(results.dtype).unsqueeze(1), results).squeeze(1)


class RoutedLayer(DecoderLayer):
    """One repeated block, with experts or, in the first `dense_layers` layers, without."""

    def __init__(self, config: MoEConfig, index: int) -> None:
        super().__init__(config)
        if index >= config.dense_layers:
            self.mlp = MoE(config)  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Routed | None]:
        """Return the stream after this layer, and what its router did where it has one."""
        dtype = self.input_layernorm.weight.dtype
        x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out = self.mlp(self.post_attention_layernorm(x))
        out, routed = out if isinstance(out, tuple) else (out, None)
        return x + out, routed


class MoEDecoder(Decoder):
    """The whole decoder. Its loss includes the auxiliary balance loss in training, and is the cross-entropy otherwise.

    Every sequence adds balance_weight x (its counted labels) x (the mean over layers of its balance loss), so that the
    step's loss is the mean cross-entropy plus balance_weight times the mean balance, in any layout.
    """

    config: MoEConfig
    routed: Tensor | None = None  # of the last forward pass in training, see `_record`

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(RoutedLayer(config, index) for index in range(config.layers))
        self.over_sequence: SequenceSum | None = None  # set where ranks share sequences

    @property
    def paceline_rules(self) -> Rules:
        """How the model may be split."""
        config = self.config
        return moe_rules(dense_layers=config.dense_layers > 0, shared_experts=config.shared_ffn > 0)

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [rows, seq, vocab]; with `labels`, (loss_sum, weight), as Decoder.forward does."""
        x, cos, sin = self.begin(tokens, positions)
        told: list[Routed] = []
        for layer in self.layers:
            x, routed = layer(x, cos, sin, mask)
            if routed is not None:
                told.append(routed)
        out = self.finish(x, labels, tokens.shape[1])
        if labels is None or not self.training or not told:
            return out
        loss_sum, weight = out
        items = (labels != IGNORED).sum(dim=1)  # [rows]
        if self.over_sequence is not None:
            items = self.over_sequence(items)
        balance = torch.stack([routed.balance for routed in told]) * items  # [layers, rows]
        self.routed = _record(told, balance)
        if self.config.balance == "sequence" and self.config.balance_weight:
            loss_sum = loss_sum + self.config.balance_weight * balance.mean(dim=0).sum().to(loss_sum.dtype)
        return loss_sum, weight


def _record(told: list[Routed], balance: Tensor) -> Tensor:
    """Return sums over rows, fp64 [layers with experts, experts + 2]: tokens per expert, entropy, balance x items."""
    with torch.no_grad():
        counts = torch.stack([routed.counts.sum(dim=0) for routed in told]).double()
        entropy = torch.stack([routed.entropy.sum() for routed in told]).double()
        return torch.cat([counts, entropy[:, None], balance.detach().double().sum(dim=1, keepdim=True)], dim=1)


def routers(model: nn.Module) -> dict[str, Router]:
    """Return the routers of a model by module name, in the order of its layers."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


def _held(weight: Tensor) -> Tensor:
    """Return the experts that this rank holds, of a stacked weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _shared(config: MoEConfig) -> DecoderConfig:
    return DecoderConfig(
        config.name, config.hidden, 1, config.heads, config.kv_heads, config.head_dim, config.shared_ffn
    )
