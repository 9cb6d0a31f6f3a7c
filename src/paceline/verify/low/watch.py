"""The watch of a layout in low precision: formats of what travels, is added up and rests, and what ranks decide."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from paceline.run.assemble import Assembled
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.passes import Objective
from paceline.run.loop.step import StepStats
from paceline.run.numerics.invariants import numbers_of
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.task.models.moe import routers
from paceline.verify.compare.difference import Difference
from paceline.verify.low.reference import MASTER, Expected
from paceline.verify.low.wire import ReductionsSeen, held_in_less


class Watch:
    """Runs steps of a layout and looks at formats and decisions."""

    def __init__(self, built: Assembled, plan: Plan, world: World, expected: Expected) -> None:
        self.built, self.plan, self.world, self.expected = built, plan, world, expected
        self._overflows = False
        self._losses: set[torch.dtype] = set()
        self._chosen: list[int] = []
        self._wire = ReductionsSeen(MASTER, _tensor_ranks(plan.layout, world.rank))
        for router in routers(built.model).values():
            router.register_forward_hook(self._keep_choice)
        if not expected.coupled:  # such an objective is told apart by its class
            built.stepper.wrap_objectives(self._seen)

    def _seen(self, objective: Objective) -> Objective:
        def seen(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
            loss_sum, weight = objective(model, batch)
            self._losses.add(loss_sum.dtype)
            if self._overflows and loss_sum.requires_grad:
                loss_sum.register_hook(lambda gradient: gradient * math.inf)
            return loss_sum, weight

        return seen

    def _keep_choice(self, router: nn.Module, args: Any, output: Any) -> None:
        self._chosen.append(hash(tuple(output[2].flatten().tolist())))

    def step(self, stream: BatchStream, step: int, lr: float) -> StepStats:
        """Make a step, seen by the watch."""
        self._chosen.clear()
        with self._wire:
            return self.built.stepper.step(stream.at((step - 1) * self.plan.batch_samples), lr)

    def formats(self, step: int) -> list[Difference]:
        """Return what is in a format of fewer bits than one device has it in, on any rank, in order of cause."""
        least = torch.finfo(self.expected.loss_dtype).bits
        small = {dtype for dtype in self._losses if torch.finfo(dtype).bits < least}
        mine = [("the sum of losses", str(dtype)) for dtype in sorted(small, key=str)]
        held = held_in_less(self.built.model, self.built.optimizer, MASTER, self.expected.state_bits)
        mine += [(found.what, str(found.dtype)) for found in held]
        if not self.expected.coupled:  # rows that see each other are added up in the format of their activations
            mine += sorted((found.what, str(found.dtype)) for found in self._wire.wrong)
        return [
            _wrong("dtype", f"{what} is in {dtype}, not {MASTER}", step, rank)
            for rank, found in enumerate(self.world.gather(mine))
            for what, dtype in found
        ]

    def decisions(self, stats: StepStats, step: int) -> list[Difference]:
        """Return the decisions that ranks have not taken alike."""
        scaler = self.built.stepper.scaler
        mine: dict[str, Any] = {**numbers_of(stats, scaler.scale if scaler else None)}
        mine["the clean steps of the loss scale"] = scaler.clean_steps if scaler else 0
        everyone = self.world.gather({name: repr(value) for name, value in mine.items()})
        wrong = [(name, r) for r, other in enumerate(everyone) for name in other if other[name] != everyone[0][name]]
        # Ranks that differ by their place on `tp` alone route the same tokens.
        places = [{**self.plan.layout.coordinates(rank), "tp": 0} for rank in range(self.world.size)]
        choices = self.world.gather(list(self._chosen))
        wrong += [
            ("the experts that tokens go to", rank)
            for rank, chosen in enumerate(choices)
            if chosen != choices[places.index(places[rank])]
        ]
        return [_wrong("decision", f"{name}: ranks do not agree", step, rank) for name, rank in wrong]

    def overflow(self, stream: BatchStream, step: int, lr: float) -> list[Difference]:
        """Let gradients of one rank overflow, and return what the ranks have not decided alike: all must skip."""
        if self.expected.coupled:
            return []
        layout = self.plan.layout
        # The ranks of the last pipeline stage have the loss. Not the first of them: what only it knows would not show.
        last = [rank for rank in range(self.world.size) if layout.coordinates(rank)["pp"] == layout.pp - 1]
        self._overflows = self.world.rank == last[-1]
        stats = self.step(stream, step, lr)
        self._overflows = False
        wrong = self.decisions(stats, step)
        if not wrong and any(self.world.gather(stats.updated)):
            wrong = [_wrong("decision", "an overflow changed weights", step, 0)]
        return wrong


def _wrong(quantity: str, name: str, step: int, rank: int) -> Difference:
    return Difference(quantity, name, step, rank, math.inf, math.nan, 0.0, 0.0)


def _tensor_ranks(layout: Layout, rank: int) -> list[int]:
    """Return the ranks that differ from a rank by their place on `tp` alone; none where it is the only one."""
    place = {**layout.coordinates(rank), "tp": 0}
    ranks = [other for other in range(layout.devices) if {**layout.coordinates(other), "tp": 0} == place]
    return ranks if len(ranks) > 1 else []
