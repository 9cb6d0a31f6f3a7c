"""The random numbers of one rank of a run, as its plan asks for."""

from __future__ import annotations

import warnings

from torch import nn

from paceline.run.numerics.randomness.mode import SampleRandomness, Survey, stray_error
from paceline.run.numerics.randomness.shares import RankPart
from paceline.run.process.world import World
from paceline.said import OwnWarning
from paceline.spec.plan import Plan

LIBRARIES = ("torch", "transformers", "paceline")


def is_of_library(model: nn.Module) -> bool:
    """Return whether all code of a model's forward pass is transformers', torch's or ours: it draws from the first
    forward pass on, or never, as its config says.
    """
    return all(
        type(module).__module__.partition(".")[0] in LIBRARIES and "forward" not in vars(module)
        for module in model.modules()
    )


def sample_randomness(seed: int, plan: Plan, world: World, looked: Survey) -> SampleRandomness:
    """Return what stands in for torch's random operators on this rank.

    Raises ConfigError where a program's random numbers belong to no sample and several devices train it: they would
    draw different ones. On one device they repeat, but follow the micro-batch; that is a warning.
    """
    layout = plan.layout
    alone = layout.devices == 1
    if looked.strays and not alone:
        raise stray_error(looked.strays)
    if looked.strays and plan.accumulation > 1:
        warnings.warn(f"random numbers follow the micro-batch: {'; '.join(looked.strays)}", OwnWarning, stacklevel=2)
    place = layout.coordinates(world.rank)
    part = RankPart(place["cp"], layout.cp, place["tp"], layout.tp)
    return SampleRandomness(seed, world.device, looked, part, strict=not alone)
