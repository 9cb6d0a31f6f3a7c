"""What a row's notes say of adapters: their rank, the layers they stand beside, and how the frozen weights rest."""

from __future__ import annotations

import re

from paceline.backtest.schema import StepRow
from paceline.plan.cost.programs.known import program_of
from paceline.spec.adapt.adapter import NF4, AdapterSpec

# Weights beside a model's own; a network's adapter is none of them.
LORA = re.compile(r"(?<!no )(?<!not )(?<!non-)(?<!without )(?<![a-z])q?lora(?![a-z]|-free)")
OTHERS = re.compile(r"\b(?:with|by) adapters?\b|\badapters? ?(?:v2|fine|tun|train|method)")
UNLIKE = re.compile(r"\b(?:dora|adalora|ia3|prefix tuning)\b")
FOUR_BITS = re.compile(r"\bqlora\b|\bnf4\b|\b4[- ]?bits?\b")
QUANTIZED = re.compile(r"quantization (?!none)")
# An optimizer's own bits are none of the weights'.
OTHER_BITS = re.compile(r"\b(?:int8|fp4)\b|(?<!adam )(?<!adamw )\b8[- ]?bits?\b(?! (?:paged )?(?:adam|lion|optimizer))")
# Rank 0 is a process, R1 a model, and a dimension alone one of the network's.
RANK = re.compile(r"(?<![a-z])(?:rank|r(?!1\b)|(?:lora|adapter)[-_ ]dim) ?[=:]? ?([1-9]\d*)\b")
EVERY_LAYER = re.compile(r"\b(?:all|every)[- ]linear\b")
ATTENTION = re.compile(r"(?<!flash )(?<!flash-)(?<!fused )\battention\b")  # a kernel is no place of adapters
# Where a row says neither: peft's own layers of Llama are those of queries and values (from memory); ranks of published
# tables lie between 8 and 64.
ASSUMED_RANK = 16
UNKNOWN = "adapter fine-tuning"


def has_adapters(row: StepRow) -> bool:
    """Return whether a row's notes say that adapters are trained, beside weights that are frozen."""
    return LORA.search(row.notes.lower()) is not None


def beside_inputs(row: StepRow) -> bool:
    """Return whether adapters are beside attention's first product alone: as a program has them, if a row names none.

    Example: those of "fine-tuning LoRA" by NeMo are, those of "LoRA of attention" by the same are not.
    """
    notes = row.notes.lower()
    named = EVERY_LAYER.search(notes) or ATTENTION.search(notes)
    return named is None and program_of(row.program, row.zero_stage)[0].adapts_inputs


def adapter_of(row: StepRow, marks: list[str]) -> tuple[AdapterSpec | None, bool, str]:
    """Return the adapters that a row trains, none where it trains all, and whether attention alone has them.

    With the reason for which the row cannot be forecast, empty where it can.

    Example: "QLoRA of all linear layers, rank 64" has adapters of rank 64 beside weights in four bits in every layer.
    """
    notes = row.notes.lower()
    if UNLIKE.search(notes):
        return None, False, UNKNOWN
    if not LORA.search(notes):
        other = OTHERS.search(notes) or QUANTIZED.search(notes)
        return None, False, UNKNOWN if other else ""
    if OTHER_BITS.search(notes):
        return None, False, "adapters beside weights in other bits than four"
    rank, everywhere = RANK.search(notes), EVERY_LAYER.search(notes) is not None
    if not rank:
        marks.append(f"adapters of rank {ASSUMED_RANK} assumed")
    if not everywhere and not ATTENTION.search(notes):
        where = "its first product" if beside_inputs(row) else "attention"
        marks.append(f"adapters beside {where} assumed")
    if everywhere and row.experts:
        return None, False, "adapters of experts"
    spec = AdapterSpec(
        kind="lora",
        rank=int(rank[1]) if rank else ASSUMED_RANK,
        base_dtype=NF4 if FOUR_BITS.search(notes) else "bf16",
    )
    return spec, not everywhere, ""
