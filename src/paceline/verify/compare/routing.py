"""What a step tells of its routers, held against one device: tokens per expert, entropy, balance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from paceline.run.loop.routing import RouterStats
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.verify.compare.difference import Difference, MeasuredHere
from paceline.verify.compare.measures import ReadTensors, measured_numbers, measured_tensors, number_differences
from paceline.verify.reference.router import BALANCE
from paceline.verify.reference.steps import ReferenceStep


def measured_loads(stats: RouterStats | None, expected: ReadTensors, step: int, layout: Layout) -> list[MeasuredHere]:
    """Return how far the tokens per expert are, by router; every rank reports those of all stages."""
    counts = stats.counts if stats else ()
    loads = {name: torch.tensor(row, dtype=torch.float64) for name, row in zip(expected, counts, strict=True)}
    return [measured_tensors("router", loads, expected, step, layout)] if expected else []


def measured_routing(stats: RouterStats | None, expected: Mapping[str, float], step: int) -> list[MeasuredHere]:
    """Return how far each router's entropy and their mean balance loss are; compared as losses are."""
    if not expected:
        return []
    entropies = [name for name in expected if name != BALANCE]
    ours = dict.fromkeys(expected, math.nan)
    if stats is not None:
        ours |= {**dict(zip(entropies, stats.entropy, strict=True)), BALANCE: stats.balance}
    return [measured_numbers(ours, expected, step).told_as(quantity="loss", of_routers=True)]


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
    """Return differences of numbers told of routers, which may be as far off as a loss."""
    return [dataclasses.replace(each, quantity="loss", of_routers=True) for each in found]
