"""The built-in decoder with mixtures of experts: Mixtral's structure, and DeepSeekMoE's with shared experts.

A router sends each token to its `top_k` experts (Jiang et al. 2024, arXiv:2401.04088; Dai et al. 2024, 2401.06066).
There is no capacity: no token is dropped and none is padded. Names below the prefix `model.` equal those of
Hugging Face's MixtralForCausalLM (transformers 5), the shared experts' those of DeepSeek's models.
"""

from __future__ import annotations

import types
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.spec.data.labels import IGNORED
from paceline.task.models.chain import HandedOn
from paceline.task.models.decoder import Decoder, DecoderLayer, FeedForward
from paceline.task.models.held import local_of
from paceline.task.models.layers.absent import Absent
from paceline.task.models.layers.attention import Mask
from paceline.task.models.layers.balance import SequenceSum, before_last_label, expert_counts, sequence_balance
from paceline.task.models.layers.loss import LabelsByRow, LossLabels, plain_labels
from paceline.task.models.layers.products import by_expert, expert_products
from paceline.task.models.shape import DecoderConfig, MoEConfig
from paceline.task.rules import Rules, moe_rules

ENTROPY, BALANCE = -2, -1  # columns of `MoEDecoder.routed` after one per expert
WIDE_BYTES = 4  # of values whose sums need no wider ones to be added up in


class Routed(NamedTuple):
    """What a layer tells of its routing besides its output."""

    balance: Tensor  # [rows], the balance loss of each sequence
    counts: Tensor  # [rows, experts], tokens that chose each expert
    entropy: Tensor  # [rows], in nats, summed over tokens


class RegionLike(Protocol):
    """Where tensor ranks share a layer: what enters it, and what they make of it. See run/parallel/tensor.py."""

    def enter(self, x: Tensor) -> Tensor:
        """Return the whole of `x` for ranks that each go on with a part of the layer."""

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' partial `x`."""

    def once(self, x: Tensor) -> Tensor:
        """Return `x`, which all ranks compute alike, with a gradient on one of them alone."""


class Router(nn.Module):
    """Scores every expert for every token and chooses the best `top_k`."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k, self.scoring, self.renormalise = config.top_k, config.scoring, config.renormalise
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.e_score_correction_bias: Tensor | None
        bias = torch.zeros(config.experts) if config.balance == "bias" else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [rows, seq, hidden]
        """Return (probabilities [rows, seq, experts], weights and indices of the chosen [rows, seq, top_k] each).

        Scores are the softmax over all experts in fp32 at least, or each expert's sigmoid; probabilities are scores
        that add up to one (DeepSeek-V3, arXiv:2412.19437, equations 12 to 19; without its limit on groups of experts).
        """
        logits = F.linear(x, self.weight)
        logits = logits.to(torch.promote_types(x.dtype, torch.float32))
        scores = logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(dim=-1)
        probabilities = scores / scores.sum(dim=-1, keepdim=True) if self.scoring == "sigmoid" else scores
        preferred = scores.detach()
        if self.e_score_correction_bias is not None:
            preferred = preferred + self.e_score_correction_bias
        chosen = preferred.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return probabilities, weights, chosen


class Experts(nn.Module):
    """The experts of a layer, SwiGLU each, their weights stacked: [experts, ..., in].

    Under expert parallelism a rank holds some whole experts and gets the tokens of those. Under tensor parallelism it
    holds a part of the width of each expert, and so of the outputs' sum. Gate and up have a dimension of their own, so
    that a part of the width is a part of both.
    """

    WIDTH_DIM = 2  # of both weights

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2, config.expert_ffn, config.hidden))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert_ffn))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs [tokens, hidden] for `rows` [tokens, hidden], sorted by expert.

        `counts` [experts] int64 says how many rows each expert gets; what lies behind these stands for no row.
        """
        gate_up, down = local_of(self.gate_up_proj).flatten(1, 2), local_of(self.down_proj)
        return expert_products(rows, counts, gate_up, down)


class MoE(nn.Module):
    """A router, its experts and, where the config has them, shared experts that every token passes."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = FeedForward(_as_wide_as_shared(config)) if config.shared_ffn else None
        self.over_sequence: SequenceSum | None = None  # set where ranks share sequences
        self.region: RegionLike | None = None  # set where tensor ranks share the layer

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Routed]:  # [rows, seq, hidden]
        """Return the output [rows, seq, hidden] and what the router did with the tokens that are `real` [rows, seq].

        Tensor ranks route the whole sequence alike and each compute a part of every expert: what they have is a part
        of the output's sum, and so are the gradients of the router, but for those of the balance loss, which all
        of them compute and one passes on.
        """
        whole = x if self.region is None else self.region.enter(x)
        probabilities, weights, chosen = self.gate(whole)
        out = self._through_experts(whole.flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1)).view_as(whole)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        if self.region is not None:
            out = self.region.leave(out)
        return out, self._told(probabilities, chosen, real)

    def _told(self, probabilities: Tensor, chosen: Tensor, real: Tensor | None) -> Routed:
        """Return what the router did."""
        counts = expert_counts(chosen, probabilities.shape[2], real)
        if real is not None:
            probabilities = probabilities.where(real.unsqueeze(2), 0)
        if self.region is not None:
            probabilities = self.region.once(probabilities)
        with torch.no_grad():
            entropy = torch.special.entr(probabilities).sum(dim=(1, 2))
        balance = sequence_balance(probabilities, counts, self.gate.top_k, self.over_sequence)
        return Routed(balance, counts, entropy)

    def _through_experts(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return [tokens, hidden]: per token the weighted sum over its experts; weights and chosen [tokens, top_k]."""
        top_k = chosen.shape[1]
        order, counts = by_expert(chosen, self.gate.weight.shape[0])  # [tokens x top_k], [experts]
        results = self.experts(tokens[order // top_k], counts)
        # Back in the order of the tokens, so that a token's sum runs over its experts as it chose them: in any layout.
        results = results[order.argsort()].view(-1, top_k, tokens.shape[1])
        weights = weights.to(results.dtype)
        if results.dtype.itemsize >= WIDE_BYTES:  # on a CPU a product for each token takes five times as long
            return (weights.unsqueeze(2) * results).sum(dim=1)
        return torch.bmm(weights.unsqueeze(1), results).squeeze(1)  # rounds once


def leave_experts_out(part: nn.Module) -> None:
    """Have the compiler leave out what goes through experts in a part that it is to compile.

    How many tokens an expert gets is data, and shapes follow from it.
    """
    for module in part.modules():
        if isinstance(module, MoE):
            alone = torch.compiler.disable(type(module)._through_experts)  # bound anew, so that a copy has its own
            module._through_experts = types.MethodType(alone, module)  # type: ignore[method-assign]


class RoutedLayer(DecoderLayer):
    """One repeated block, with experts or, in the first `dense_layers` layers, without."""

    def __init__(self, config: MoEConfig, index: int) -> None:
        super().__init__(config)
        self.place = index - config.dense_layers  # among the layers with experts; below zero without
        if self.place >= 0:
            self.mlp = MoE(config)  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Routed | None]:
        """Return the stream after this layer, and what its router did with `real` tokens where it has one."""
        dtype = self.input_layernorm.weight.dtype
        x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        normal = self.post_attention_layernorm(x)
        out, routed = self.mlp(normal, real) if self.place >= 0 else (self.mlp(normal), None)
        return x + out, routed


class MoEDecoder(Decoder):
    """The whole decoder. Its loss includes the auxiliary balance loss in training, and is the cross-entropy otherwise.

    Every sequence adds balance_weight x (its counted labels) x (the mean over layers of its balance loss), so that the
    step's loss is the mean cross-entropy plus balance_weight times the mean balance, in any layout. A pipeline stage
    adds the part of its own layers.
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
        return moe_rules(
            config.tied,
            config.heads,
            config.kv_heads,
            config.qk_norm,
            dense_layers=config.dense_layers > 0,
            shared_experts=config.shared_ffn > 0,
        )

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        labels: LossLabels | None = None,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        real: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor] | HandedOn:
        """Return logits [rows, seq, vocab]; with `labels`, (loss_sum, weight), as Decoder.forward does.

        Routers take count of the tokens that are `real`, bool [rows, seq]: by default those up to each row's last
        label. A pipeline stage before the last returns what it hands on and what it adds to the loss.
        """
        if real is None and labels is not None:
            real = before_last_label(plain_labels(labels))
        x, cos, sin = self.begin(tokens, positions)
        told: dict[int, Routed] = {}
        for layer in self.layers:
            x, routed = layer(x, cos, sin, mask, real)
            if routed is not None:
                told[_place(layer)] = routed
        added = self._added_loss(told, labels) if labels is not None and self.training else None
        if isinstance(self.norm, Absent):
            return HandedOn(x, added)
        out = self.finish(x, labels, tokens.shape[1])
        return out if added is None else (out[0] + added.to(out[0].dtype), out[1])

    def _added_loss(self, told: dict[int, Routed], labels: LossLabels) -> Tensor | None:
        """Return what these layers' balance adds to the loss, None where it adds nothing; keep what routers did.

        Where rows have weights their balance has the same ones as their cross-entropy; what is kept has none.
        """
        items = (plain_labels(labels) != IGNORED).sum(dim=1)  # [rows]
        if self.over_sequence is not None:
            items = self.over_sequence(items)
        balance = {place: routed.balance * items for place, routed in told.items()}
        self.routed = self._record(told, balance, items.device)
        if not told or self.config.balance != "sequence" or not self.config.balance_weight:
            return None
        rows = torch.stack([*balance.values()])  # [layers, rows]
        if isinstance(labels, LabelsByRow) and labels.weights is not None:
            rows = rows * labels.weights.to(rows)
        return self.config.balance_weight / self.config.routed_layers * rows.sum()

    @torch.no_grad()
    def _record(self, told: dict[int, Routed], balance: dict[int, Tensor], device: torch.device) -> Tensor:
        """Return sums over rows, fp64 [layers with experts, experts + 2]: tokens per expert, entropy, balance x items.

        Rows of layers that other pipeline stages have are zero.
        """
        record = torch.zeros(self.config.routed_layers, self.config.experts + 2, dtype=torch.float64, device=device)
        for place, routed in told.items():
            record[place, :ENTROPY] = routed.counts.sum(dim=0)
            record[place, ENTROPY] = routed.entropy.sum()
            record[place, BALANCE] = balance[place].sum()
        return record


def routers(model: nn.Module) -> dict[str, Router]:
    """Return the routers of a model by module name, in the order of its layers."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


def routers_by_place(model: MoEDecoder) -> dict[int, Router]:
    """Return the routers that a model, or a part of one, holds, by their layer's place among those with experts."""
    return {_place(layer): layer.mlp.gate for layer in model.layers if isinstance(layer.mlp, MoE)}


def _place(layer: nn.Module) -> int:
    assert isinstance(layer, RoutedLayer)
    return layer.place


def _as_wide_as_shared(config: MoEConfig) -> DecoderConfig:
    """Return a dense decoder's sizes whose feed-forward is as wide as the shared experts together."""
    return DecoderConfig(
        config.name, config.hidden, 1, config.heads, config.kv_heads, config.head_dim, config.shared_ffn
    )
