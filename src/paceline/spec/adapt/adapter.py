"""Which parameters of a model are trained: those of adapters beside frozen layers, and those that patterns name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.config.declared import Declared
from paceline.config.fields import option

KINDS = ("none", "lora", "rslora", "dora")
NF4 = "nf4"
TURNED = "turned"  # in a checkpoint: the last parts of the names of adapted layers whose weights lie as [in, out]
NF4_VALUE_BYTES = 0.5
NF4_BYTES = NF4_VALUE_BYTES + 1 / 64 + 4 / (64 * 256)  # of a value: with a byte for 64 of them, four for 16,384
INITS = ("kaiming", "gaussian", "random")


@dataclass(frozen=True)
class AdapterSpec(Declared, table="task.adapter"):
    """The `[task.adapter]` table: small trained matrices beside frozen linear layers."""

    kind: str = option(
        "none",
        "what stands beside a frozen layer: nothing, a product of two thin matrices (lora, arXiv:2106.09685), the same"
        " scaled by the root of its rank (rslora, arXiv:2312.03732), or with a trained magnitude of every output (dora,"
        " arXiv:2402.09353)",
        choices=KINDS,
    )
    rank: int = option(8, "rank of the product of the two thin matrices", minimum=1)
    alpha: float = option(16.0, "the product is multiplied by alpha / rank; rslora: by alpha / sqrt(rank)", above=0.0)
    dropout: float = option(
        0.0, "part of the inputs of the thin matrices that is dropped, drawn for each sample", minimum=0.0, maximum=0.99
    )
    targets: tuple[str, ...] = option(
        (),
        "patterns of the layers that are adapted, `*` for any text; a pattern without a dot is the last part of a name,"
        " such as 'q_proj'. Empty takes every linear layer of the repeated blocks",
    )
    init: str = option(
        "kaiming",
        "first values of the thin matrices: the first one drawn evenly (kaiming) or from a normal distribution"
        " (gaussian), and the second one zero, so that training begins at the model as it is; 'random' draws both",
        choices=INITS,
    )
    weights: str = option("", "a folder with an adapter in peft's format to start from")
    base_dtype: str = option(
        "",
        "the dtype in which the frozen weights of adapted layers rest, such as 'bf16'; 'nf4' is four bits, doubly"
        " quantised (QLoRA, arXiv:2305.14314); empty keeps the plan's, which is fp32",
        choices=("", "bf16", "fp16", NF4),
    )

    @property
    def is_none(self) -> bool:
        """Whether there are no adapters."""
        return self.kind == "none"

    @property
    def scale(self) -> float:
        """What the product of the thin matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)


@dataclass(frozen=True)
class Adaptation:
    """What of a model is trained: its adapters, and the parameters that patterns name; all where neither is said."""

    adapter: AdapterSpec = AdapterSpec()
    train: tuple[str, ...] = ()
    noise: float = 0.0  # on embeddings

    @property
    def is_full(self) -> bool:
        """Whether all of the model is trained as it is."""
        return self.adapter.is_none and not self.train


def proof_adapter(adapter: AdapterSpec) -> AdapterSpec:
    """Return an adapter with both matrices drawn, and none read: a proof's model is small."""
    return adapter if adapter.is_none else replace(adapter, init="random", weights="")


FULL = Adaptation()
