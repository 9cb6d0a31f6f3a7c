"""All-reduce: copies of the model stay equal by summing gradients over `dp_replicate` in every step.

Gradients live in flat buckets, filled in the order in which the backward pass produces them. In the last micro-batch
a bucket is reduced as soon as it is complete, while the backward pass goes on. Buckets are fixed when the run
starts and reduced in a fixed order, so that a resumed run sums in the same order as an undisturbed one.

A pass may come to a weight several times, where a program recomputes parts with `use_reentrant=True`: each has a
backward pass of its own. The first step of a process shows it, whose sums therefore begin when its passes are over;
where weights were met again, so do those of all later steps.

Where FSDP2 holds shards of each copy, the buckets are the places into which it adds what it reduces and scatters; the
rest is the same.

A parameter that no rank's backward pass reaches has no gradient, as on one device: an optimizer would decay its
weight if it had one of zeros. Each bucket therefore carries one number per parameter, how many ranks reached it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigError
from paceline.run.parallel.data.settled_weights import SettledWeights
from paceline.run.parallel.data.sharding import ShardedGradients
from paceline.run.replicas.bucket_sums import BucketSum, PendingSum, PlainSums
from paceline.run.updates.shards import wrapped
from paceline.task.models.held import is_spread, local_of


@dataclass
class _FlatBucket:
    flat: torch.Tensor
    parameters: list[nn.Parameter]
    views: list[torch.Tensor]  # of this rank's part of each gradient, in `flat`
    grads: list[torch.Tensor]  # the same as gradients of the parameters, which may be sharded
    ranks_reached: torch.Tensor  # [parameters], the end of `flat`
    reached: set[nn.Parameter] = field(default_factory=set)  # by this rank's backward passes of the step
    awaited: set[nn.Parameter] = field(default_factory=set)  # by the pass at hand
    work: PendingSum | None = None


@dataclass
class ReducedGradients:
    """Gradients of copies, summed over the ranks of `group` in the last micro-batch of a step.

    `inner` are the gradients of one copy where its weights are sharded.
    """

    model: nn.Module
    group: dist.ProcessGroup
    bucket_bytes: int
    sums: BucketSum = field(default_factory=PlainSums)
    inner: ShardedGradients | None = None
    _buckets: list[_FlatBucket] = field(default_factory=list)
    _settled: SettledWeights = field(default_factory=SettledWeights)
    _next: int = 0
    _last: bool = False
    _has_passed: bool = False  # whether a step's backward passes are over
    _comes_again: bool = False  # whether one has come to a weight that it had been at

    def _make_buckets(self) -> None:
        order = self.inner.sharded() if self.inner else reversed(list(self.model.parameters()))
        trained = [parameter for parameter in order if parameter.requires_grad]
        self._buckets = [_fill(group) for group in grouped(trained, self.bucket_bytes)]
        self.sums.begin([(b.flat, dict(zip(b.parameters, b.views, strict=True))) for b in self._buckets])
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(index))

    def zero(self) -> None:
        """Set all gradients to zero and point every parameter's gradient at its place in the buckets."""
        if self.inner:
            self.inner.zero()
        # Not before the first step: a model built without storage has other parameters once it has any.
        if not self._buckets:
            self._make_buckets()
        self._settled.forget()
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.reached.clear()
            for parameter, grad in zip(bucket.parameters, bucket.grads, strict=True):
                parameter.grad = grad

    def before_micro_batch(self, last: bool) -> None:
        """Set whether the coming backward pass reduces; `last` is the step's last micro-batch."""
        if self.inner:
            self.inner.before_micro_batch(last)
        self._last, self._next = last, 0
        for bucket in self._buckets:
            bucket.awaited = set(bucket.parameters)

    def _hook(self, index: int) -> Callable[[nn.Parameter], None]:
        known = weakref.ref(self)  # or the parameters and this would hold each other where no collector can see it

        def arrived(parameter: nn.Parameter) -> None:
            own = known()
            assert own is not None, "the step holds it as long as there are backward passes"
            bucket = own._buckets[index]
            if parameter in bucket.awaited:
                bucket.awaited.remove(parameter)
                bucket.reached.add(parameter)
            else:
                own._came_again(bucket, parameter)
            reduces = own._last and own._has_passed and not own._comes_again
            while reduces and own._next < len(own._buckets) and not own._buckets[own._next].awaited:
                own._reduce_next()

        return arrived

    def _came_again(self, bucket: _FlatBucket, parameter: nn.Parameter) -> None:
        """Reduce nothing before a pass is over from now on. Raises ConfigError where the sum has begun already."""
        self._comes_again = True
        if bucket.work is not None:
            name = next(name for name, held in self.model.named_parameters() if held is parameter)
            raise ConfigError(
                f"a backward pass came to '{name}' again after its sum over the ranks had begun",
                "parts that are recomputed with use_reentrant=True have backward passes of their own, and those"
                " of the first step came to each weight once",
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            )

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next]
        if len(bucket.reached) == len(bucket.parameters):
            bucket.ranks_reached.fill_(1.0)
        else:
            reached = torch.tensor([float(p in bucket.reached) for p in bucket.parameters])
            bucket.ranks_reached.copy_(reached, non_blocking=True)
        bucket.work = self.sums.start(self._next, bucket.flat, self.group)
        self._next += 1

    def finish(self) -> None:
        """Reduce what the backward pass did not reach, parameters whose gradient is zero, and wait for all sums."""
        if self.inner:
            self.inner.finish()
        while self._next < len(self._buckets):
            self._reduce_next()
        self._has_passed = True
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None

    def _partly(self) -> list[_FlatBucket]:
        """Return the buckets with parameters that this rank did not reach."""
        return [bucket for bucket in self._buckets if len(bucket.reached) < len(bucket.parameters)]

    def unreached(self) -> int:
        """Return how many parameters this rank did not reach, sharded ones twice; 0 for those that were settled last.

        What no rank had reached then has no gradient from here on.
        """
        return self._settled.news(self._missed()) + (self.inner.unreached() if self.inner else 0)

    def _missed(self) -> list[nn.Parameter]:
        return [p for bucket in self._partly() for p in bucket.parameters if p not in bucket.reached]

    def settle(self) -> None:
        """Take the gradients from parameters that no rank reached: the host asks the device how many reached each."""
        if self.inner:
            self.inner.settle()
        self._settled.give_back()
        unreached: list[nn.Parameter] = []
        if partly := self._partly():  # one wait for the device, whatever their number
            parameters = [parameter for bucket in partly for parameter in bucket.parameters]
            counts = torch.cat([bucket.ranks_reached.abs().float() for bucket in partly]).tolist()
            unreached = [parameter for parameter, ranks in zip(parameters, counts, strict=True) if not ranks]
        self._settled.settle(self._missed(), unreached)


@torch.no_grad()
def grouped(parameters: Sequence[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Return the parameters in runs of one dtype of which this rank holds about `limit` bytes each."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        if not groups or groups[-1][0].dtype != parameter.dtype or size >= limit:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += local_of(parameter).nbytes
    return groups


@torch.no_grad()
def _fill(parameters: list[nn.Parameter]) -> _FlatBucket:
    """Return a bucket with one gradient view per parameter, laid out like this rank's part of the parameter.

    Fused optimizers walk through the memory of weight, gradient and state side by side, whatever their strides are.
    """
    first = parameters[0]
    held = [local_of(parameter) for parameter in parameters]
    size = sum(part.numel() for part in held) + len(parameters)
    flat = torch.zeros(size, dtype=first.dtype, device=first.device)
    views, start = [], 0
    for part in held:
        views.append(flat.as_strided(part.shape, _dense_strides(part), start))
        start += part.numel()
    grads = [wrapped(v, p) if is_spread(p) else v for p, v in zip(parameters, views, strict=True)]
    return _FlatBucket(flat, parameters, views, grads, flat[start:])


def _dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the parameter's strides, or those of a gradient of it where it leaves gaps or overlaps itself."""
    return torch.empty_like(parameter, device="meta").stride()


@dataclass
class LocalGradients:
    """Gradients of a single device: nothing to communicate."""

    model: nn.Module

    def __post_init__(self) -> None:
        self._parameters: list[nn.Parameter] = []

    def zero(self) -> None:
        """Forget the last step's gradients."""
        # Not before the first step: a model built without storage has other parameters once it has any.
        self._parameters = self._parameters or list(self.model.parameters())
        for parameter in self._parameters:
            parameter.grad = None

    def before_micro_batch(self, last: bool) -> None:
        """Nothing to prepare."""

    def finish(self) -> None:
        """Nothing to wait for."""

    def unreached(self) -> int:
        """Return 0: what this device did not reach has no gradient."""
        return 0

    def settle(self) -> None:
        """Nothing to settle."""
