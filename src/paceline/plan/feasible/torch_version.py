"""What the installed torch cannot do and a later one can, known by its version. Imports no torch.

The limits were found by trying torch 2.11 and 2.13, and by reading 2.12. A torch that is not installed refuses nothing.
"""

from __future__ import annotations

import functools
import re
from importlib import metadata

EXPERTS = (2, 12)  # FSDP2 shards the weights of one unit over different ranks (`ShardPlacementResult`)
# A backward pass by halves is right: 2.11 adds up the gradients of all outputs of a node and fails at an
# autograd.Function, and before 2.13 a weight that is used in two places may be counted twice.
HALVED_BACKWARD = (2, 13)
COMPILED_FP64 = (2, 13)  # the compiler knows that attention on a CPU computes in fp64
MIXED_STAGE_INPUTS = (2, 12)  # of what a pipeline stage is sent, some needs no gradient


@functools.cache
def installed_torch() -> tuple[int, int] | None:
    """Return the (major, minor) version of the installed torch, None where there is none."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def is_older(needed: tuple[int, int]) -> bool:
    """Return whether the installed torch is known to be older than a version."""
    installed = installed_torch()
    return installed is not None and installed < needed


def older_refusal(needed: tuple[int, int], what: str, whose: str) -> str | None:
    """Return why `what` cannot be had with the installed torch, None where it can; `whose` is what a newer one has."""
    if not is_older(needed):
        return None
    newer, installed = (".".join(map(str, version)) for version in (needed, installed_torch() or needed))
    return f"{what} needs torch {newer}, {whose}, and torch {installed} is installed"
