"""Activation checkpointing: what the forward pass keeps for the backward pass.

`full` keeps a block's input and runs the block again. `selective` keeps the outputs of matrix products and of
attention, or of those of them that the plan names, and runs the rest again. `none` keeps everything. A memory budget
gives every block one of these three.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from paceline.plan.plan import SAVED_KINDS
from paceline.run.parallel.sequence_attention import OPERATOR

# Outputs that cost more to compute again than to keep.
OPERATORS = {
    "products": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
}


def _policy(kept: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def kept_operators(kinds: Sequence[str] = SAVED_KINDS) -> frozenset[Any]:
    """Return the operators of this torch version whose outputs selective recompute keeps: of products, of attention."""
    names = [name for kind in kinds for name in OPERATORS[kind]]
    found = [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]
    return frozenset([*found, *([OPERATOR] if "attention" in kinds else [])])


def checkpoint_block(block: nn.Module, mode: str, kept: Sequence[str] = SAVED_KINDS) -> None:
    """Make `block.forward` recompute in the backward pass as `mode` says: none, selective (all but `kept`) or full."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        policy = functools.partial(_policy, kept_operators(kept))
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    block.forward = functools.partial(checkpoint, block.forward, **options)
