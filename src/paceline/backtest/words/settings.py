"""What tables call a precision, a class of sharding, a way of recompute: strangers' words in the words of plans.

A word that means nothing here is no silent default: the row says so and is not scored, or the setting counts as not
stated, and is marked.
"""

from __future__ import annotations

import re

# Signs of a precision inside of a table's word, the lowest first: a run "in bf16 with fp8" has its products in fp8.
PRECISION_SIGNS = (
    ("fp4", r"fp4|float4|e2m1"),
    ("fp8", r"fp8|float8|f8e[45]|e4m3|e5m2|hybrid"),
    ("bf16", r"bf16|bfloat16|bfloat"),
    ("fp16", r"fp16|float16|\bf16\b|half|16-mixed|16-true"),
    ("fp32", r"(?<!b)fp32|float32|\bf32\b|32-true|\bfull\b"),
)
# Sixteen bits of either kind.
EITHER_16 = re.compile(r"amp|mixed|\bo[12]\b|16[- ]?bit")
# Precisions of which no plan is: products in TF32 and in whole numbers, weights in four bits.
UNPRICED = re.compile(r"tf32|int[48]|nf4|fp6|w4a16|w8a8|1-?bit|ternary")
WORD_OF_SHARDS = (
    ("fsdp+dp", r"fsdp ?\+ ?dp"),
    ("hsdp", r"hsdp|hybrid_?[- ]?shard"),
    ("2", r"_grad_op|grad_op"),
    ("0", r"no_?[- ]?shard|^ddp$|^dp$|^none$|^false$|^no$|^off$|^0(\.0)?$"),
    ("fsdp", r"fsdp|full_?[- ]?shard"),
)
CLASS = re.compile(r"^(?:deep\s?speed)?[-_ ]*(?:zero|stage|z)?[-_ ]*(?:dp|stage)?[-_ ]*([0-3])(?:\.0)?(?!\d)")
DISTRIBUTED_OPTIMIZER = re.compile(r"dist(ributed)?[-_ ]*(fused[-_ ]*adam|opt)|^true$|^yes$")
RECOMPUTE = (
    ("none", r"^(none|no|off|false|0|disabled|nothing|save[-_ ]?all|everything_saveable)$"),
    ("full", r"^(full|true|yes|on|1|all|every|always|nothing_saveable)\b|^full[-_ /]|\buniform\b"),
)
# Modules that Megatron-LM's selective recompute may name, as tables write them; attention's core is what it computes
# again unless they are named (`recompute_modules` of core/transformer/transformer_config.py, read 2026-11-28).
MODULES = (
    ("core", r"core[-_ ]?attn|attention|attn"),
    ("norms", r"(?:layer)?norms?"),
    ("activations", r"(?:moe[-_ ]|mlp[-_ ])?act(?:ivations?)?"),
    ("experts", r"moe|experts?|mlp"),
)
UNFUSED = re.compile(r"unfused|no[nt]?[- ]?flash|local|\beager\b|\bmath\b|naive|einsum|^none$")
# Recompute of a part, as tables write it: of so many layers, of each stage's by Megatron-LM's `--recompute-num-layers`,
# or down to a part of the bytes by torch's `activation_memory_budget`.
OF_LAYERS = re.compile(r"^(\d+) of (\d+)(?: layers?| blocks?)?$")
OF_A_STAGE = re.compile(r"^(?:--)?recompute[-_]num[-_]layers[ =]*(\d+)$")
BYTES_KEPT = re.compile(r"^(?:activation[-_ ])?memory[-_ ]budget[ =]*(\d*\.?\d+)$")


def precision_of(text: str, marks: list[str]) -> tuple[str, str]:
    """Return the precision behind a table's word, such as amp_bf16, te_fp8, float16 or 32-true, and why there is none.

    bf16 where none is stated.

    Example: nvfp4 is fp4, "bf16 with fp8" is fp8; of int8 there is no plan.
    """
    word = text.lower().strip()
    if not word:
        marks.append("bf16 assumed")
        return "bf16", ""
    if UNPRICED.search(word):
        return "", f"no plan has products in {text}"
    found = next((name for name, sign in PRECISION_SIGNS if re.search(sign, word)), "")
    if not found and EITHER_16.search(word):
        found = "bf16"
        marks.append(f"precision {text} taken as bf16")
    return found, "" if found else f"precision {text} is not known"


def sharding_of(text: str, marks: list[str]) -> str:
    """Return a table's word for its sharding as `0` to `3`, dist_opt, fsdp, hsdp or fsdp+dp, with what it adds.

    Empty where it is not stated, or is a word that means nothing here, which is marked.

    Example: ZeRO-3, zero3 and "stage 3" are 3; FULL_SHARD is fsdp, SHARD_GRAD_OP is 2, HYBRID_SHARD is hsdp.
    """
    word = text.lower().strip()
    if not word:
        return ""
    kept = " ".join(re.findall(r"group \d+|\bdp=\d+|offload", word))
    for name, sign in WORD_OF_SHARDS:
        if re.search(sign, word):
            return f"{name} {kept}".strip()
    if stage := CLASS.match(word):
        return f"{stage[1]} {kept}".strip()
    if DISTRIBUTED_OPTIMIZER.search(word):
        return "dist_opt"
    marks.append(f"sharding {text} is not known")
    return ""


def recompute_of(text: str) -> str:
    """Return a table's word for its recompute in lower case: none, full, or what it says of a part of the blocks.

    Example: False and off are none, True is full, `save_dot_except_mlp` and "1 of 2" stay as they are.
    """
    word = text.lower().strip()
    if OF_LAYERS.search(word):
        return word
    return next((name for name, sign in RECOMPUTE if re.search(sign, word)), word)


def part_kept(text: str, layers_of_stage: int) -> float | None:
    """Return the part of what layers keep that a table's word for its recompute leaves kept; None where it says none.

    A stage's layers are those of one of its chunks: Megatron-LM counts in each by its `block`, and by its `uniform`
    computes all again (`_checkpointed_forward` of core/transformer/transformer_block.py, read 2026-11-30). Where a
    table does not say which, it is `block`: the other would be written as full.

    Example: "10 of 80 layers" keeps 7/8, "recompute_num_layers=1" of chunks of four 3/4, and "memory budget 0.5" half.
    """
    word = text.lower().strip()
    if found := OF_LAYERS.search(word):
        again, layers = int(found[1]), int(found[2])
    elif found := OF_A_STAGE.search(word):
        again, layers = int(found[1]), layers_of_stage
    else:
        budget = BYTES_KEPT.search(word)
        return None if budget is None else min(1.0, float(budget[1]))
    return max(0.0, 1 - again / max(1, layers))


def is_unfused(text: str) -> bool:
    """Return whether a table's word for its attention kernel names one that writes its scores to memory."""
    return bool(UNFUSED.search(text.lower()))


def modules_of(text: str) -> tuple[str, ...]:
    """Return the modules that a table's word for its recompute names, where it names nothing else; else none.

    Example: "norm, act" and "layernorm moe_act" are norms and activations, "layernorm, moe" norms and experts;
    "selective", "full" and `save_dot_except_mlp` name none.
    """
    words = [word for word in re.split(r"[\s,;+&/]+|\band\b", text.lower().strip()) if word]
    found = [next((name for name, sign in MODULES if re.fullmatch(sign, word)), "") for word in words]
    return tuple(found) if all(found) else ()
