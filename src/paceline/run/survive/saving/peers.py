"""Copies of a rank's own part of the state in the memory of two nodes: of its own, and of a peer on another one.

A node that is lost takes its ranks and its memory along, and the other nodes still hold all between them. Each part is
a file in the RAM disk (pieces.py), in a folder that the node's supervisor gives and removes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.checkpoint import CheckpointInfo, Snapshot
from paceline.checkpoint.ranks import Ranks
from paceline.errors import StorageError
from paceline.run.process.world import World
from paceline.run.survive.saving.pieces import from_bytes, name_of, to_bytes
from paceline.supervise.nodes.held_in_memory import PIECES_VARIABLE
from paceline.supervise.parent import NODE_VARIABLE


@dataclass(frozen=True)
class Peers:
    """Where the parts of a world's ranks go: `to[rank]` is the rank on another node that keeps a copy."""

    rank: int
    to: tuple[int, ...]

    @property
    def of(self) -> tuple[int, ...]:
        """The ranks of which this one keeps a copy."""
        return tuple(rank for rank, peer in enumerate(self.to) if peer == self.rank)


def peers_of(nodes: Sequence[int], nodes_per_rack: int = 0) -> tuple[int, ...]:
    """Return which rank keeps a copy of each rank's part, given the node of every rank.

    It is one of the next node's; of the next rack's, where there are several racks. Each node keeps about as much as
    any other.
    """
    known = sorted(set(nodes))
    ranks = {node: [rank for rank, of in enumerate(nodes) if of == node] for node in known}
    shift = nodes_per_rack if 0 < nodes_per_rack < len(known) else 1
    found = []
    for rank, node in enumerate(nodes):
        there = ranks[known[(known.index(node) + shift) % len(known)]]
        found.append(there[ranks[node].index(rank) % len(there)])
    return tuple(found)


def meet_peers(world: World, nodes_per_rack: int = 0) -> Peers | None:
    """Return the peers of a world on several nodes, or None where it is on one. Every rank calls it."""
    node = int(os.environ.get(NODE_VARIABLE, "-1")) if PIECES_VARIABLE in os.environ else -1
    highest, least_turned = world.maximum([float(node), -float(node)])
    if least_turned == 1 or highest == -least_turned:
        return None
    return Peers(world.rank, peers_of(world.gather(node), nodes_per_rack))


class PeerCopies:
    """Keeps this rank's part, and those of its peers, in this node's memory: the newest that all ranks have kept."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self._folder = peers, Path(os.environ[PIECES_VARIABLE])

    def save(self, taken: Snapshot, group: dist.ProcessGroup | None) -> CheckpointInfo:
        """Keep a snapshot in two memories, and let go of older ones. Every rank of the group calls it, beside training.

        Raises StorageError on all ranks where any of them fails; what was kept before is then still there.
        """
        assert group is not None, "a world on several nodes has several ranks"
        began, ranks = time.perf_counter(), Ranks(group, False)
        what = f"the state after step {taken.step} was not kept in the nodes' memory"
        mine = to_bytes(taken)
        sizes = ranks.settle(what, lambda: len(mine), lambda found: [found] * len(found))
        theirs = {rank: torch.empty(sizes[rank], dtype=torch.uint8) for rank in self._peers.of}
        try:
            self._exchange(mine, theirs, group)
        except RuntimeError as error:
            raise StorageError(what, "a rank stopped answering") from error
        world = len(self._peers.to)

        def keep() -> None:
            for rank, content in {self._peers.rank: mine, **theirs}.items():
                self._write(name_of(taken.step, rank, world), content)

        ranks.attempt(what, keep)
        self._forget_but(taken.step, world)
        return CheckpointInfo(self._folder, sum(sizes), time.perf_counter() - began)

    def _exchange(self, mine: torch.Tensor, theirs: dict[int, torch.Tensor], group: dist.ProcessGroup) -> None:
        # The receiving side first: two that send to each other wait for one another otherwise.
        under_way = [dist.irecv(content, src=rank, group=group) for rank, content in theirs.items()]
        under_way.append(dist.isend(mine, dst=self._peers.to[self._peers.rank], group=group))
        for work in under_way:
            if work is not None:
                work.wait()

    def _write(self, name: str, content: torch.Tensor) -> None:
        unfinished = self._folder / f".{name}-{os.getpid()}"
        try:
            with unfinished.open("wb") as file:
                file.write(content.numpy().data)
            unfinished.replace(self._folder / name)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise StorageError(f"cannot keep a part of the state in {self._folder}", str(error)) from error

    def _forget_but(self, step: int, world: int) -> None:
        """Remove the older files of this rank and its peers: all ranks have kept the newer ones."""
        kept = {name_of(step, rank, world) for rank in range(world)}
        for path in self._folder.glob("step-*"):
            if path.name not in kept:
                path.unlink(missing_ok=True)


def read_pieces(paths: Sequence[str]) -> Snapshot:
    """Return what some pieces of one step hold together. Raises StorageError."""
    found = [from_bytes(Path(path)) for path in paths]
    values = {part: value for one in found for part, value in one.values.items()}
    return Snapshot(found[0].step, values, found[0].extra)
