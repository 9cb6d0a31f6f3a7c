"""Copies of a rank's part of the state in the memory of two nodes: the rank's own node, and the node of a peer.

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
    """Who keeps what: the rank `to`, on another node, a copy of this rank's part; this rank the copies of `of`."""

    rank: int
    to: int
    of: tuple[int, ...]
    world: int


def nodes_beside(nodes: Sequence[int], node: int, nodes_per_rack: int = 0) -> tuple[int, int]:
    """Return the node that keeps copies of one node's parts, and the node whose copies that one keeps.

    They are the next node and the one before; of the next rack and the one before, where there are several racks. So
    each node keeps about as much as any other.
    """
    at, shift = nodes.index(node), nodes_per_rack if 0 < nodes_per_rack < len(nodes) else 1
    return nodes[(at + shift) % len(nodes)], nodes[(at - shift) % len(nodes)]


def peers_of(rank: int, here: Sequence[int], after: Sequence[int], before: Sequence[int], world: int) -> Peers:
    """Return a rank's peers, given the ranks of its node, of the one that keeps its copy and of the one it keeps."""
    of = tuple(other for number, other in enumerate(before) if here[number % len(here)] == rank)
    return Peers(rank, after[here.index(rank) % len(after)], of, world)


def meet_peers(world: World, nodes_per_rack: int = 0) -> Peers | None:
    """Return the peers of a world on several nodes, or None where it is on one. Every rank calls it."""
    node = int(os.environ.get(NODE_VARIABLE, "-1")) if PIECES_VARIABLE in os.environ else -1
    return met_on(world, node, nodes_per_rack)


def met_on(world: World, node: int, nodes_per_rack: int = 0) -> Peers | None:
    """Return the peers of this rank on a node, or None where all ranks are on one. Every rank calls it.

    Ranks count how many of them each node has, one number a node; those of three nodes tell each other who they are.
    """
    highest, least_turned = world.maximum([float(node), -float(node)])
    if least_turned == 1 or highest == -least_turned:
        return None
    counts = world.sum([float(node == number) for number in range(int(highest) + 1)])
    nodes = [number for number, ranks in enumerate(counts) if ranks]
    after, before = nodes_beside(nodes, node, nodes_per_rack)
    told = world.told_at(str(node), {}, (str(after), str(before)))
    ranks = {place: [rank for rank, _ in there] for place, there in told.items()}
    return peers_of(world.rank, ranks[str(node)], ranks[str(after)], ranks[str(before)], world.size)


class PeerCopies:
    """Keeps this rank's part, and those of its peers, in this node's memory: the newest that all ranks have kept."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self._folder = peers, Path(os.environ[PIECES_VARIABLE])

    def save(self, taken: Snapshot, group: dist.ProcessGroup | None) -> CheckpointInfo:
        """Keep a snapshot in two memories, and let go of older ones. Every rank of the group calls it, beside training.

        Raises on all ranks where any of them fails: StorageError, or ExhaustedTogether where one has no memory for it.
        What was kept before is then still there.
        """
        assert group is not None, "a world on several nodes has several ranks"
        what = f"the state after step {taken.step} was not kept in the nodes' memory"
        try:
            return self._save(taken, group, what)
        except RuntimeError as error:  # torch has no narrower type for a lost peer
            raise StorageError(what, "a rank stopped answering") from error

    def _save(self, taken: Snapshot, group: dist.ProcessGroup, what: str) -> CheckpointInfo:
        began, ranks = time.perf_counter(), Ranks(group, False)
        mine = ranks.attempt(what, lambda: to_bytes(taken))
        lengths = {rank: torch.zeros(1, dtype=torch.int64) for rank in self._peers.of}
        self._exchange(torch.tensor([len(mine)]), lengths, group)
        sizes = {rank: int(length) for rank, length in lengths.items()}
        theirs = ranks.attempt(what, lambda: {of: torch.empty(size, dtype=torch.uint8) for of, size in sizes.items()})
        self._exchange(mine, theirs, group)
        world = self._peers.world

        def keep() -> None:
            for rank, content in {self._peers.rank: mine, **theirs}.items():
                self._write(name_of(taken.step, rank, world), content)

        ranks.attempt(what, keep)
        self._forget_but(taken.step, world)
        return CheckpointInfo(self._folder, ranks.total([len(mine)])[0], time.perf_counter() - began)

    def _exchange(self, mine: torch.Tensor, theirs: dict[int, torch.Tensor], group: dist.ProcessGroup) -> None:
        # The receiving side first: two that send to each other wait for one another otherwise.
        under_way = [dist.irecv(content, src=rank, group=group) for rank, content in theirs.items()]
        under_way.append(dist.isend(mine, dst=self._peers.to, group=group))
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
