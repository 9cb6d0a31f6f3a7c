"""Where a process stands among the processes of its run."""

from __future__ import annotations

from dataclasses import dataclass

FILE = "file://"  # PATH of a file of this machine in which ranks find each other
SERVED_STORE = "store://"  # HOST:PORT/PREFIX of a store that rank 0 serves
KEPT_STORE = "kept-store://"  # and of one that whoever started the ranks serves


@dataclass(frozen=True)
class Place:
    """A process's rank, its number on its node, how many there are of both, and where all meet.

    `rendezvous` is a URL as torch's `init_process_group` takes it, or one of the stores above; empty where nothing
    tells one.
    """

    rank: int
    world_size: int
    local_rank: int
    ranks_on_node: int
    rendezvous: str = ""
