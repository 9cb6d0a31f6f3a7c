"""Cross-entropy of a linear head, computed in chunks of tokens so that the logits never exist whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.task.models.layers.chunks import LOGITS_LIMIT_ELEMENTS, loss_chunk_tokens
from paceline.task.models.layers.vocabulary import spread_cross_entropy_sum, spread_logits

IGNORED = -100  # labels of this value count neither in the loss nor in the weight


def cross_entropy_sum(
    hidden: Tensor, head: Tensor, labels: Tensor, logits_elements: int = LOGITS_LIMIT_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Return (loss_sum, weight) for `hidden` [..., width], `head` [vocab, width] and int64 `labels` [...].

    The loss is summed over labels other than -100 in fp32 (fp64 for fp64 inputs); `weight` is how many there are.
    A head that is a DTensor has its rows spread over ranks; `hidden` may then be split along the sequence.
    No more than `logits_elements` logits exist at a time.
    """
    if isinstance(head, DTensor):
        return spread_cross_entropy_sum(hidden, head, labels, logits_elements)
    size = loss_chunk_tokens(head.shape[0], logits_elements)
    loss = _LinearCrossEntropy.apply(hidden.flatten(0, -2), head, labels.flatten(), torch.is_grad_enabled(), size)
    return loss, (labels != IGNORED).sum()


def head_logits(hidden: Tensor, head: Tensor, seq: int) -> Tensor:
    """Return logits [rows, seq, vocab]; for a head spread over ranks a DTensor spread in the same way."""
    return spread_logits(hidden, head, seq) if isinstance(head, DTensor) else F.linear(hidden, head)


class _LinearCrossEntropy(torch.autograd.Function):
    """Takes the gradients in the forward pass, chunk by chunk, since the loss is a scalar that only scales them.

    This costs no recompute: three products per chunk, as in an ordinary forward and backward pass (the idea is Liger
    Kernel's, Hsu et al. 2024, arXiv:2410.10989). Between the passes it keeps the two gradients instead of logits. The
    head's gradient is summed over chunks in fp32.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, backward: bool, size: int) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        backward = backward and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])
        grad_hidden = torch.empty_like(hidden) if backward else None
        grad_head = torch.zeros_like(head, dtype=wide) if backward else None
        for start in range(0, hidden.shape[0], size):
            part = slice(start, start + size)
            counted = labels[part] != IGNORED  # [chunk]
            target = labels[part].where(counted, 0).unsqueeze(1)  # [chunk, 1]
            logits = (hidden[part] @ head.T).to(wide)  # [chunk, vocab]
            norm = logits.logsumexp(dim=1, keepdim=True)
            loss += ((norm - logits.gather(1, target)).squeeze(1) * counted).sum()
            if grad_hidden is not None and grad_head is not None:
                grad = logits.sub_(norm).exp_()  # probabilities, in place of the logits
                grad.scatter_add_(1, target, grad.new_full(target.shape, -1.0)).mul_(counted.unsqueeze(1))
                narrow = grad.to(head.dtype)
                grad_hidden[part] = narrow @ head
                grad_head += narrow.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        # In fp32: under fp16 the incoming loss scale itself may exceed fp16's range.
        by_hidden = (grad_hidden.to(grad.dtype) * grad).to(grad_hidden.dtype) if ctx.needs_input_grad[0] else None
        by_head = (grad_head * grad).to(ctx.head_dtype) if ctx.needs_input_grad[1] else None
        return by_hidden, by_head, None, None, None
