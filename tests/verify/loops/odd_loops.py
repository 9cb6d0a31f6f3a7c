"""Loops with what few have: buffers that the step moves, sparse gradients, gradients that are changed on their way.

Each returns what `verify_loop` says of it, on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from right_loops import CLASSES, STEPS, WIDTH, Pair, Told, adam, classified, network, proven, summed, take
from torch import Tensor, nn

from paceline.spec.proof.records import LoopProof


class Followed(nn.Module):
    """A layer less the mean of what it gave, which somebody keeps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head((self.body(x) - self.mean).tanh())


def buffer_of_the_step() -> LoopProof:
    """The step moves a buffer beside the forward pass, by the rows of all ranks."""
    torch.manual_seed(5)
    model = Followed().double()
    optimizer = adam(model.parameters())

    def step(batch: Pair) -> Tensor:
        told = take(model, classified, batch, optimizer)
        with torch.no_grad():
            model.mean.copy_(summed(model.body(batch[0]).sum(0)) / summed(len(batch[0])))
        return told

    return proven(step, model)


class Looked(nn.Module):
    """The mean of embeddings, whose gradient is of the rows that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8, sparse=True), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.embed(tokens).mean(1))


def sparse_gradients(reduced: bool) -> LoopProof:
    """A sparse gradient, with an update rule of its own; where it is not summed, each rank keeps its own."""
    torch.manual_seed(5)
    model, rank = Looked().double(), dist.get_rank() if dist.is_initialized() else 0

    def made(parameters: Iterable[nn.Parameter]) -> Any:
        first, *others = parameters
        return torch.optim.SparseAdam([first], lr=0.01, eps=1e-4), adam(others)

    optimizers = made(model.parameters())

    def step(batch: Pair) -> Tensor:
        model.zero_grad()
        loss, count = classified(model, batch)
        items = summed(count)
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad = (summed(p.grad) if reduced or not p.grad.is_sparse else p.grad) / items
        for optimizer in optimizers:
            optimizer.step()
        return summed(loss) / items

    generator = torch.Generator().manual_seed(rank)
    given = [(torch.randint(0, 11, (5, 3), generator=generator), torch.tensor([0, 1, 2, 3, 0])) for _ in range(STEPS)]
    return proven(step, model, given, optimizer=made)


class _Normalised(torch.autograd.Function):
    """Hands back a gradient of norm one: of each row, or of all rows that are there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by_row: bool) -> Tensor:
        ctx.by_row = by_row
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        norm = gradients[0].norm(dim=1, keepdim=True) if ctx.by_row else gradients[0].norm()
        return gradients[0] / norm, None


def normalised_gradient(by_row: bool) -> LoopProof:
    """Gradients of hidden states are normalised on their way back."""
    model = network()
    optimizer = adam(model.parameters())

    def normalised(model: Any, batch: Any) -> Told:
        hidden = _Normalised.apply(model[:2](batch[0]), by_row)
        return F.cross_entropy(model[2](hidden), batch[1], reduction="sum"), len(batch[0])

    return proven(lambda batch: take(model, normalised, batch, optimizer), model, objective=normalised)


class Evaluated(nn.Module):
    """A layer whose evaluations alone see a running mean of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        if not self.training:
            return self.head(x - self.mean)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.head(x)


def buffer_of_evaluations(shared: bool) -> LoopProof:
    """Each rank moves the mean by its own rows; where it is shared, the step makes one of all of them."""
    torch.manual_seed(5)
    model = Evaluated().double()
    optimizer = adam(model.parameters())

    def step(batch: Pair) -> Tensor:
        told = take(model, classified, batch, optimizer)
        if shared:
            model.mean.copy_(summed(model.mean) / dist.get_world_size())
        return told

    return proven(step, model)


def hooked_weight(kind: str) -> LoopProof:
    """Gradients of a weight pass a hook, which no copy of it has: the model's own, or the loop's."""
    model, plain = network(), network()
    first = next(model.parameters())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mask = torch.arange(first.numel(), dtype=first.dtype).view_as(first) % 2
    calls = itertools.count()

    def reduced(grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / ranks

    hooks: dict[str, Callable[[Tensor], Tensor]] = {
        "masked": lambda grad: grad * mask,
        "divided": lambda grad: grad / ranks,
        "divided once more": lambda grad: grad / ranks,
        "reduced": reduced,
        "of a rank": lambda grad: grad * (1 + rank),
        "normalised": lambda grad: grad / grad.norm(),
        "counted": lambda grad: grad * (1 + next(calls)),
        "of plain": lambda grad: grad * mask,
        "of plain alone": lambda grad: grad,
    }
    first.register_hook(hooks[kind])
    if kind.startswith("of plain"):
        next(plain.parameters()).register_hook(hooks["of plain"])
    optimizer = adam(model.parameters())

    def step(batch: Pair) -> Tensor:
        told = take(model, classified, batch)
        if kind == "divided" and first.grad is not None:
            first.grad *= ranks
        optimizer.step()
        return told

    return proven(step, model, plain=plain if kind.startswith("of plain") else None)
