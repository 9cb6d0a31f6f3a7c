"""What a step tells of its routers, held against one device: tokens per expert, entropy, balance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from paceline.run.loop.routing import RouterStats
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.verify.compare.difference import Difference, number_differences, tensor_differences
from paceline.verify.reference.router import BALANCE
from paceline.verify.reference.steps import ReferenceStep


def load_differences(
    stats: RouterStats | None, expected: ReferenceStep, step: int, world: World, layout: Layout
) -> list[Difference]:
    """Return how far the tokens per expert are, by router; every rank reports those of all stages."""
    counts = stats.counts if stats else ()
    loads = {name: torch.tensor(row, dtype=torch.float64) for name, row in zip(expected.router, counts, strict=True)}
    return tensor_differences("router", loads, expected.router, step, world, layout)


def routing_differences(
    stats: RouterStats | None, expected: Mapping[str, float], step: int, world: World
) -> list[Difference]:
    """Return how far each router's entropy and their mean balance loss are; compared as losses are."""
    if not expected:
        return []
    entropies = [name for name in expected if name != BALANCE]
    ours = dict.fromkeys(expected, math.nan)
    if stats is not None:
        ours |= {**dict(zip(entropies, stats.entropy, strict=True)), BALANCE: stats.balance}
    return as_losses(number_differences(ours, expected, step, world))


def told_differences(told: Mapping[str, float], expected: ReferenceStep, step: int, world: World) -> list[Difference]:
    """Return how far a journal's numbers of routers are; `told` is its record, empty where it has none."""
    if not expected.routing:
        return []
    entropies = [value for name, value in expected.routing.items() if name != BALANCE]
    loads = [each * len(each) / each.sum().clamp(min=1) for each in expected.router.values()]
    reference = {
        "entropy": sum(entropies) / len(entropies),
        "balance": expected.routing[BALANCE],
        "load_max": max(float(each.max()) for each in loads),
        "load_min": min(float(each.min()) for each in loads),
    }
    ours = {name: float(told.get(name, math.nan)) for name in reference}
    found = as_losses(number_differences(ours, reference, step, world))
    return [dataclasses.replace(each, name=f"{each.name} of routers") for each in found]


def as_losses(found: list[Difference]) -> list[Difference]:
    """Return differences of numbers that may be as far off as a loss."""
    return [dataclasses.replace(each, quantity="loss") for each in found]
