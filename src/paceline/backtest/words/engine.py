"""Layers of Transformer Engine: rows that say so, and programs that have such layers by default."""

from __future__ import annotations

import re

from paceline.backtest.schema import StepRow
from paceline.plan.cost.constants import family_of

SAID = re.compile(r"(?<!products of )transformer[- ]?engine|\bte\b")
LOCAL = re.compile(
    r"\blocal (?:modules|layers|spec)|transformer-impl[= ]local|\b(?:no|without) (?:transformer[- ]?engine|te)\b"
)
# `--transformer-impl` of Megatron-LM was local unless told otherwise, and is transformer_engine in younger releases
# (_add_transformer_engine_args of training/arguments.py, both read 2026-11-30; since early 2024, from memory). A
# release of its core, or of the torch beside it, tells that a run is younger, and so does a chip.
SINCE = re.compile(r"\bcore_r?\d|\bmcore\b|\bmegatron[-. ]core\b|\btorch 2\.(?:[3-9]|1\d)\b")
# Whole steps or layers that were captured once: nothing of them is started by Python.
GRAPHED = re.compile(r"(?<!no )(?<!without )\b(?:cuda|hip)[- ]graphs?\b(?! of the router)")
YOUNGER = ("hopper", "blackwell")


def is_megatron(row: StepRow) -> bool:
    """Return whether a row's program runs Megatron-LM's layers, by whatever name."""
    word = row.program.lower().replace("_", "-")
    named = "megatron" in word or word in ("mcore", "primus") or word.startswith("nemo")
    return named and "deepspeed" not in word and "automodel" not in word


def has_engine_layers(row: StepRow) -> bool:
    """Return whether Transformer Engine's layers ran.

    Example: they did under "core_r0.16.0" or on an H100 under Megatron-LM, and not where notes say "local modules".
    """
    text = f"{row.notes}; {row.attention_kernel}; {row.precision}; {row.program}".lower()
    if LOCAL.search(text):
        return False
    younger = SINCE.search(text) or family_of(row.accelerator.upper().replace("_", "-")) in YOUNGER
    return SAID.search(text) is not None or bool(is_megatron(row) and younger)


def starts_engine_layers(row: StepRow) -> bool:
    """Return whether a host was seen to take longer to start a row's layers of Transformer Engine than their kernels.

    NeMo's steps of 8B in fp8 (dgxc_benchmarking, nemo_docs, MLPerf's) leave no room for it, though the same layers are
    in them and its recipes of dense models capture no graphs on H100 (its model_configs_h100.csv, read 2026-11-30). Why
    no document says; Megatron-LM's, Megatron Bridge's and programs' of their own are 25 to 49 % short without it.
    """
    is_nemo = row.program.lower().startswith("nemo")
    return has_engine_layers(row) and not is_nemo and not GRAPHED.search(row.notes.lower())
