"""Tiers: where a run's checkpoints go, and how often to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.checkpoint import KeptPlan
from paceline.checkpoint.beside.flight import SaveTo
from paceline.checkpoint.tiers.retention import Retention
from paceline.checkpoint.tiers.unchanged import Unchanged
from paceline.errors import StorageError
from paceline.run.loop.resume import RunIdentity, checkpoint_root
from paceline.run.process.world import World
from paceline.run.record.recorder import Recorder, SilentRecorder
from paceline.run.survive.saving.intervals import Cadence
from paceline.run.survive.saving.memory_tier import (
    clear_memory_roots,
    hold_memory_root,
    make_memory_root,
    memory_root,
    remove_memory_root,
    why_no_memory_tier,
)
from paceline.run.survive.saving.peers import PeerCopies, meet_peers

DISK, MEMORY = "disk", "memory"
IN_PEERS = "copies in the memory of two nodes"  # as decisions call it


@dataclass(frozen=True)
class Tier:
    """A place of checkpoints."""

    name: str
    to: SaveTo

    @property
    def told(self) -> str | None:
        """What the journal calls the tier: nothing where it is the run's directory."""
        return None if self.name == DISK else self.name


class Tiers:
    """The tiers of a run: its directory, and the machine's memory where that is asked for and has the room.

    Whether the memory has the room is found out when the first checkpoint is due there. Where both tiers are due, the
    memory is saved before the disk: it takes less time.
    """

    def __init__(
        self,
        run: RunIdentity,
        record: Recorder | SilentRecorder,
        fence: Callable[[], None] | None,
        cadences: Mapping[str, Cadence],
        has_memory: bool | None = None,
    ) -> None:
        """`has_memory` is whether the memory took checkpoints in the world before, where that is known."""
        self._run, self._record, self._fence, self._kept = run, record, fence, KeptPlan()
        self.cadences = cadences  # of DISK and MEMORY
        self.has_memory = has_memory
        self._memory: Tier | None = None
        self._unchanged = Unchanged()  # on disk
        known = memory_root(run.dir)
        self._hold = hold_memory_root(known) if known else None  # for as long as this process lives
        self.disk = self._on_disk(known)
        if isinstance(record, Recorder) and (removed := clear_memory_roots()):
            because = "the runs that these folders held the memory for are gone"
            record.decided("memory", ", ".join(removed), "removed", because)

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due in any tier after the step."""
        return any(cadence.is_due(step) for cadence in self.cadences.values())

    def ready(self, step: int, tensors: Mapping[str, torch.Tensor], world: World) -> list[Tier]:
        """Return the tiers in which a checkpoint is due after the step, the fastest first. Every rank calls it."""
        if self._memory is None and self.cadences[MEMORY].is_due(step):
            self._open_memory(tensors, world)
        return [
            tier for tier in (self._memory, self.disk) if tier is not None and self.cadences[tier.name].is_due(step)
        ]

    def of(self, to: SaveTo) -> Tier:
        """Return the tier whose place that is."""
        return self._memory if self._memory is not None and self._memory.to is to else self.disk

    def memory(self, tensors: Mapping[str, torch.Tensor], world: World) -> Tier | None:
        """Return the memory tier, opened if need be; None where there is no room for it. Every rank calls it."""
        if self._memory is None:
            self._open_memory(tensors, world)
        return self._memory

    def with_peers(self) -> None:
        """Note that copies go to the memory of other nodes, and tell that where the world before did without them."""
        if self.has_memory is False:
            because = "checkpoints are written beside training by now"
            self._record.decided("checkpoint", "disk alone", IN_PEERS, because)
        self.has_memory = True

    def without_peers(self) -> None:
        """Do without copies in the memory of other nodes: training would wait for them."""
        if self._memory is not None and self._memory.to.saver is not None:
            because = "they are sent beside training, and checkpoints are written while it waits"
            if self.has_memory is not False:
                self._record.decided("checkpoint", IN_PEERS, "disk alone", because)
            self.has_memory = False
            self.cadences[MEMORY].every_steps = self._memory = None

    def close(self) -> None:
        """Give the memory back: the run's state is on disk."""
        remove_memory_root(self._run.dir)
        self._memory = self._hold = None

    def _open_memory(self, tensors: Mapping[str, torch.Tensor], world: World) -> None:
        peers = meet_peers(world, self._run.spec.cluster.nodes_per_rack)
        if peers is not None:
            self._memory = Tier(MEMORY, SaveTo(self.disk.to.root, 1, saver=PeerCopies(peers).save))
            return
        because, root = world.share(self._place(why_no_memory_tier(tensors, world), world.is_first))
        if root is None:
            if self.has_memory is not False:  # else it was told of the world before
                self._record.decided("checkpoint", "memory and disk", "disk alone", because)
            self.has_memory, self.cadences[MEMORY].every_steps = False, None
            return
        if self.has_memory is False:
            because = "the machine's memory has the room for them by now"
            self._record.decided("checkpoint", "disk alone", "memory and disk", because)
        self.has_memory = True
        self._hold = hold_memory_root(root)
        to = SaveTo(root, 1, self._kept, self._fence, (self.disk.to.root,))
        self._memory = Tier(MEMORY, to)
        self.disk = self._on_disk(root)

    def _on_disk(self, memory: Path | None) -> Tier:
        beside = () if memory is None else (memory,)
        root = checkpoint_root(self._run.dir)
        asked = self._run.spec.run
        retention = Retention(asked.keep_last, asked.checkpoints.keep_for, asked.checkpoints.keep_best)
        return Tier(DISK, SaveTo(root, retention, self._kept, self._fence, beside, self._unchanged))

    def _place(self, because: str, is_first: bool) -> tuple[str, Path | None]:
        """Return why there is no folder in memory, or the folder, made by rank 0."""
        if because or not is_first:
            return because, None
        try:
            return "", make_memory_root(self._run.dir)
        except StorageError as error:
            return f"{error.what}: {error.because}", None
