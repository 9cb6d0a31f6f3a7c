"""Embedding, head and cross-entropy over a vocabulary whose rows are spread over ranks. Logits are never gathered.

Rank r holds rows r * ceil(vocab / ranks) and following, as `torch.chunk` and DTensor's Shard(0) cut them: the last
rank may hold fewer. The cross-entropy needs three numbers a token from the other ranks, the largest logit, the sum of
exponentials and the target's logit (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.spec.data.labels import IGNORED
from paceline.task.models.held import is_spread
from paceline.task.models.layers.chunks import LOGITS_LIMIT_ELEMENTS, loss_chunk_tokens
from paceline.task.models.layers.collectives import SEQUENCE, gather, share
from paceline.task.models.layers.gradients_ahead import kept_gradients, only_first, summed_loss

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_weight(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight as a plain tensor; the gradient goes back to the same part."""
    return weight.to_local(grad_placements=weight.placements) if is_spread(weight) else weight


def first_row(vocab: int, group: dist.ProcessGroup) -> int:
    """Return the first row of the vocabulary that this rank holds."""
    return group.rank() * -(-vocab // group.size())


def partial_embedding(tokens: Tensor, weight: Tensor, first: int, padding_idx: int | None = None) -> Tensor:
    """Return the embeddings [..., width] of those `tokens` whose rows this rank holds, zeros for the others."""
    local = tokens - first
    held = (local >= 0) & (local < weight.shape[0])
    padding = None if padding_idx is None or not 0 <= padding_idx - first < weight.shape[0] else padding_idx - first
    found = F.embedding(local.where(held, 0), weight, padding_idx=padding)
    return found.where(held.unsqueeze(-1), 0)


def whole_hidden(hidden: Tensor, seq: int, group: dist.ProcessGroup) -> Tensor:
    """Return the whole [rows, seq, width] for a spread head, from the whole of it or this rank's part."""
    return gather(hidden, group) if hidden.shape[SEQUENCE] != seq else share(hidden, group)


def spread_logits(hidden: Tensor, head: DTensor, seq: int) -> DTensor:
    """Return logits [rows, seq, vocab] as a DTensor whose vocabulary is spread as the rows of `head` are."""
    group = head.device_mesh.get_group()
    logits = F.linear(whole_hidden(hidden, seq, group), local_weight(head))
    return as_spread_logits(logits, head.shape[0], head)


def as_spread_logits(logits: Tensor, vocab: int, weight: DTensor) -> DTensor:
    """Return this rank's logits [..., rows of the vocabulary] as a part of a DTensor [..., vocab]."""
    from torch.distributed.tensor import DTensor, Shard  # never without spread weights

    shape = torch.Size((*logits.shape[:-1], vocab))
    stride = torch.empty(shape, device="meta").stride()
    mesh, place = weight.device_mesh, [Shard(logits.dim() - 1)]
    return DTensor.from_local(logits, mesh, place, run_check=False, shape=shape, stride=stride)


def spread_cross_entropy_sum(
    hidden: Tensor, head: DTensor, labels: Tensor, logits_elements: int = LOGITS_LIMIT_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Return (loss_sum, weight), alike on every rank, for `hidden` [rows, seq, width] and `labels` [rows, seq].

    `head` is [vocab, width] with its rows spread over ranks; `hidden` may be whole or split along the sequence.
    """
    return spread_cross_entropy(hidden, head, labels, None, logits_elements), (labels != IGNORED).sum()


def spread_cross_entropy(
    hidden: Tensor, head: DTensor, labels: Tensor, weights: Tensor | None, logits_elements: int = LOGITS_LIMIT_ELEMENTS
) -> Tensor:
    """Return the sum of the losses, each times its own of `weights` [labels] where there are any, as above."""
    group = head.device_mesh.get_group()
    whole = whole_hidden(hidden, labels.shape[-1], group).flatten(0, -2)
    first, size = first_row(head.shape[0], group), _chunk_tokens(head, logits_elements)
    loss: Tensor = _SpreadLinearCrossEntropy.apply(
        whole, local_weight(head), labels.flatten(), weights, first, head.shape[0], size, group, torch.is_grad_enabled()
    )
    return loss


@torch.no_grad()
def spread_losses(
    hidden: Tensor, head: DTensor, labels: Tensor, logits_elements: int = LOGITS_LIMIT_ELEMENTS
) -> Tensor:
    """Return the loss of every label, [labels], without gradients, as above."""
    group, local, size = head.device_mesh.get_group(), local_weight(head), _chunk_tokens(head, logits_elements)
    whole = whole_hidden(hidden, labels.shape[-1], group).flatten(0, -2)
    wide, first, found = torch.promote_types(hidden.dtype, torch.float32), first_row(head.shape[0], group), []
    for part, own in zip(whole.split(size), labels.flatten().split(size), strict=True):
        targets = _target(own, first, local.shape[0], head.shape[0])
        losses, _ = _losses((part @ local.T).to(wide), targets, group)
        found.append(losses.squeeze(1))
    return torch.cat(found)


def _chunk_tokens(head: DTensor, logits_elements: int) -> int:
    """Return how many tokens have their logits at once: not by this rank's rows, so that chunks are alike."""
    return loss_chunk_tokens(-(-head.shape[0] // head.device_mesh.get_group().size()), logits_elements)


def spread_logits_cross_entropy_sum(logits: DTensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (loss_sum, weight), alike on every rank, for logits [..., vocab] whose vocabulary is spread over ranks."""
    return spread_logits_cross_entropy(logits, labels).sum(), (labels != IGNORED).sum()


def spread_logits_cross_entropy(logits: DTensor, labels: Tensor) -> Tensor:
    """Return the loss of every label, [labels], zero where it does not count; alike on every rank, as above."""
    group, vocab = logits.device_mesh.get_group(), logits.shape[-1]
    local = local_weight(logits).flatten(0, -2)
    losses: Tensor = _SpreadCrossEntropy.apply(local, labels.flatten(), first_row(vocab, group), vocab, group)
    return losses


class _Targets(NamedTuple):
    """Labels as a rank sees them, [tokens, 1] each."""

    counted: Tensor  # whether the label counts
    is_row: Tensor  # whether it is a row of the whole vocabulary
    held: Tensor  # whether this rank holds its row
    row: Tensor  # that row of this rank's, or 0


def _target(labels: Tensor, first: int, rows: int, vocab: int) -> _Targets:
    labels = labels.unsqueeze(1)
    local = labels - first
    held = (local >= 0) & (local < rows) & (labels != IGNORED)
    return _Targets(labels != IGNORED, (labels >= 0) & (labels < vocab), held, local.where(held, 0))


def _losses(logits: Tensor, targets: _Targets, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the loss of every label and the sum of its exponentials, [tokens, 1] each, alike on every rank.

    Exponentials, of what is left of logits below the largest of the whole vocabulary, are written over the logits. A
    label that does not count has no loss, whatever its logits; one that is no row of the vocabulary has NaN: an error,
    as on one device, would have to wait for the device.
    """
    chosen, largest = logits.gather(1, targets.row).where(targets.held, 0.0), logits.amax(dim=1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    exponentials = logits.sub_(largest).exp_().sum(dim=1, keepdim=True)
    sums = torch.cat([exponentials, chosen], dim=1)
    dist.all_reduce(sums, group=group)
    total, target = sums.split(1, dim=1)
    losses = (largest - target + total.log()).where(targets.is_row, math.nan)
    return losses.where(targets.counted, 0.0), total


def _gradient(exponentials: Tensor, sums: Tensor, scale: Tensor, targets: _Targets) -> Tensor:
    """Return the gradient of the sum of losses times `scale` [tokens, 1] by this rank's logits, written over them."""
    scale = scale.to(sums.dtype)
    return exponentials.mul_(scale / sums).scatter_add_(1, targets.row, -(targets.held * scale))


class _SpreadLinearCrossEntropy(torch.autograd.Function):
    """Takes the gradients in the forward pass (gradients_ahead.py); those of hidden states are a part of a sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        first: int,
        vocab: int,
        size: int,
        group: dist.ProcessGroup,
        backward: bool,
    ) -> Tensor:
        coming = iter(() if weights is None else weights.split(size))  # chunks come in order

        def of_chunk(logits: Tensor, labels: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
            targets = _target(labels, first, head.shape[0], vocab)
            counted, (losses, sums) = targets.counted, _losses(logits, targets, group)
            scale = counted if weights is None else next(coming).to(logits.dtype).unsqueeze(1) * counted
            return (losses * scale).sum(), lambda: _gradient(logits, sums, scale, targets)

        return summed_loss(ctx, hidden, head, labels, backward, size, of_chunk)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *kept_gradients(ctx, grad), None, None, None, None, None, None, None


class _SpreadCrossEntropy(torch.autograd.Function):
    """For logits that a model has already computed: keeps their gradient, in fp32 at least, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, vocab: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dtype = logits.dtype
        targets = _target(labels, first, logits.shape[1], vocab)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        losses, sums = _losses(wide, targets, group)
        ctx.save_for_backward(_gradient(wide, sums, targets.counted, targets) if ctx.needs_input_grad[0] else None)
        return losses.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (by_logits,) = ctx.saved_tensors
        return only_first((by_logits * grad.unsqueeze(1)).to(ctx.dtype)), None, None, None, None
