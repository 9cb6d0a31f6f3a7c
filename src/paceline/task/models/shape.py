"""The shape of a built-in decoder: dense, or with experts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError, suggestion


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches rotary wavelengths beyond `original_max_seq` positions ("llama3" in Hugging Face)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq: int


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a Llama-style decoder. `vocab` and `max_seq` of 0 are templates, to be filled from the data."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int = 0
    tied: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    max_seq: int = 0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False  # whether queries and keys are normalised by head before they are turned, as in Qwen3
    qkv_bias: bool = False  # whether queries, keys and values have biases, as in Qwen2

    def __post_init__(self) -> None:
        for field in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn"):
            if getattr(self, field) < 1:
                raise ConfigError(f"model {self.name}: {field} = {getattr(self, field)}", "it must be at least 1", "1")
        if self.heads % self.kv_heads:
            choices = [count for count in range(1, self.heads + 1) if self.heads % count == 0]
            raise ConfigError(
                f"model {self.name}: heads = {self.heads} with kv_heads = {self.kv_heads}",
                "each key/value head serves the same number of query heads, so kv_heads must divide heads",
                f"kv_heads = {min(choices, key=lambda count: (abs(count - self.kv_heads), count))}",
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model {self.name}: heads of width {self.head_dim}", "rotary positions turn pairs of features",
                "a hidden width that is an even multiple of heads",
            )  # fmt: skip

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values, over all their heads."""
        return self.kv_heads * self.head_dim

    @property
    def q_width(self) -> int:
        """Width of the queries over all heads."""
        return self.heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: four attention and three feed-forward matrices, and the norms."""
        attention = 2 * self.hidden * self.q_width + 2 * self.hidden * self.kv_width + 2 * self.head_dim * self.qk_norm
        attention += (self.q_width + 2 * self.kv_width) * self.qkv_bias
        return attention + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, a tied embedding counted once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden


SCORINGS = ("softmax", "sigmoid")
BALANCES = ("sequence", "bias", "none")


@dataclass(frozen=True)
class MoEConfig(DecoderConfig):
    """The shape of a decoder whose feed-forward layers are mixtures of experts.

    `ffn` is the width of the first `dense_layers` layers, which have no experts; `expert_ffn` is the width of one
    expert, `shared_ffn` the width of all shared experts together, through which every token passes (0: none).
    """

    experts: int = 8
    top_k: int = 2  # experts that a token passes
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    scoring: str = "softmax"  # how a router scores experts: against each other, or each alone as in DeepSeek-V3
    renormalise: bool = True  # whether the weights of a token's experts are scaled to add up to one
    balance: str = "sequence"  # how the load of experts is kept even: see task/models/layers/balance.py
    balance_weight: float = 0.01  # of the auxiliary loss, with balance "sequence"
    bias_rate: float = 0.001  # step of the selection bias, with balance "bias"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(
                f"model {self.name}: {self.top_k} experts per token of {self.experts}",
                "a token passes at least one expert and each at most once", f"top_k = {min(2, self.experts)}",
            )  # fmt: skip
        if self.scoring not in SCORINGS:
            raise ConfigError(f"model {self.name}: scoring = '{self.scoring}'", "", suggestion(self.scoring, SCORINGS))
        if self.balance not in BALANCES:
            raise ConfigError(f"model {self.name}: balance = '{self.balance}'", "", suggestion(self.balance, BALANCES))

    @property
    def routed_layers(self) -> int:
        """Layers that have experts."""
        return self.layers - self.dense_layers

    @property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts of one layer: what expert parallelism spreads."""
        return self.experts * 3 * self.hidden * self.expert_ffn

    @property
    def routed_layer_parameters(self) -> int:
        """Parameters of one layer with experts: attention, norms, router, routed and shared experts."""
        dense = self.layer_parameters - 3 * self.hidden * self.ffn
        return dense + self.experts * self.hidden + self.expert_parameters + 3 * self.hidden * self.shared_ffn

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, a tied embedding counted once."""
        extra = self.routed_layers * (self.routed_layer_parameters - self.layer_parameters)
        return super().parameters + extra

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes: all but the experts it is not sent to."""
        idle = (self.experts - self.top_k) * 3 * self.hidden * self.expert_ffn
        return self.parameters - self.routed_layers * idle
