"""Room in the host's memory: whether a copy of a run's state fits there, for all ranks of a machine."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.checkpoint.beside.stage import bytes_to_stage
from paceline.cluster.machine import available_memory_bytes
from paceline.run.process.world import World
from paceline.system.this_machine import machine_here
from paceline.units import format_sizes

SPARE = 2  # so many times the room that a copy takes must be free for one that nobody asked for


def why_not_beside(tensors: Mapping[str, torch.Tensor], world: World) -> str:
    """Return why checkpoints had better not be written beside training, or "". Every rank calls it, and they agree."""
    machine = machine_here()
    told = world.told_at(machine, {"bytes": bytes_to_stage(tensors)})[machine]
    needed, free = sum(int(item["bytes"]) for _, item in told), available_memory_bytes()
    short = world.first_told((needed, free) if SPARE * needed > free else None)
    if short is None:
        return ""
    size, room = format_sizes(*short)
    return f"the copies of a machine's ranks take {size} of host memory, of which {room} are free"
