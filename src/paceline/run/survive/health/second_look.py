"""The second look: a micro-batch is computed twice, and its loss and gradients must have the same bits both times.

Kernels give the same bits for the same numbers, and random numbers here follow from the seed, the step and the sample.
So a difference is a fault of the device: a bit that flipped in a sum or in a register, which no norm shows. Each rank
looks at what it has computed itself, before any sum over ranks, so that the rank that is wrong is named.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError, VerificationFailed
from paceline.run.loop.loader import StepBatch
from paceline.run.loop.passes import SequentialPasses
from paceline.run.loop.step import Stepper
from paceline.run.numerics.invariants import bits_of, fingerprint
from paceline.run.process.world import World
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.plan import Plan
from paceline.task.models.held import local_of

LOSS = "the loss"


class SecondLook:
    """Computes the first micro-batch of every so many steps twice on each rank, before the step itself."""

    def __init__(
        self, every: int, plan: Plan, world: World, deterministic: bool, before: SecondLook | None = None
    ) -> None:
        """`before` is that of the world before, which has told what a look costs under its layout.

        Raises ConfigError where the same numbers may have other bits, or gradients are not seen."""
        because = ""
        if world.device.type == "cuda" and not deterministic:
            because = "some of CUDA's kernels sum in another order at every call unless run.deterministic is set"
        elif plan.layout.pp > 1:
            because = "a stage of a pipeline computes gradients of weights apart, where none is seen by itself"
        elif plan.compile:
            because = "compiled blocks would be compiled again to look at their gradients"
        if because:
            raise ConfigError("run.health.recompute_every is set", because, 'run.health.recompute_every = "none"')
        self._every, self._world = every, world
        self._layout = plan.layout
        self._is_told: bool = before is not None and before._is_told and before._layout == plan.layout

    def check(self, stepper: Stepper, batch: StepBatch, step_seconds: float) -> list[DecisionRecord]:
        """Look where a look is due; return what looks cost after the first. Every rank calls it before each step.

        Raises VerificationFailed on all ranks, naming those whose bits differ. `step_seconds` is a usual step's.
        """
        if batch.step % self._every:
            return []
        began = time.perf_counter()
        differs = self._look(stepper, batch)
        any_differs = self._world.maximum([float(bool(differs))])[0]
        found = [(rank, name) for rank, name in enumerate(self._world.gather(differs)) if name] if any_differs else []
        if found:
            rank, name = found[0]
            who = f"rank {rank}" if len(found) == 1 else f"ranks {', '.join(str(each) for each, _ in found)}"
            raise VerificationFailed(
                f"step {batch.step}: {who} computed a micro-batch twice, and the bits of {name} differ",
                f"{'its device' if len(found) == 1 else 'the device of one of them, which compute together,'} gives "
                f"other numbers for the same sums; those of the other {self._world.size - len(found)} do not",
                "take the device out of service and start again: the run resumes from the last checkpoint",
            ).naming_ranks()
        return self._cost(time.perf_counter() - began, step_seconds)

    def _cost(self, seconds: float, step_seconds: float) -> list[DecisionRecord]:
        if self._is_told or not step_seconds:
            return []
        self._is_told = True
        share = seconds / (seconds + self._every * step_seconds)
        cost = {"seconds": seconds, "step_seconds": step_seconds, "share": share}
        after = f"every {self._every} steps: {share:.2%} of the time"
        because = f"a second look at a micro-batch takes {seconds:.3g} s"
        return [DecisionRecord("recompute", None, after, because, cost)]

    def _look(self, stepper: Stepper, batch: StepBatch) -> str:
        """Return the name of the first thing whose bits differ between two passes, empty where none do."""
        model, turn = stepper.model, stepper.turns[stepper.main]
        micro, passes = batch.micro_batches[0], turn.passes
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        assert isinstance(passes, SequentialPasses), "pipelines are refused"
        watched, passes.after_forward = passes.after_forward, None
        losses: list[Any] = []
        try:
            with _gradients_seen(model) as seen:
                for _ in range(2):
                    stepper.gradients.zero()
                    loss_sum, _weight = passes.accumulate([micro], 1.0)
                    stepper.gradients.finish()
                    losses.append(loss_sum)
        finally:
            passes.after_forward = watched
            stepper.gradients.zero()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        first, second = (bits_of(float(loss)) for loss in losses)
        if first != second:
            return LOSS
        for name, prints in seen.items():
            half = len(prints) // 2
            if prints[:half] != prints[half:]:
                return f"the gradient of {name}"
        return ""


@contextmanager
def _gradients_seen(model: nn.Module) -> Iterator[dict[str, list[int]]]:
    """Give the fingerprints of the gradients that reach each weight here, in order; they are complete at the end.

    Weights are looked for as modules are called: sharded ones are whole then, and other objects than at rest.
    """
    found: dict[str, list[torch.Tensor]] = {}
    seen: dict[str, list[int]] = {}
    handles: list[Any] = []
    known: set[int] = set()

    def watch(path: str) -> Any:
        def called(module: nn.Module, *_: object) -> None:
            for key, weight in module._parameters.items():
                if weight is not None and weight.requires_grad and id(weight) not in known and torch.is_grad_enabled():
                    known.add(id(weight))
                    name = f"{path}.{key}" if path else key
                    handles.append(weight.register_hook(lambda gradient, name=name: note(name, gradient)))

        return called

    def note(name: str, gradient: torch.Tensor) -> None:
        local = local_of(gradient)
        found.setdefault(name, []).append(fingerprint(local))

    handles += [module.register_forward_pre_hook(watch(path)) for path, module in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
    seen.update({name: [int(value) for value in prints] for name, prints in found.items()})
