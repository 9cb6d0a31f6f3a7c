"""The questions that every environment answers about the processes it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError

Environ = Mapping[str, str]
Ranks3 = tuple[int, int, int | None]  # rank, world size, local rank, None where that is not told


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


def number_of(environ: Environ, name: str) -> int | None:
    """Return the number that a variable holds; None where it is unset or empty. Raises ConfigError for what is none."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name} = '{text}' is no number",
            "a launcher's variables tell a process its place among the others",
            f"unset {name}, or start with `paceline train`, torchrun or srun",
        ) from None
