"""The questions that every environment answers about the processes it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Environ = Mapping[str, str]
Ranks3 = tuple[int, int, int]  # rank, world size, local rank


@dataclass(frozen=True)
class Launcher:
    """An environment that starts processes: what it tells each of them, as its variables say."""

    ranks: Callable[[Environ], Ranks3 | None]  # None outside of it
    ranks_on_node: Callable[[Environ], int | None]
    rendezvous: Callable[[Environ], str]  # a URL for `init_process_group`, empty where it tells none
    node: Callable[[Environ], int | None]  # the number of this process's machine, None where it tells none
    peer: Callable[[Environ], str]  # the name of another machine than the first, empty where it tells none
    variables: tuple[str, ...] = ()  # what a process that makes a world of its own must not see
    prefixes: tuple[str, ...] = ()  # the beginnings of more of them
