"""Cross-entropy of a linear head, computed in chunks of tokens so that the logits never exist whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.spec.data.labels import IGNORED
from paceline.task.models.held import is_spread
from paceline.task.models.layers.chunks import LOGITS_LIMIT_ELEMENTS, loss_chunk_tokens
from paceline.task.models.layers.gradients_ahead import kept_gradients, summed_loss
from paceline.task.models.layers.vocabulary import (
    spread_cross_entropy,
    spread_cross_entropy_sum,
    spread_logits,
    spread_losses,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class LabelsByRow:
    """Labels [rows, ...] whose losses are told apart by row, without gradients; or added up, each row's with a weight.

    They stand where labels stand. A loss by row comes with the weights by row, [rows] both.
    """

    labels: Tensor
    weights: Tensor | None = None  # [rows]; None: the rows' losses are told apart

    def numel(self) -> int:
        """Return how many labels there are."""
        return self.labels.numel()

    def counted(self) -> Tensor:
        """Return how many labels of each row count: [rows]; of weighted ones all together."""
        rows = (self.labels != IGNORED).flatten(1).sum(1) if self.labels.dim() > 1 else (self.labels != IGNORED).long()
        return rows if self.weights is None else rows.sum()

    def weights_by_label(self) -> Tensor:
        """Return the weight of each label, flat: that of its row."""
        assert self.weights is not None, "labels whose rows have weights"
        return self.weights.repeat_interleave(self.labels.numel() // self.labels.shape[0])

    def combined(self, losses: Tensor) -> Tensor:
        """Return the losses of all labels, flat, as sums by row; or as one sum of the rows with their weights."""
        rows = losses.reshape(self.labels.shape[0], -1).sum(1)
        return rows if self.weights is None else (rows * self.weights.to(rows)).sum()


LossLabels = Tensor | LabelsByRow


def plain_labels(labels: LossLabels) -> Tensor:
    """Return the labels themselves, whether or not their losses are told apart by row."""
    return labels.labels if isinstance(labels, LabelsByRow) else labels


def cross_entropy_sum(
    hidden: Tensor, head: Tensor, labels: LossLabels, logits_elements: int = LOGITS_LIMIT_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Return (loss_sum, weight) for `hidden` [..., width], `head` [vocab, width] and int64 `labels` [...].

    The loss is summed over labels other than -100 in fp32 (fp64 for fp64 inputs); `weight` is how many there are.
    A head that is a DTensor has its rows spread over ranks; `hidden` may then be split along the sequence.
    No more than `logits_elements` logits exist at a time.
    """
    size = loss_chunk_tokens(head.shape[0], logits_elements)
    if isinstance(labels, LabelsByRow):
        if is_spread(head):
            return _spread_by_row(hidden, head, labels, logits_elements), labels.counted()
        return _by_row(hidden.flatten(0, -2), head, labels, size), labels.counted()
    if is_spread(head):
        return spread_cross_entropy_sum(hidden, head, labels, logits_elements)
    loss = _LinearCrossEntropy.apply(hidden.flatten(0, -2), head, labels.flatten(), torch.is_grad_enabled(), size)
    return loss, (labels != IGNORED).sum()


def _by_row(hidden: Tensor, head: Tensor, labels: LabelsByRow, size: int) -> Tensor:
    """Return the losses of hidden states [tokens, width] as their labels want them: by row, or weighted."""
    flat = labels.labels.flatten()
    if labels.weights is not None:
        each = labels.weights_by_label()
        weighted: Tensor = _WeightedCrossEntropy.apply(hidden, head, flat, each, torch.is_grad_enabled(), size)
        return weighted
    parts = zip(hidden.split(size), flat.split(size), strict=True)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return labels.combined(torch.cat([_losses((part @ head.T).to(wide), own)[0] for part, own in parts]))


def _spread_by_row(hidden: Tensor, head: DTensor, labels: LabelsByRow, logits_elements: int) -> Tensor:
    """As _by_row, for a head whose rows are spread over ranks; alike on every rank."""
    if labels.weights is not None:
        return spread_cross_entropy(hidden, head, labels.labels, labels.weights_by_label(), logits_elements)
    return labels.combined(spread_losses(hidden, head, labels.labels, logits_elements))


def head_logits(hidden: Tensor, head: Tensor, seq: int) -> Tensor:
    """Return logits [rows, seq, vocab]; for a head spread over ranks a DTensor spread in the same way."""
    return spread_logits(hidden, head, seq) if is_spread(head) else F.linear(hidden, head)


class _LinearCrossEntropy(torch.autograd.Function):
    """Takes the gradients in the forward pass (gradients_ahead.py)."""

    @staticmethod
    def forward(ctx: object, hidden: Tensor, head: Tensor, labels: Tensor, backward: bool, size: int) -> Tensor:
        return summed_loss(ctx, hidden, head, labels, backward, size, _of_chunk)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *kept_gradients(ctx, grad), None, None, None


class _WeightedCrossEntropy(torch.autograd.Function):
    """As _LinearCrossEntropy, with a weight for each label [tokens]: gradients taken ahead must know it."""

    @staticmethod
    def forward(
        ctx: object, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, backward: bool, size: int
    ) -> Tensor:
        coming = iter(weights.split(size))  # chunks come in order

        def of_chunk(logits: Tensor, labels: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
            weight = next(coming).to(logits.dtype)
            losses, gradient = _losses(logits, labels)
            return (losses * weight).sum(), lambda: gradient().mul_(weight.unsqueeze(1))

        return summed_loss(ctx, hidden, head, labels, backward, size, of_chunk)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *kept_gradients(ctx, grad), None, None, None, None


def _of_chunk(logits: Tensor, labels: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return the summed cross-entropy of a chunk, and what makes its gradient of the logits, in place."""
    losses, gradient = _losses(logits, labels)
    return losses.sum(), gradient


def _losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return the cross-entropy of each label of a chunk, and what makes the gradient of their sum.

    Both are written over the logits: exponentials, then probabilities, so that a chunk stands once.
    """
    counted = labels != IGNORED  # [chunk]
    target = labels.where(counted, 0).unsqueeze(1)  # [chunk, 1]
    chosen, largest = logits.gather(1, target), logits.amax(dim=1, keepdim=True)
    exponentials = logits.sub_(largest).exp_()
    sums = exponentials.sum(dim=1, keepdim=True)

    def gradient() -> Tensor:
        counts = counted.unsqueeze(1).to(sums.dtype)
        return exponentials.mul_(counts / sums).scatter_add_(1, target, -counts)

    return (largest - chosen + sums.log()).squeeze(1).where(counted, 0.0), gradient
