"""Rules: what a model declares so that it can be split along the model axes (tensor, pipeline, expert).

    RULES = Rules(
        tensor={"layers.*.mlp.up_proj": "column", "layers.*.mlp.down_proj": "row"},
        first=("embed_tokens",), blocks="layers", last=("norm", "lm_head"),
    )

Patterns are module names in which `*` stands for one part. A built-in family brings its rules; a user's module names
them in an attribute `paceline_rules`; a Hugging Face model's are read from its own plans.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from paceline.errors import ConfigError, suggestion

# style -> what happens to the module's weight over the tensor axis
STYLES = {
    "column": "output features are split; the input is whole",
    "row": "input features are split; the outputs are summed",
    "split_row": "as 'row', of an input that is whole: each rank takes its part of the features",
    "fused": "several 'column' layers in one matrix, with rows as in `parts`: outputs are split, the weight is not",
    "partial": "input features are split; the outputs stay parts of a sum",
    "vocabulary": "rows of the vocabulary are split: of an embedding, or of the head and its loss",
    "sequence": "the weight is whole; the activation is split along the sequence",
    "expert": "a rank of the expert axis has some experts, whole; a tensor rank a part of the width of each",
    "replicated": "the weight is whole, and so is the activation",
    "summed": "the weight is whole; the output is a part of a sum over ranks: a norm of single heads, a router",
    "gathered": "output features are split and then gathered",
}
# Style -> the dimension of a weight [out, in] that is spread over the tensor axis; the other styles leave it whole.
SPREAD = {"column": 0, "gathered": 0, "vocabulary": 0, "row": 1, "split_row": 1, "partial": 1}


@dataclass(frozen=True)
class Rules:
    """How a model's modules may be split, and the chain in which a sample passes them."""

    tensor: Mapping[str, str] = field(default_factory=dict)  # pattern of module names -> style
    first: tuple[str, ...] = ()  # modules that only the first pipeline stage has
    blocks: str = ""  # the container of the repeated blocks
    last: tuple[str, ...] = ()  # modules that only the last pipeline stage has
    # What the tensor axis must divide, by name: {"heads": 8}. A split through a head computes something else.
    counts: Mapping[str, int] = field(default_factory=dict)
    closed: Mapping[str, str] = field(default_factory=dict)  # axis that these rules do not open -> why
    # Rows of each part of a 'fused' layer: {"layers.*.qkv_proj": (64, 32, 32)}.
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    add_to_plan: bool = False  # whether they add to the plans that a Hugging Face model ships, or stand in their place

    def __post_init__(self) -> None:
        for pattern in (pattern for pattern, style in self.tensor.items() if style == "fused"):
            if not self.parts.get(pattern):
                raise ConfigError(
                    f"rule '{pattern}': 'fused'",
                    "nothing says which rows of its matrix belong together",
                    f'Rules(..., parts={{"{pattern}": (rows of each part, ...)}})',
                )
        for pattern, style in self.tensor.items():
            if style not in STYLES:
                raise ConfigError(f"rule '{pattern}': unknown style '{style}'", "", suggestion(style, STYLES))

    @property
    def splits_sequence(self) -> bool:
        """Whether the activation between layers is split along the sequence over the tensor axis."""
        return "sequence" in self.tensor.values()

    def style_of(self, name: str) -> str | None:
        """Return the style of the module with this name, None where no rule speaks of it."""
        return next((style for pattern, style in self.tensor.items() if matches(pattern, name)), None)

    def parts_of(self, name: str) -> tuple[int, ...]:
        """Return the rows of each part of the fused module with this name."""
        return next((parts for pattern, parts in self.parts.items() if matches(pattern, name)), ())

    def added_to(self, plan: Rules) -> Rules:
        """Return a plan with these rules added: where both speak of a module or a count, these hold."""
        spoken = {pattern: style for pattern, style in plan.tensor.items() if pattern not in self.tensor}
        return Rules(
            tensor={**self.tensor, **spoken},
            first=self.first or plan.first,
            blocks=self.blocks or plan.blocks,
            last=self.last or plan.last,
            counts={**plan.counts, **self.counts},
            closed=dict(self.closed),
            parts=self.parts,
        )

    def check(self, names: Iterable[str]) -> None:
        """Raise ConfigError for a rule that matches no module: a misspelt rule must not split nothing in silence."""
        names = list(names)
        for pattern in [*self.tensor, *self.first, *filter(None, [self.blocks]), *self.last]:
            if not any(matches(pattern, name) for name in names):
                raise ConfigError(
                    f"rule '{pattern}' matches no module",
                    "a rule that splits nothing is a mistake",
                    suggestion(pattern, {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names if name}),
                )


def matches(pattern: str, name: str) -> bool:
    """Return whether a module name fits a pattern; `*` stands for one dotted part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=True))


DECODER = Rules(
    tensor={
        "embed_tokens": "vocabulary",
        "layers.*.input_layernorm": "sequence",
        "layers.*.self_attn.q_proj": "column",
        "layers.*.self_attn.k_proj": "column",
        "layers.*.self_attn.v_proj": "column",
        "layers.*.self_attn.o_proj": "row",
        "layers.*.post_attention_layernorm": "sequence",
        "layers.*.mlp.gate_proj": "column",
        "layers.*.mlp.up_proj": "column",
        "layers.*.mlp.down_proj": "row",
        "norm": "sequence",
        "lm_head": "vocabulary",
    },
    first=("embed_tokens",),
    blocks="layers",
    last=("norm", "lm_head"),
)


def decoder_rules(tied: bool, heads: int, kv_heads: int, qk_norm: bool = False) -> Rules:
    """Return the rules of a built-in decoder of this shape; a tied one has no module for its head."""
    counts = {"heads": heads, "kv_heads": kv_heads}
    tensor = {pattern: style for pattern, style in DECODER.tensor.items() if pattern != "lm_head" or not tied}
    if qk_norm:
        tensor |= {"layers.*.self_attn.q_norm": "summed", "layers.*.self_attn.k_norm": "summed"}
    return replace(DECODER, tensor=tensor, last=("norm",) if tied else DECODER.last, counts=counts)


def moe_rules(
    tied: bool, heads: int, kv_heads: int, qk_norm: bool, *, dense_layers: bool, shared_experts: bool
) -> Rules:
    """Return the rules of a decoder with experts: routers stay whole, dense and shared feed-forwards split as usual."""
    base, feed_forward = decoder_rules(tied, heads, kv_heads, qk_norm), "layers.*.mlp."
    tensor = {name: style for name, style in base.tensor.items() if not name.startswith(feed_forward)}
    tensor |= {feed_forward + "gate": "summed", feed_forward + "experts": "expert"}
    ends = [(feed_forward, "row")] * dense_layers + [(feed_forward + "shared_experts.", "partial")] * shared_experts
    for prefix, end in ends:  # what shared experts make is added to what routed ones do, and summed with it
        tensor |= {prefix + "gate_proj": "column", prefix + "up_proj": "column", prefix + "down_proj": end}
    return replace(base, tensor=tensor)
