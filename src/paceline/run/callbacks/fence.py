"""The fence around callbacks: ranks meet before each collective that a callback calls, and after each hook.

At a meeting every rank says in a number of fixed size where it is. So a collective that some ranks call and others do
not ends in an error that names them, and not in a wait for each other; and so does a hook that writes weights, or
settings of the optimizer, on some ranks alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.errors import ConfigError
from paceline.run.callbacks.written import WrittenState, written_arguments
from paceline.run.process.world import World

COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of torch's operators that communicate
WAITS = ("wait_tensor", "work_wait")  # of these, what waits for another one
# Of these, to which all ranks bring tensors of one shape and kind; a `reduce_scatter_` may leave more to one rank.
ALIKE = ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_")
DIGEST_BYTES = 6  # whole numbers up to 2^48 are exact in double precision


def meet(world: World, where: str, here: str, wrote: str = "", holds: Callable[[], str] = str) -> None:
    """Return once every rank has come here and says the same. Every rank calls it.

    `where` names the hook. What a rank `wrote` is the same on all ranks that hold the same, as `holds()` says. Raises
    ConfigError on all ranks where they are at different places.
    """
    if world.size == 1:
        return
    said = f"{where}\0{here}\0{wrote}" if wrote else here
    mine = float(int.from_bytes(hashlib.blake2b(said.encode(), digest_size=DIGEST_BYTES).digest(), "big"))
    highest, lowest = world.maximum([mine, -mine])
    if highest == -lowest:
        return
    told = world.gather((where, here, wrote, holds()))
    places = [(where, here) for where, here, _, _ in told]
    if len(set(places)) == 1:
        if len({(wrote, held) for _, _, wrote, held in told}) == len({held for _, _, _, held in told}):
            return  # each kind of rank wrote one thing
        places = [(where, wrote or "writes nothing") for where, _, wrote, _ in told]
    by_place: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        by_place.setdefault(place, []).append(rank)
    ranks = "; ".join(f"{_ranks(ranks)}: {place[0]}: {place[1]}" for place, ranks in by_place.items())
    raise ConfigError(
        f"callbacks do not agree between ranks in {where}",
        ranks,
        "decide by what all ranks know alike, such as moment.stats, or by moment.sum and moment.gather on every rank",
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class FencedCollectives(TorchDispatchMode):
    """Within it the ranks meet before each collective, and what is written of the run's state is noted."""

    def __init__(self, world: World, where: str, state: WrittenState | None) -> None:
        """`state` is None where there is one rank."""
        super().__init__()
        self._world, self._where, self._state = world, where, state

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Run an operator of torch, after a meeting where it communicates."""
        if self._state is None:
            return func(*args, **(kwargs or {}))
        if func.namespace not in COLLECTIVES:
            if written_arguments(func):
                self._state.note(func, args, kwargs or {})
        elif not any(name in str(func) for name in WAITS):
            meet(self._world, self._where, f"calls the collective {collective_told(func, args)}")
        return func(*args, **(kwargs or {}))


def collective_told(func: Any, args: tuple[Any, ...]) -> str:
    """Return a collective by name, with what every rank must bring alike."""
    name = str(func.name())
    if func.overloadpacket.__name__ not in ALIKE:
        return name
    tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    return f"{name} of {', '.join(f'{str(each.dtype)[6:]} {list(each.shape)}' for each in tensors)}"
