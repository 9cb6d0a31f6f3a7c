"""An objective for every mistake of the catalogue: `planted_objective:NAME` is its case's, and plants the mistake.

A rank of a proof loads the objective that its spec names. Loading it from here changes the rank's own process, and
undoes what was planted before, since a process proves several plans. Outside of ranks nothing is planted.
"""

from __future__ import annotations

from typing import Any

import planted_models
import pytest
import torch
import torch.distributed as dist

from paceline.run.process.world import World
from paceline.task.objective import next_token

_PATCH = pytest.MonkeyPatch()
_PLANTED = [""]  # the name of what is in place


def __getattr__(name: str) -> Any:
    from catalogue import BY_NAME, CASES

    if name not in BY_NAME:
        raise AttributeError(name)
    if dist.is_initialized() and _PLANTED[0] != name:
        _PATCH.undo()
        rank = dist.get_rank()
        BY_NAME[name].plant(_PATCH, World(rank, dist.get_world_size(), rank, torch.device("cpu")))
        _PLANTED[0] = name
    named = CASES[BY_NAME[name].case].objective
    return getattr(planted_models, named) if named else next_token
