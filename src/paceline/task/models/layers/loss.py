"""Cross-entropy of a linear head, computed in chunks of tokens so that the logits never exist whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.task.models.layers.chunks import LOGITS_LIMIT_ELEMENTS, loss_chunk_tokens
from paceline.task.models.layers.gradients_ahead import kept_gradients, summed_loss
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
    """Takes the gradients in the forward pass (gradients_ahead.py)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, backward: bool, size: int) -> Tensor:
        return summed_loss(ctx, hidden, head, labels, backward, size, _of_chunk)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *kept_gradients(ctx, grad), None, None, None


def _of_chunk(logits: Tensor, labels: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return the summed cross-entropy of a chunk, and what makes its gradient of the logits, in place."""
    counted = labels != IGNORED  # [chunk]
    target = labels.where(counted, 0).unsqueeze(1)  # [chunk, 1]
    norm = logits.logsumexp(dim=1, keepdim=True)

    def gradient() -> Tensor:
        grad = logits.sub_(norm).exp_()  # probabilities
        return grad.scatter_add_(1, target, grad.new_full(target.shape, -1.0)).mul_(counted.unsqueeze(1))

    return ((norm - logits.gather(1, target)).squeeze(1) * counted).sum(), gradient
