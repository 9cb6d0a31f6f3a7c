"""Activation checkpointing: what the forward pass keeps for the backward pass.

`full` keeps a block's input and runs the block again. `selective` keeps the outputs of matrix products and of
attention, or of those of them that the plan names, and runs the rest again. `none` keeps everything. A memory budget
gives every block one of these three.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from paceline.run.numerics.randomness.again import samples_of
from paceline.run.parallel.context.sequence_attention import OPERATOR
from paceline.spec.plan import SAVED_KINDS
from paceline.task.models.layers.packed import kept_operator as packed_operator

# Outputs that cost more to compute again than to keep.
OPERATORS = {
    "products": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
}


def _policy(
    kept: frozenset[object], context: object, operator: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def kept_operators(kinds: Sequence[str] = SAVED_KINDS) -> frozenset[object]:
    """Return the operators of this torch version whose outputs selective recompute keeps: of products, of attention."""
    names = [name for kind in kinds for name in OPERATORS[kind]]
    found = [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]
    own = [operator for operator in (OPERATOR, packed_operator()) if operator is not None]
    return frozenset([*found, *(own if "attention" in kinds else [])])


def _contexts(block: nn.Module, selective: Callable[[], Any] | None) -> tuple[object, object]:
    """Return the contexts of a forward pass and of its repetition, which draws for the samples of the first."""
    forward, again = selective() if selective else (contextlib.nullcontext(), contextlib.nullcontext())
    return forward, _Repetition(again, samples_of(block))


class _Repetition(contextlib.ExitStack):
    """The context of every repetition of one forward pass: a pipeline's schedule may go back twice."""

    def __init__(
        self, kept: AbstractContextManager[object], samples: Callable[[], AbstractContextManager[object]]
    ) -> None:
        super().__init__()
        self._kept, self._samples = kept, samples

    def __enter__(self) -> _Repetition:
        self.enter_context(self._kept)
        self.enter_context(self._samples())
        return self


def checkpoint_block(block: nn.Module, mode: str, kept: Sequence[str] = SAVED_KINDS, compiled: bool = False) -> None:
    """Make `block.forward` recompute in the backward pass as `mode` says: none, selective (all but `kept`) or full."""
    if mode == "none":
        return
    selective = None
    if mode == "selective":
        policy = functools.partial(_policy, kept_operators(kept))
        selective = functools.partial(create_selective_checkpoint_contexts, policy)
    options: dict[str, Any] = {"use_reentrant": False}
    if compiled:  # the compiler knows torch's contexts alone
        options |= {"context_fn": selective} if selective else {}
    else:
        options["context_fn"] = functools.partial(_contexts, block, selective)
    block.forward = functools.partial(checkpoint, block.forward, **options)
