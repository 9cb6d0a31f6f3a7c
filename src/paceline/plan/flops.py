"""How FLOPs are counted when somebody states TFLOP/s or MFU: five conventions, a third apart for the same run.

With B samples of s tokens, L layers of width h, V token values, N parameters and N_e of them in the input embedding:

| convention | FLOPs per step | source |
|---|---|---|
| `hardware` | 96 B s L h^2 (1 + s/6h + V/16Lh): with full recompute | Narayanan et al. 2021, arXiv:2104.04473, eq. 3 |
| `model` | 72 B s L h^2 (1 + s/6h + V/12Lh) | Korthikanti et al. 2022, arXiv:2205.05198, appendix A |
| `6n` | B s (6 N + 12 L h s) | Chowdhery et al. 2022, arXiv:2204.02311, appendix B |
| `6n-embedding` | B s (6 (N - N_e) + 12 L h s) | NVIDIA NeMo's performance summaries up to 24.12 |
| `causal` | B s (6 (N - N_e) + 6 L h s): only what a causal mask leaves | NeMo 25 and Megatron Bridge; Paceline's own |

The first four count attention as if every token saw every other one. Of a mixture of experts N is what a token passes.
"""

from __future__ import annotations

from paceline.errors import ConfigError, suggestion
from paceline.spec.profile import BlockProfile, ModelProfile

CONVENTIONS = {
    "hardware": "full recompute counted, attention whole",
    "model": "3 x forward, attention whole, no recompute",
    "6n": "6 N + 12 L h s per token, N with embeddings",
    "6n-embedding": "6 (N - input embedding) + 12 L h s per token",
    "causal": "3 x forward, attention as its causal half, no recompute",
}
OWN = "causal"  # the convention of every MFU that Paceline forecasts or measures


def flops_per_sample(profile: ModelProfile, convention: str) -> float:
    """Return the FLOPs that a convention counts for one sample's part of a training step.

    Decoders' attention is taken to be counted as its causal half in the profile, as fused kernels compute it; that of
    other blocks as it is. Raises ConfigError for a convention that there is not.
    """
    layers = [block for block in profile.blocks if block.recomputable]
    products = sum(block.matmul_flops for block in profile.blocks)
    causal = sum(block.attention_flops for block in profile.blocks)
    whole = sum(_whole_attention(block) for block in profile.blocks)
    if convention == "hardware":
        again = sum(block.matmul_flops + _whole_attention(block) for block in layers)
        return 3 * (products + whole) + again
    if convention == "model":
        return 3 * (products + whole)
    if convention == "6n":
        return 6 * profile.tokens_per_sample * profile.active_parameters + 3 * whole
    if convention == "6n-embedding":
        return 6 * profile.tokens_per_sample * (profile.active_parameters - _input_parameters(profile)) + 3 * whole
    if convention == "causal":
        return 3 * (products + causal) - profile.spared_flops
    raise ConfigError(
        f"FLOP convention '{convention}'", "there is none of this name", suggestion(convention, CONVENTIONS)
    )


def _whole_attention(block: BlockProfile) -> float:
    return block.attention_flops * (2 if block.kind in ("decoder", "experts") else 1)


def _input_parameters(profile: ModelProfile) -> int:
    """Return the parameters of the input embedding; none where it is also the head, whose products count."""
    shared = {block.tied_to for block in profile.blocks}
    return sum(block.parameters for block in profile.blocks if block.kind == "embedding" and block.name not in shared)


def convention_of(text: str) -> str | None:
    """Return the convention that a table states, by its name or by its formula; None where it states none of the five.

    Formulas are read as published tables print them: `96*B*s*l*h^2*(...)`, `6*(N - input embedding) + 12*L*h*s`.
    """
    plain = text.lower().replace(" ", "")
    if plain in CONVENTIONS:
        return plain
    marks = (
        ("hardware", ("96*", "hardwareflops", "countsactivationrecompute", "megatronsc21")),
        ("model", ("72*",)),
        ("causal", ("+6*l*h*s", "causalhalved")),
        ("6n-embedding", ("6*(n-", "nemomodelflops")),
        ("6n", ("6n+12", "2*n*s+4*l*d*s^2", "palmmfu")),
    )
    return next((name for name, signs in marks if any(sign in plain for sign in signs)), None)
