"""Metrics of held-out samples, on any layout: each rank adds up what its samples give, and all add up the ranks'.

Metrics are measured in the passes of the evaluation, where the objective has called the model: what the model returned
is kept for a moment. Built-in objectives of language models compute their loss without whole logits; metrics that
read these have a second pass, in which a micro-batch's logits exist whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.run.loop.loader import MicroBatch
from paceline.run.loop.passes import AnyObjective
from paceline.run.loop.step import Stepper
from paceline.run.process.world import World
from paceline.task.adapt.preference import REWARDS
from paceline.task.metrics.metric import LossTotal, Metric, Totals
from paceline.task.metrics.rewards import RewardsOfPairs
from paceline.task.objective import logits_of


@dataclass
class PassedBatch:
    """What the objective and the model said of the micro-batch that was passed last."""

    batch: Any = None
    outputs: object = None
    has_outputs: bool = False
    told: Any = None  # what an objective that calls the model more than once tells of it


@dataclass
class _Watching:
    """An objective that notes its batch, and what the model returns where the objective calls it last."""

    objective: AnyObjective
    seen: PassedBatch

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, object]:
        """Return what the objective returns."""
        self.seen.batch, self.seen.outputs, self.seen.has_outputs = batch, None, False
        hook = model.register_forward_hook(self._keep)
        try:
            found = self.objective(model, batch)
            self.seen.told = getattr(self.objective, "told", {}).get(REWARDS)
            return found
        finally:
            hook.remove()

    def _keep(self, module: nn.Module, arguments: object, output: object) -> None:
        self.seen.outputs, self.seen.has_outputs = output, True


@dataclass
class _LogitsAlone:
    """Stands in the place of an objective that may compute no whole logits, and notes the logits."""

    objective: AnyObjective
    logits_of: Callable[[nn.Module, Any], Tensor]
    seen: PassedBatch

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, object]:
        """Return no loss."""
        self.seen.batch, self.seen.outputs, self.seen.has_outputs = batch, self.logits_of(model, batch), True
        nothing = torch.zeros((), device=batch["labels"].device)
        return nothing, nothing


@dataclass
class Sums:
    """What metrics have added up on this rank: vectors by (number of the metric, name)."""

    metrics: Sequence[Metric]
    found: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def add(self, seen: PassedBatch, reading: bool | None) -> None:
        """Add a micro-batch, to all metrics or to those that are `reading` outputs, or not."""
        for number, metric in enumerate(self.metrics):
            if reading is None or metric.reads_outputs == reading:
                if metric.reads_outputs and not seen.has_outputs:
                    raise ConfigError(
                        "a metric reads what the model returns, and the objective did not call the model",
                        "it called parts of it",
                        "an objective that calls the model itself: model(batch)",
                    )
                outputs = seen.told if isinstance(metric, RewardsOfPairs) else seen.outputs
                for name, value in metric.measure(outputs, seen.batch).items():
                    vector = value.detach().double().reshape(-1)
                    key = (number, name)
                    self.found[key] = self.found[key] + vector if key in self.found else vector

    def over(self, world: World, counts: bool) -> list[Totals]:
        """Return the totals of each metric over all ranks. Every rank calls it; `counts`: whether its sums are new."""
        mine = {key: value.cpu() for key, value in self.found.items()} if counts else {}
        own = {key: len(value) for key, value in sorted(mine.items())}
        first = world.one_of_alike(repr(own).encode() if own else None)
        sizes: dict[tuple[int, str], int] = {}
        # Ranks that hold no outputs are told by one that does; where ranks differ, all are asked.
        for each in world.gather(own) if first is None else [world.share(own, first)]:
            for key, size in each.items():
                if sizes.setdefault(key, size) != size:
                    raise ConfigError(
                        f"a metric has {sizes[key]} and {size} numbers for '{key[1]}' on different ranks",
                        "what it returns must have one shape for all samples", "one number of classes for all",
                    )  # fmt: skip
        keys = sorted(sizes)
        flat = [number for key in keys for number in mine.get(key, torch.zeros(sizes[key])).tolist()]
        summed = np.array(world.sum(flat) if flat else [], dtype=np.float64)
        totals: list[dict[str, Any]] = [{} for _ in self.metrics]
        for (number, name), part in zip(keys, np.split(summed, np.cumsum([sizes[key] for key in keys])), strict=False):
            totals[number][name] = part
        return list(totals)


def measure(
    stepper: Stepper, batches: Sequence[MicroBatch], metrics: Sequence[Metric]
) -> tuple[float, float, Mapping[str, float]]:
    """Return (loss sum, weight, metrics by name) of held-out micro-batches over all ranks. Every rank calls it."""
    world = stepper.world
    if not metrics:
        loss_sum, weight = world.sum(list(stepper.passes.evaluate(batches)))
        return loss_sum, weight, {}
    mine, sums = _passed(stepper, batches, metrics)
    loss_sum, weight = world.sum(list(mine))
    totals, loss, values = sums.over(world, _counts(stepper)), LossTotal(loss_sum, weight), dict[str, float]()
    for metric, total in zip(metrics, totals, strict=True):
        for name, value in metric.values(total, loss).items() if weight > 0 else ():
            if name in values:
                raise ConfigError(
                    f"two metrics are called '{name}'", "the journal keeps each under its name", "another name"
                )
            values[name] = value
    return loss_sum, weight, values


def try_metrics(stepper: Stepper, batches: Sequence[MicroBatch], metrics: Sequence[Metric]) -> None:
    """Measure metrics of a few held-out samples, and drop what they give. Every rank calls it.

    Raises the error of a metric that cannot be had of these outputs and batches. What is made of the totals is not
    tried: a few samples may not be enough for it.
    """
    _, sums = _passed(stepper, batches, metrics)
    sums.over(stepper.world, _counts(stepper))


def _counts(stepper: Stepper) -> bool:
    """Return whether this rank's sums are added to the others': ranks that share a layer have the same ones."""
    return not stepper.plan.layout.coordinates(stepper.world.rank)["tp"]


def _passed(
    stepper: Stepper, batches: Sequence[MicroBatch], metrics: Sequence[Metric]
) -> tuple[tuple[float, float], Sums]:
    """Pass micro-batches forward; return this rank's loss sum and weight, and what the metrics have added up on it."""
    passes, sums, seen = stepper.passes, Sums(metrics), PassedBatch()
    without_logits = logits_of(stepper.turns[stepper.main].turn.objective) is not None
    passes.wrap_objective(lambda objective: _Watching(objective, seen))
    try:
        mine = passes.evaluate(batches, lambda: sums.add(seen, False if without_logits else None))
    finally:
        passes.wrap_objective(_unwrapped)
    if without_logits and any(metric.reads_outputs for metric in metrics):
        pass_logits(stepper, batches, lambda logits: sums.add(logits, True))
    return mine, sums


def pass_logits(stepper: Stepper, batches: Sequence[MicroBatch], then: Callable[[PassedBatch], None]) -> None:
    """Pass micro-batches of a language model forward and call `then` with the logits of each that counts here.

    Its objective is one that `logits_of` knows. Every rank calls it.
    """
    seen, passes = PassedBatch(), stepper.passes
    own = logits_of(stepper.turns[stepper.main].turn.objective)
    assert own is not None
    passes.wrap_objective(lambda objective: _LogitsAlone(objective, own, seen))
    try:
        passes.evaluate(batches, lambda: then(seen))
    finally:
        passes.wrap_objective(_unwrapped)


def _unwrapped(objective: Any) -> AnyObjective:
    """Return the objective that was wrapped."""
    found: AnyObjective = objective.objective
    return found
