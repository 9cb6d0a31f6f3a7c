"""An objective for every mistake of the catalogue: `planted_objective:NAME` is its case's, and plants the mistake.

A rank of a proof loads the objective that its spec names. Loading it from here changes the rank's own process, and
undoes what was planted before, since a process proves several plans. Outside of ranks nothing is planted but changes of
the source, which all processes of a proof have: those that compute alone too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import planted_models
import pytest
import torch
import torch.distributed as dist

from paceline.run.process.world import World
from paceline.task.objective import next_token

IN_PROOF = Path(sys.argv[0]).parts[-2:] == ("process", "worker.py")
_PATCH = pytest.MonkeyPatch()
_PLANTED = [""]  # the name of what is in place


def __getattr__(name: str) -> Any:
    from catalogue import BY_NAME, CASES

    if name not in BY_NAME:
        raise AttributeError(name)
    if (dist.is_initialized() or IN_PROOF) and _PLANTED[0] != name:
        _PATCH.undo()
        _PLANTED[0] = ""
        if dist.is_initialized() or getattr(BY_NAME[name].plant, "is_source", False):
            rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            BY_NAME[name].plant(_PATCH, World(rank, ranks, rank, torch.device("cpu")))
            _PLANTED[0] = name
    named = CASES[BY_NAME[name].case].objective
    return getattr(planted_models, named) if named else next_token
