"""Where a process stands among the processes of its run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A process's rank, its number on its node, how many there are of both, and where all meet.

    `rendezvous` is a URL as torch's `init_process_group` takes it, empty where nothing tells one.
    """

    rank: int
    world_size: int
    local_rank: int
    ranks_on_node: int
    rendezvous: str = ""
