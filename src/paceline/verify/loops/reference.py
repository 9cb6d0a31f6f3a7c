"""One device under somebody's loop: the steps on the batches of all ranks together, and how a step is made again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from paceline.task.models.copied import copied
from paceline.verify.compare.difference import Difference, wide
from paceline.verify.loops.mistakes import MicroBatches, sampled
from paceline.verify.reference.steps import ReferenceStep
from paceline.verify.rounding.conditioning import Again, Move, Narrowest, computed_again, moved_by_one_ulp, steps_apart
from paceline.verify.rounding.narrow import NarrowSeen

SCALES = 16  # the loss of a draw is scaled by one and a part of this, the draw's number
AnyObjective = Callable[[nn.Module, Any], tuple[torch.Tensor, Any]]
MadeOptimizer = torch.optim.Optimizer | tuple[torch.optim.Optimizer, LRScheduler]
Maker = Callable[[Iterable[nn.Parameter]], MadeOptimizer]
Batches = Sequence[Sequence[Any]]  # of one step: the micro-batches of every part
Tensors = dict[str, torch.Tensor]


class LoopReference:
    """The reference of a loop: a module on the CPU, what updates it, and the steps that it has made.

    Without an optimizer whoever holds it sets the module's weights before every step.
    """

    def __init__(self, module: nn.Module, objective: AnyObjective, optimizer: Maker | None, clip_norm: float) -> None:
        self.module = module
        self._objective, self._optimizer, self._clip_norm = objective, optimizer, clip_norm
        self._update = self._updates(module)
        self._batches: list[Batches] = []
        self._starts: list[nn.Module] = []  # the module before the first step; before every one without an optimizer

    def step(self, batches: Batches) -> tuple[ReferenceStep, MicroBatches]:
        """Return the numbers of a step on all parts' micro-batches, and what each of these gave."""
        if self._optimizer is None or not self._starts:
            self._starts.append(copied(self.module))
        self._batches.append(batches)
        return self._step(self.module, self._update, batches)

    def again(self) -> Again:
        """Return how the same is computed again."""
        return computed_again(self._computed, _apart, self._narrowest)

    def _computed(self, made: int, move: Move | None) -> list[tuple[Tensors, ReferenceStep]]:
        """Return so many steps again, each with the weights that it, or the first of its run, began from."""
        found, starts = [], iter(self._starts)
        # A loop divides its loss before the backward pass, which rounds otherwise where parts are in fewer bits.
        scale = 1.0 if move is None else 1.0 + move[1] / SCALES
        module = start = update = None
        for batches in self._batches[:made]:
            if module is None or self._optimizer is None:
                module = copied(next(starts))
                if move is not None:
                    moved_by_one_ulp(module, *move)
                start, update = weights_of(module), self._updates(module)
            assert start is not None
            found.append((start, self._step(module, update, batches, scale)[0]))
        return found

    def _narrowest(self) -> Narrowest:
        module = copied(self._starts[0])
        seen = NarrowSeen(module, next(module.parameters()).dtype)
        with seen.during():
            self._objective(module, _on_cpu(self._batches[0][0][0]))
        return seen.narrowest

    def _updates(self, module: nn.Module) -> Callable[[], None] | None:
        """Return what updates a module: its optimizer and then, where there is one, the schedule of the rate."""
        if self._optimizer is None:
            return None
        made = self._optimizer([p for p in module.parameters() if p.requires_grad])
        optimizer, *schedules = made if isinstance(made, tuple) else (made,)

        def update() -> None:
            optimizer.step()
            for schedule in schedules:
                schedule.step()

        return update

    def _step(
        self, module: nn.Module, update: Callable[[], None] | None, batches: Batches, scale: float = 1.0
    ) -> tuple[ReferenceStep, MicroBatches]:
        """Make a step; backward passes are those of the loss times `scale`, by which gradients are divided again."""
        parts = self._backward(module, batches, scale)
        total = sum(parts.weights)
        trained = {name: p for name, p in module.named_parameters() if p.grad is not None}
        for parameter in trained.values():
            assert parameter.grad is not None
            parameter.grad /= total * scale
        norms = [wide(p.grad).norm() for p in trained.values() if p.grad is not None]
        if self._clip_norm:
            nn.utils.clip_grad_norm_(list(trained.values()), self._clip_norm)
        gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        if update is not None:
            update()
        step = ReferenceStep(
            loss=sum(parts.losses) / total,
            weight=total,
            grad_norm=float(torch.stack(norms).norm()),
            clip_norm=self._clip_norm,
            turns={},
            gradients=gradients,
            weights=weights_of(module),
            buffers={},
            ids=[],
            router={},
            moments={},
        )
        return step, parts

    def _backward(self, module: nn.Module, batches: Batches, scale: float = 1.0) -> MicroBatches:
        """Sum the gradients of all micro-batches and return what each gave."""
        module.zero_grad(set_to_none=True)
        named, parts = dict(module.named_parameters()), MicroBatches()
        last = sampled({}, named)
        for rank, micro_batches in enumerate(batches):
            for batch in micro_batches:
                loss, weight = self._objective(module, _on_cpu(batch))
                (loss * scale).backward()
                now = sampled({name: p.grad for name, p in named.items() if p.grad is not None}, named)
                parts.losses.append(float(loss.detach()))
                parts.weights.append(float(weight))
                parts.ranks.append(rank)
                parts.gradients.append(now - last)
                last = now
        return parts


def weights_of(module: nn.Module) -> Tensors:
    """Return copies of a module's parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def _apart(
    ours: Sequence[tuple[Tensors, ReferenceStep]], known: Sequence[tuple[Tensors, ReferenceStep]]
) -> Iterator[Difference]:
    for number, ((start, step), (other_start, other)) in enumerate(zip(ours, known, strict=True), 1):
        yield from steps_apart(step, other, (start, other_start), number)


def _on_cpu(batch: object) -> object:
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, batch)
