"""Room in the host's memory: what a copy of a run's state takes there, for all ranks of a machine."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch

from paceline.checkpoint.beside.stage import bytes_to_stage
from paceline.run.process.world import World


def copies_on_this_machine(tensors: Mapping[str, torch.Tensor], world: World) -> int:
    """Return the bytes of the copies that all ranks of this machine make of what they hold. Every rank calls it."""
    of_ranks = world.gather((platform.node(), bytes_to_stage(tensors)))
    return sum(size for machine, size in of_ranks if machine == platform.node())
