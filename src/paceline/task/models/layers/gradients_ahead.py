"""A loss over logits that exist a chunk at a time, with the gradients taken in the forward pass.

The loss is a scalar, so what comes in the backward pass only scales its gradients. This costs no recompute: three
products per chunk, as in an ordinary forward and backward pass (the idea is Liger Kernel's, Hsu et al. 2024,
arXiv:2410.10989). Between the passes it keeps the two gradients instead of logits. The head's gradient is summed over
chunks in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError

ROWS_ELEMENTS = 2**25  # of a gradient that is computed, or scaled and cast, at a time: 128 MiB in fp32

# Given a chunk's logits [tokens, vocab] in fp32 or wider and its labels [tokens]: the summed loss, and what returns its
# gradient by the logits, which may be written over them.
OfChunk = Callable[[Tensor, Tensor], tuple[Tensor, Callable[[], Tensor]]]


def summed_loss(
    ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, backward: bool, size: int, of_chunk: OfChunk
) -> Tensor:
    """Return the loss of hidden states [tokens, hidden] under a head [vocab, hidden], `size` tokens at a time.

    Where `backward`, the gradients of both, the first two arguments of the function of `ctx`, are kept for it as
    far as they are wanted: a frozen head has none, and takes neither the product nor the memory.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if backward and ctx.needs_input_grad[0] else None
    grad_head = torch.zeros_like(head, dtype=wide) if backward and ctx.needs_input_grad[1] else None
    for start in range(0, hidden.shape[0], size):
        part = slice(start, start + size)
        added, gradient = of_chunk((hidden[part] @ head.T).to(wide), labels[part])
        loss += added
        if grad_hidden is None and grad_head is None:
            continue
        narrow = gradient().to(head.dtype)
        del gradient  # with the wide one: 0.5 GB of an ordinary chunk
        if grad_hidden is not None:
            grad_hidden[part] = narrow @ head
        if grad_head is not None:
            _add_product(grad_head, narrow, hidden[part])
        del narrow
    ctx.save_for_backward(grad_hidden, grad_head)
    ctx.head_dtype = head.dtype
    return loss


def kept_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients by hidden states and head that `summed_loss` has kept, times the one that comes in."""
    grad_hidden, grad_head = ctx.saved_tensors
    return (
        None if grad_hidden is None else only_first(_scaled(grad_hidden, grad, grad_hidden.dtype)),
        None if grad_head is None else only_first(_scaled(grad_head, grad, ctx.head_dtype)),
    )


def only_first(gradient: Tensor) -> Tensor:
    """Return a gradient that was taken ahead, of which a second derivative raises ConfigError: it is a number alone.

    Asked for in the backward pass. Without it, a gradient penalty would silently lack what comes through the loss.
    """
    if not torch.is_grad_enabled():  # as in a backward pass without create_graph
        return gradient
    found: Tensor = _OnlyFirst.apply(gradient, torch.zeros((), requires_grad=True))
    return found


class _OnlyFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        raise ConfigError(
            "a gradient of the loss is differentiated again, as for a gradient penalty",
            "this loss takes its gradients in the forward pass and keeps them as numbers",
            "the model's logits, of a call without labels, and F.cross_entropy in an objective of your own",
        )


def _add_product(grad_head: Tensor, by_logits: Tensor, hidden: Tensor) -> None:
    """Add what a chunk's gradient by logits [tokens, vocab] says of the head, some rows of it at a time."""
    rows = _rows_at_a_time(grad_head)
    for into, part in zip(grad_head.split(rows), by_logits.split(rows, dim=1), strict=True):
        into += part.T @ hidden


def _scaled(kept: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a kept gradient times the one that comes in, in `dtype`; some rows at a time where that is narrower.

    In fp32: under fp16 the incoming loss scale itself may exceed fp16's range.
    """
    if dtype == grad.dtype:
        return kept * grad
    found, rows = torch.empty_like(kept, dtype=dtype), _rows_at_a_time(kept)
    for into, part in zip(found.split(rows), kept.split(rows), strict=True):
        into.copy_(part.to(grad.dtype) * grad)
    return found


def _rows_at_a_time(matrix: Tensor) -> int:
    """Return of how many rows a product or a copy in another dtype stands at a time, beside the whole."""
    return max(1, ROWS_ELEMENTS // max(1, matrix.shape[1]))
