"""Loops of published programs whose update does more than to take a gradient, or whose rows are no rows alone.

Each returns what `verify_loop` says of it, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from right_loops import CLASSES, WIDTH, Told, adam, classified, network, proven, summed, take
from torch import Tensor, nn

from paceline.spec.proof.records import LoopProof

LIMIT = 0.01


class ReducesItself(torch.optim.Optimizer):
    """Adds up or averages gradients over all ranks in its update, as nanochat's does."""

    def __init__(self, parameters: Iterable[nn.Parameter], divisor: int) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.divisor = divisor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make an update."""
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad if self.divisor == 0 else summed(p.grad) / self.divisor
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(momentum.mul_(0.9).add_(gradient), alpha=group["lr"])


def reduced_by_the_optimizer(divisor: int) -> LoopProof:
    """Gradients of a rank reach the optimizer: it averages (2), adds up (1) or, wrongly, takes them as they are (0)."""
    model = network()
    optimizer = ReducesItself(model.parameters(), divisor)

    def step(batch: Any) -> Tensor:
        model.zero_grad()
        loss, count = classified(model, batch)
        items = summed(count)
        (loss * max(1, divisor) / items).backward()
        optimizer.step()
        return summed(loss) / items

    return proven(step, model, optimizer=lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9))


def divided_twice() -> LoopProof:
    """A mean over ranks that is made twice: an update of signs is the same, and a clipping would not be."""
    model = network()
    signs = {"lr": 0.01, "eps": 1e-30}
    optimizer = torch.optim.Adam(model.parameters(), **signs)

    def step(batch: Any) -> Tensor:
        model.zero_grad()
        loss, count = classified(model, batch)
        items = summed(count)
        loss.backward()
        for p in model.parameters():
            p.grad = summed(p.grad) / items / dist.get_world_size()
        optimizer.step()
        return summed(loss) / items

    return proven(step, model, optimizer=lambda own: torch.optim.Adam(own, **signs))


def clipped_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam that clips by value before each update."""
    optimizer = adam(parameters)
    own = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(own, LIMIT))
    return optimizer


def clipped_by_value(how: str) -> LoopProof:
    """The loop clips by value, or by parameter; one device does so where `optimizer=` says it."""
    model = network()
    optimizer = adam(model.parameters())

    def step(batch: Any) -> Tensor:
        told = take(model, classified, batch)
        if how == "by parameter":
            for p in model.parameters():
                nn.utils.clip_grad_norm_([p], LIMIT)
        else:
            nn.utils.clip_grad_value_(model.parameters(), LIMIT)
        optimizer.step()
        return told

    return proven(step, model, optimizer=clipped_adam if how == "said" else adam)


class SharpnessAware(torch.optim.Optimizer):
    """Goes up along the gradient, has the loss computed there, comes back, and takes that gradient; as published."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make an update."""
        assert closure is not None, "requires closure, but it was not provided"
        own = [p for group in self.param_groups for p in group["params"]]
        moves = [0.05 * p.grad for p in own]
        for p, move in zip(own, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            closure()
        for p, move in zip(own, moves, strict=True):
            p.sub_(move)
        self.inner.step()


def sharpness_aware() -> LoopProof:
    model = network()
    optimizer = SharpnessAware(model.parameters())

    def step(batch: Any) -> Tensor:
        told = take(model, classified, batch)
        optimizer.step(lambda: take(model, classified, batch))
        return told

    return proven(step, model, optimizer=SharpnessAware)


# ---- rows that are no rows alone -------------------------------------------------------------------------------------


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)


def packed(by_batch: bool) -> LoopProof:
    """Rows of several segments, of which a row sees its own; or, wrongly, all rows of the rank."""
    model = network()

    def of_segments(model: nn.Module, batch: Any) -> Told:
        x, segment, labels = batch
        seen = torch.zeros_like(segment) if by_batch else segment
        means = torch.zeros(int(seen.max()) + 1, WIDTH, dtype=x.dtype).index_add(0, seen, x)
        return F.cross_entropy(model(x - means[seen] / 3), labels, reduction="sum"), len(x)

    sizes = torch.tensor([2, 3, 2 + dist.get_rank()])
    rows = int(sizes.sum())
    batch = _drawn(rows, WIDTH), torch.arange(3).repeat_interleave(sizes), torch.arange(rows) % CLASSES
    optimizer = adam(model.parameters())
    return proven(lambda each: take(model, of_segments, each, optimizer), model, [batch] * 2, objective=of_segments)


def targets_in_lists() -> LoopProof:
    """Boxes of every image in a list, as many of them as there are images."""
    model = network(4)

    def boxed(model: nn.Module, batch: Any) -> Told:
        found = zip(model(batch["images"]), batch["targets"], strict=False)  # as people write it
        return sum((one - target["boxes"]).abs().sum() for one, target in found), 4

    batch = {"images": _drawn(2, WIDTH), "targets": [{"boxes": each} for each in _drawn(2, 2, 4)]}
    optimizer = adam(model.parameters())
    return proven(lambda each: take(model, boxed, each, optimizer), model, [batch] * 2, objective=boxed)


def advantages() -> LoopProof:
    """Policy gradients whose advantages sum to zero over each row: so does the loss, to rounding."""
    model = network()

    def group(model: nn.Module, batch: Any) -> Told:
        gains = batch[0][:, :CLASSES]
        gains = (gains - gains.mean(1, keepdim=True)) / gains.std(1, keepdim=True)
        log = model(batch[0]).log_softmax(-1)
        return -(gains * (log - log.detach()).exp()).sum(), len(gains)

    optimizer = adam(model.parameters())
    return proven(lambda batch: take(model, group, batch, optimizer), model, objective=group)


class Asleep(nn.Module):
    """A part that takes a mean over a rank's rows, behind a gate and a head of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, CLASSES)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(x + self.gate * (x.tanh() - x.tanh().mean(0)))


def asleep() -> LoopProof:
    model = Asleep().double()
    optimizer = adam(model.parameters())
    return proven(lambda batch: take(model, classified, batch, optimizer), model)
