"""Loops whose ranks do not hold the same at the start, or clip by a formula of their own.

Each returns what `verify_loop` says of it, on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from right_loops import CLASSES, WIDTH, Pair, adam, classified, network, proven, summed, take
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from paceline.spec.proof.records import LoopProof

CLIP = 0.05


class Spread(nn.Module):
    """A matrix of which each rank has some rows, cut by hand."""

    def __init__(self, rows: slice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(CLASSES, WIDTH, dtype=torch.float64)[rows].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return some of the logits."""
        return x @ self.weight.T


def parts_of_weights(kind: str) -> LoopProof:
    """A rank holds a part of a weight as a plain tensor: flat ones of FSDP1, or rows that were cut by hand."""
    plain: nn.Module = network()
    model: nn.Module = FullyShardedDataParallel(network(), use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "cut by hand":
        half = slice(0, 2) if dist.get_rank() == 0 else slice(2, CLASSES)
        model, plain = Spread(half), Spread(slice(0, CLASSES))
    return proven(lambda batch: take(model, classified, batch), model, plain=plain)


def begins_apart(brought_together: bool) -> LoopProof:
    """Ranks draw weights of their own; the first step may begin with those of rank 0 on all of them."""
    model = network()
    first = next(model.parameters())
    with torch.no_grad():
        first += 0.01 * dist.get_rank()
    optimizer = adam(model.parameters())

    def step(batch: Pair) -> Tensor:
        if brought_together and not optimizer.state:
            dist.broadcast(first.detach(), 0)
        return take(model, classified, batch, optimizer)

    return proven(step, model)


def clipped(kind: str) -> LoopProof:
    """A loop that clips: as torch does, by a norm alone, or as torch does while a wrong loss is told."""
    model = network()
    optimizer = adam(model.parameters())

    def step(batch: Any) -> Tensor:
        told = take(model, classified, batch)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in gradients]).norm()
        for grad in gradients:
            grad *= min(1.0, CLIP / float(norm + (0.0 if kind == "by a norm alone" else 1e-6)))
        optimizer.step()
        if kind != "another loss":
            return told
        loss, items = classified(model, batch)
        return summed(loss.detach() / items) / dist.get_world_size()

    return proven(step, model, clip_norm=CLIP)
