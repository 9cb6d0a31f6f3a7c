"""One device under somebody's loop: the steps on the batches of all ranks together, and how a step is made again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from paceline.errors import ConfigError
from paceline.spec.proof.records import FirstDifference
from paceline.task.coupling import is_coupled, with_gather
from paceline.task.models.copied import copied
from paceline.task.sums import back_through
from paceline.verify.compare.difference import Difference, reach_of, wide
from paceline.verify.loops.gradients import GradientsTaken, dense
from paceline.verify.loops.hooks import WeightHooks
from paceline.verify.loops.mistakes import MicroBatches, sampled
from paceline.verify.loops.pieces import AnyObjective, not_a_sum, together
from paceline.verify.loops.unwrapped import named
from paceline.verify.reference.peers import NoPeers
from paceline.verify.reference.steps import ReferenceStep
from paceline.verify.rounding.conditioning import Again, Move, Narrowest, computed_again, moved_by_one_ulp, steps_apart
from paceline.verify.rounding.narrow import NarrowSeen

SCALES = 16  # the loss of a draw is scaled by one and a part of this, the draw's number
ASIDE = 2971  # seeds what an objective draws beside the loop, which must not have its numbers
MadeOptimizer = torch.optim.Optimizer | tuple[torch.optim.Optimizer | LRScheduler, ...]
Maker = Callable[[Iterable[nn.Parameter]], MadeOptimizer]
Batches = Sequence[Sequence[Any]]  # of one step: the micro-batches of every part
Tensors = dict[str, torch.Tensor]
Closure = Callable[[], torch.Tensor]


@dataclass
class _BegunStep:
    """A step of which the gradients are there, summed over all items."""

    batches: Batches
    parts: MicroBatches
    frozen: Collection[str] = ()  # parameters that the loop has frozen for this step


class LoopReference:
    """The reference of a loop: a module on the CPU, what updates it, and the steps that it has made.

    Without an optimizer whoever holds it sets the module's weights before every step. An objective whose rows see each
    other, as it or the module says, gets those of all ranks and micro-batches in one piece.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: AnyObjective,
        optimizer: Maker | None,
        clip_norm: float,
        hooks: WeightHooks | None = None,
    ) -> None:
        """`hooks` are those that the module's weights are to have, and those of all of its copies."""
        self._hooks = hooks or WeightHooks({})
        self.module = self._hooks.put(module)
        self.not_a_sum: FirstDifference | None = None  # once a step has begun
        self._objective, self._optimizer, self._clip_norm = with_gather(objective), optimizer, clip_norm
        self._is_coupled = is_coupled(module, self._objective)
        self._update = self._updates(self.module)
        self._made: list[_BegunStep] = []
        self._starts: list[nn.Module] = []  # the module before the first step; before every one without an optimizer

    def begin(self, batches: Batches, dtype: str) -> MicroBatches:
        """Compute the gradients of a step on all parts' micro-batches, and return what each of these gave.

        It comes before the loop's own step: what an objective reads beside its model (another network, a teacher that
        follows) is as it was.
        """
        start = self._hooks.copied(self.module)
        if self._optimizer is None or not self._starts:
            self._starts.append(start)
        is_first = not self._made
        batches = together(batches) if self._is_coupled else batches
        with torch.random.fork_rng(devices=[]):  # the loop draws what it would without a proof
            torch.default_generator.manual_seed(ASIDE)  # torch.manual_seed would seed accelerators as well
            with NoPeers() if is_first else contextlib.nullcontext():
                parts = self._backward(self.module, batches)
            self._made.append(_BegunStep(batches, parts))
            if self.not_a_sum is None:  # at later steps too: what stands behind weights of zero does not show before
                pieces = [_on_cpu(piece) for part in batches for piece in part]
                found = not_a_sum(
                    start, self._hooks.copied, self._objective, pieces, parts, dtype,
                    lambda: torch.finfo(self._narrowest().dtype).eps,
                )  # fmt: skip
                self.not_a_sum = found and dataclasses.replace(found, step=len(self._made))
        return parts

    def finish(self, frozen: Collection[str] = ()) -> ReferenceStep:
        """Update the module, without the gradients of what the loop has frozen, and return the step's numbers."""
        begun = self._made[-1]
        begun.frozen = frozen
        return self._finish(self.module, self._update, begun)

    def again(self) -> Again:
        """Return how the same is computed again."""
        return computed_again(self._computed, _apart, self._narrowest)

    def _computed(self, made: int, move: Move | None) -> list[tuple[Tensors, ReferenceStep]]:
        """Return so many steps again, each with the weights that it, or the first of its run, began from."""
        found, starts = [], iter(self._starts)
        # A loop divides its loss before the backward pass, which rounds otherwise where parts are in fewer bits.
        scale = 1.0 if move is None else 1.0 + move[1] / SCALES
        module = start = update = None
        for made_before in self._made[:made]:
            if module is None or self._optimizer is None:
                module = self._hooks.copied(next(starts))
                if move is not None:
                    moved_by_one_ulp(module, *move)
                start, update = weights_of(module), self._updates(module)
            assert start is not None
            parts = self._backward(module, made_before.batches, scale)
            begun = _BegunStep(made_before.batches, parts, made_before.frozen)
            found.append((start, self._finish(module, update, begun, scale)))
        return found

    def _narrowest(self) -> Narrowest:
        module = copied(self._starts[0])
        seen = NarrowSeen(module, next(module.parameters()).dtype)
        with seen.during():
            self._objective(module, _on_cpu(self._made[0].batches[0][0]))
        return seen.narrowest

    def _updates(self, module: nn.Module) -> Callable[[Closure], None] | None:
        """Return what updates a module: its optimizers and schedules of rates, in the order in which they are given."""
        if self._optimizer is None:
            return None
        made = self._optimizer([p for p in module.parameters() if p.requires_grad])
        steppers = [_stepper(each, set(module.parameters())) for each in (made if isinstance(made, tuple) else (made,))]

        def update(closure: Closure) -> None:
            for step in steppers:
                step(closure)

        return update

    def _finish(
        self, module: nn.Module, update: Callable[[Closure], None] | None, begun: _BegunStep, scale: float = 1.0
    ) -> ReferenceStep:
        """Divide the summed gradients, clip them and update the module."""
        parts = begun.parts
        total = sum(parts.weights)
        norm = self._ready(module, begun, total * scale)
        reach = reach_of(norm, (p for p in named(module).values() if p.grad is not None))

        def closure() -> torch.Tensor:  # of optimizers that look at a step's loss more than once
            more = self._backward(module, begun.batches, scale)
            self._ready(module, begun, total * scale)
            return torch.tensor(sum(more.losses) / total, dtype=torch.float64)

        taken = GradientsTaken(named(module))  # as of the loop: some optimizers change gradients in place
        with taken.during():
            if update is not None:
                update(closure)
        gradients = {name: gradient.clone() for name, gradient in taken.found().items()}
        return ReferenceStep(
            loss=sum(parts.losses) / total,
            weight=total,
            grad_norm=norm,
            clip_norm=self._clip_norm,
            turns={},
            gradients=gradients,
            weights=weights_of(module),
            buffers={},
            ids=[],
            router={},
            moments={},
            reach=reach,
        )

    def _ready(self, module: nn.Module, begun: _BegunStep, divisor: float) -> float:
        """Make summed gradients those of an update, and return their norm before clipping."""
        trained = []
        for name, parameter in named(module).items():
            if name in begun.frozen:
                parameter.grad = None
            if parameter.grad is not None:
                parameter.grad /= divisor
                trained.append(parameter)
        norms = [wide(dense(p.grad)).norm() for p in trained if p.grad is not None]
        if self._clip_norm:
            nn.utils.clip_grad_norm_(trained, self._clip_norm)
        return float(torch.stack(norms).norm()) if norms else 0.0

    def _backward(self, module: nn.Module, batches: Batches, scale: float = 1.0) -> MicroBatches:
        """Sum the gradients of all micro-batches, of the loss times `scale`, and return what each gave."""
        module.zero_grad(set_to_none=True)
        known, parts = named(module), MicroBatches()
        last = sampled({}, known)
        with torch.enable_grad():  # the loop may be one of evaluations too
            for rank, micro_batches in enumerate(batches):
                for batch in micro_batches:
                    loss, weight = self._objective(module, _on_cpu(batch))
                    back_through(loss * scale, self._objective)
                    now = sampled({name: dense(p.grad) for name, p in known.items() if p.grad is not None}, known)
                    parts.losses.append(float(loss.detach()))
                    parts.weights.append(float(weight))
                    parts.ranks.append(rank)
                    parts.gradients.append(now - last)
                    last = now
        return parts


def _stepper(made: object, own: Collection[nn.Parameter]) -> Callable[[Closure], None]:
    """Return what makes a step of an optimizer of `own` parameters, which may want a closure, or of a schedule."""
    step = getattr(made, "step", None)
    if not callable(step):
        raise ConfigError(
            f"optimizer= returned {type(made).__name__}, which has no step()",
            "what it makes updates the reference",
            "an optimizer, or a tuple of optimizers and of schedules of their rates",
        )
    if isinstance(made, torch.optim.Optimizer) and not any(p in own for g in made.param_groups for p in g["params"]):
        raise ConfigError(
            "optimizer= returned an optimizer of other parameters than it was given",
            "the loop's own optimizer would make the reference's updates on the loop's model",
            "optimizer=lambda parameters: an optimizer made of them, as the loop's is",
        )
    wanted = _wanted(made, step)
    if wanted == ["closure"]:
        return lambda given: step(given)
    if wanted:
        raise ConfigError(
            f"optimizer= returned {type(made).__name__}, whose step() wants {wanted[0]}",
            "the reference's steps are made without: it knows no more than the number of them",
            "a schedule whose step() wants nothing, or a fixed rate in the loop and in optimizer= for the proof",
        )
    if isinstance(made, torch.optim.Optimizer) and "closure" in inspect.signature(type(made).step).parameters:
        return functools.partial(_with_closure_or_without, step)
    return lambda given: step()


def _with_closure_or_without(step: Callable[..., object], given: Closure) -> None:
    """Make an update; one of those that look at the loss once more says so by an error, before it does anything."""
    try:
        step()
    except (TypeError, AssertionError, RuntimeError, ValueError):  # what optimizers say to a closure that is not there
        step(given)


def _wanted(made: object, step: Callable[..., object]) -> list[str]:
    """Return the arguments without which `step` of what was made cannot be called.

    A schedule puts a function into its optimizer, whose signature is that of the class's function: with `self`.
    """
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if isinstance(made, torch.optim.Optimizer):
        given = list(inspect.signature(type(made).step).parameters.values())[1:]
    else:
        given = list(inspect.signature(step).parameters.values())
    return [each.name for each in given if each.default is inspect.Parameter.empty and each.kind not in several]


def weights_of(module: nn.Module) -> Tensors:
    """Return copies of a module's parameters by name, without what wrappers of blocks put into it."""
    return {name: parameter.detach().clone() for name, parameter in named(module).items()}


def _apart(
    ours: Sequence[tuple[Tensors, ReferenceStep]], known: Sequence[tuple[Tensors, ReferenceStep]]
) -> Iterator[Difference]:
    for number, ((start, step), (other_start, other)) in enumerate(zip(ours, known, strict=True), 1):
        yield from steps_apart(step, other, (start, other_start), number)


def _on_cpu(batch: object) -> object:
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, batch)
