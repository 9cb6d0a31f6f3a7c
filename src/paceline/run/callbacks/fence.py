"""The fence around callbacks: ranks meet before each collective that a callback calls, and after each hook.

At a meeting every rank says in a number of fixed size where it is. So a collective that some ranks call and others do
not ends in an error that names them, and not in a wait for each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import ConfigError
from paceline.run.process.world import World

COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of torch's operators that communicate
WAITS = ("wait_tensor", "work_wait")  # of these, what waits for another one
DIGEST_BYTES = 6  # whole numbers up to 2^48 are exact in double precision


def meet(world: World, where: str, here: str) -> None:
    """Return once every rank has come here and says the same. Every rank calls it.

    `where` names the hook; raises ConfigError on all ranks where they are at different places.
    """
    if world.size == 1:
        return
    mine = float(int.from_bytes(hashlib.blake2b(here.encode(), digest_size=DIGEST_BYTES).digest(), "big"))
    highest, lowest = world.maximum([mine, -mine])
    if highest == -lowest:
        return
    said: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(world.gather((where, here))):
        said.setdefault(place, []).append(rank)
    ranks = "; ".join(f"{_ranks(ranks)}: {place[0]}: {place[1]}" for place, ranks in said.items())
    raise ConfigError(
        f"callbacks do not agree between ranks in {where}",
        ranks,
        "decide by what all ranks know alike, such as moment.stats, or by moment.sum and moment.gather on every rank",
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class FencedCollectives(TorchDispatchMode):
    """Within it the ranks meet before each collective."""

    def __init__(self, world: World, where: str) -> None:
        super().__init__()
        self._world, self._where = world, where

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Run an operator of torch, after a meeting where it communicates."""
        if func.namespace in COLLECTIVES and not any(name in str(func) for name in WAITS):
            meet(self._world, self._where, f"calls the collective {func.name()}")
        return func(*args, **(kwargs or {}))
