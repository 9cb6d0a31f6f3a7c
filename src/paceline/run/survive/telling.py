"""How a run tells the error of a rank: exhausted memory by what holds the memory, a lost peer by the peer's error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from paceline.errors import ExhaustedTogether, OutOfMemory, exhausted_by
from paceline.run.memory.exhausted import tell_peers, told_by_peer, told_together
from paceline.run.process.groups import abort_groups
from paceline.run.process.world import World
from paceline.run.survive.survivor import is_lost_peer
from paceline.supervise.supervisor import is_supervised


class OfMemory(Protocol):
    """Makes the error of an exhausted memory, with what this rank knows; `save_step` is the step of a failed save."""

    def __call__(self, exhausted: BaseException, save_step: int | None = None) -> OutOfMemory: ...


def as_told(error: BaseException, world: World, of_memory: OfMemory) -> BaseException:
    """Return an error of this rank as the run tells it: memory that is exhausted with what it was spent on.

    Where no supervisor of ours hears of a peer's, this rank that has lost the peer says the same. What a call found no
    memory for on which ranks agree comes to every rank, and each tells what that one rank knows.
    """
    if is_lost_peer(error) and not is_supervised():
        return told_by_peer() or error
    together = error if isinstance(error, ExhaustedTogether) else None
    if together and (together.rank != world.rank or together.__cause__ is None):
        return told_together(together, None, world)
    if (exhausted := exhausted_by((together and together.__cause__) or error)) is None:
        return error
    save_step = together.save_step if together else None
    told = of_memory(exhausted, save_step)
    if together and save_step is None:
        return told_together(together, told, world)
    tell_peers(told)
    return told


def let_peers_go(told: BaseException, error: BaseException) -> None:
    """Leave peers of a rank that is out of memory in no collective, where no supervisor of ours ends them.

    Those that have agreed on it are in none.
    """
    have_agreed = isinstance(error, ExhaustedTogether) and error.save_step is None
    if isinstance(told, OutOfMemory) and not have_agreed and not is_supervised():
        abort_groups()


@contextlib.contextmanager
def telling(world: World, of_memory: OfMemory) -> Iterator[None]:
    """Return a block whose errors are told as those of a step are: a loop of the user's may call what it does."""
    try:
        yield
    except Exception as error:  # a user's model may raise anything
        told = as_told(error, world, of_memory)
        let_peers_go(told, error)
        if told is error:
            raise
        raise told from error
