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
        if grad_hidden is not None:
            grad_hidden[part] = narrow @ head
        if grad_head is not None:
            grad_head += narrow.T @ hidden[part]
    ctx.save_for_backward(grad_hidden, grad_head)
    ctx.head_dtype = head.dtype
    return loss


def kept_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients by hidden states and head that `summed_loss` has kept, times the one that comes in."""
    grad_hidden, grad_head = ctx.saved_tensors
    # In fp32: under fp16 the incoming loss scale itself may exceed fp16's range.
    by_hidden = None if grad_hidden is None else (grad_hidden.to(grad.dtype) * grad).to(grad_hidden.dtype)
    by_head = None if grad_head is None else (grad_head * grad).to(ctx.head_dtype)
    return by_hidden, by_head
