"""How a flat bucket of gradients becomes its sum over the copies: the hook that a plan's `sync` chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.run.parallel.context.exchange import all_gather
from paceline.spec.sync import Sync

Views = Mapping[nn.Parameter, Tensor]  # of a bucket: where each parameter's gradient lies in it


class PendingSum(Protocol):
    """A sum that is under way."""

    def wait(self) -> object:
        """Return once the bucket holds the sum."""


class BucketSum(Protocol):
    """Sums buckets over a group. Every rank starts the same buckets in the same order, each once in a step."""

    def begin(self, buckets: Sequence[tuple[Tensor, Views]]) -> None:
        """Learn all flat buckets, which stay the same, and make what is kept from step to step."""

    def start(self, number: int, flat: Tensor, group: dist.ProcessGroup) -> PendingSum | None:
        """Begin to replace the bucket of this number by its sum over the group's ranks."""

    def kept(self) -> Views:
        """Return what is kept from step to step, of a parameter's shape each: a checkpoint holds it for every copy."""


class PlainSums:
    """Sums as they are, by one all-reduce. Nothing is kept."""

    def begin(self, buckets: Sequence[tuple[Tensor, Views]]) -> None:
        """Nothing to learn."""

    def start(self, number: int, flat: Tensor, group: dist.ProcessGroup) -> PendingSum | None:
        """Begin to replace the bucket by its sum over the group's ranks."""
        return dist.all_reduce(flat, group=group, async_op=True)

    def kept(self) -> Views:
        """Return nothing."""
        return {}


class RoundedSums:
    """Sums of what ranks send in bf16. What rounding leaves out on a rank is added before that rank sends again.

    Error feedback: Seide et al. 2014 (1-bit SGD), Karimireddy et al. 2019 (arXiv:1901.09847). Sums are made in the
    bucket's own dtype, in the order of the ranks, so they are the same bits everywhere. What was left out of a
    parameter is lost in a step in which no copy reaches it.
    """

    def __init__(self) -> None:
        self._left: list[Tensor] = []
        self._kept: dict[nn.Parameter, Tensor] = {}

    def begin(self, buckets: Sequence[tuple[Tensor, Views]]) -> None:
        """Begin with nothing left out."""
        self._left = [torch.zeros_like(flat) for flat, _ in buckets]
        for left, (_, views) in zip(self._left, buckets, strict=True):
            for parameter, view in views.items():
                self._kept[parameter] = left.as_strided(view.shape, view.stride(), view.storage_offset())

    def start(self, number: int, flat: Tensor, group: dist.ProcessGroup) -> PendingSum | None:
        """Begin to replace the bucket by the sum of what all ranks send of it."""
        flat, left = _real(flat), _real(self._left[number])
        flat.add_(left)
        sent = flat.bfloat16()
        torch.sub(flat, sent, out=left)
        parts = sent.new_empty(group.size() * len(sent))
        return _Gathered(all_gather(parts, sent, group=group, async_op=True), parts, flat)

    def kept(self) -> Views:
        """Return what was left out so far."""
        return self._kept


@dataclass(frozen=True)
class _Gathered:
    """What all ranks sent, on its way, and the bucket that gets its sum."""

    work: dist.Work
    parts: Tensor  # [ranks x bucket]
    flat: Tensor

    def wait(self) -> None:
        self.work.wait()
        first, *others = self.parts.view(-1, len(self.flat))
        self.flat.copy_(first)
        for part in others:
            self.flat.add_(part)


def _real(flat: Tensor) -> Tensor:
    """Return a flat tensor as real numbers in the same memory: a cast to bf16 would drop imaginary parts."""
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat


def bucket_sums(sync: Sync) -> BucketSum | None:
    """Return what sums buckets in the place of exact sums, None where sums are exact."""
    return RoundedSums() if sync.wire == "bf16" else None
