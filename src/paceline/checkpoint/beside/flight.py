"""A save that goes on in a thread beside training, on a process group of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.save import CheckpointInfo, Written, giving_up, publish, write
from paceline.checkpoint.save_plan import KeptPlan
from paceline.checkpoint.snapshot import Snapshot
from paceline.checkpoint.tiers.retention import Retention
from paceline.checkpoint.tiers.unchanged import Unchanged
from paceline.errors import ExhaustedTogether, StorageError
from paceline.patience import Patience

LOOK_SECONDS = 0.25  # between two looks at the load, while a save is waited for


@dataclass(frozen=True)
class SaveTo:
    """Where a save goes and what belongs to it: the same for every save of a training."""

    root: Path
    keep_last: int | Retention
    kept: KeptPlan = field(default_factory=KeptPlan)
    fence: Callable[[], None] | None = None
    beside: tuple[Path, ...] = ()  # roots of the other tiers
    unchanged: Unchanged = field(default_factory=Unchanged)
    # What saves there in another way than as a checkpoint's files: given a snapshot and the group of all ranks.
    saver: Callable[[Snapshot, dist.ProcessGroup | None], CheckpointInfo] | None = None


@dataclass(frozen=True)
class SaveOutcome:
    """What became of a save to one place: the checkpoint or the error, and the seconds from the snapshot on."""

    to: SaveTo
    seconds: float
    info: CheckpointInfo | None = None
    error: BaseException | None = None

    @property
    def has_lost_a_peer(self) -> bool:
        """Whether the save failed because a rank stopped answering: the group cannot be used again."""
        found = getattr(self.error, "__cause__", None)
        return isinstance(found, RuntimeError) and not isinstance(self.error, ExhaustedTogether)


class StateToSave(Protocol):
    """The state of a step, which comes to the thread that writes it."""

    @property
    def step(self) -> int:
        """The step."""

    @property
    def device_seconds(self) -> float:
        """How long training on a device waited for a copy, when that is known."""

    def arrived(self) -> Snapshot:
        """Return the state when all of it is there."""


class SaveInFlight:
    """A save under way, to one place after the other; `outcomes` has what became of it where it has ended.

    Every rank starts one, with its own state of one step, and no other save runs on their group meanwhile.
    The thread ends with the process, wherever it hangs.
    """

    def __init__(
        self, to: Sequence[SaveTo], staged: StateToSave, group: dist.ProcessGroup | None, limit_seconds: float
    ) -> None:
        self.step, self.staged, self.group = staged.step, staged, group
        self.outcomes: list[SaveOutcome] = []
        self._to, self._limit_seconds, self._patience = to, limit_seconds, Patience(limit_seconds)
        self._abandoned, self._began = False, time.perf_counter()
        self._ended = threading.Event()  # Python 3.11 takes a thread for ended whose join() was interrupted
        threading.Thread(target=self._run, name="paceline-save", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether the save has not ended."""
        return not self._ended.is_set()

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for the save any more: it publishes nothing."""
        return self._abandoned

    @property
    def age_seconds(self) -> float:
        """How long ago the save began."""
        return time.perf_counter() - self._began

    def wait(self, is_vain: Callable[[], bool] = lambda: False) -> bool:
        """Return whether the save ended within its limit; wait for it until then, or until that `is_vain`.

        One that was given up is not waited for.
        """
        while self.is_running and not (self._abandoned or self._patience.is_over or is_vain()):
            self._ended.wait(LOOK_SECONDS)
        return not self.is_running

    def go_on(self) -> None:
        """Give the save its limit once more, from now on: it is slow, and does not hang."""
        self._patience = Patience(self._limit_seconds)

    def abandon(self, seconds: float) -> None:
        """Have the save end without a checkpoint: peers that may be dead are waited for no longer.

        The thread has so many seconds to end, once.
        """
        if self._abandoned:
            return
        self._abandoned = True
        if self.is_running and self.group is not None:
            self.group.abort()
        patience = Patience(seconds)
        while self.is_running and not patience.is_over:
            self._ended.wait(LOOK_SECONDS)

    def _run(self) -> None:
        taken: Snapshot | None = None
        for to in self._to:
            try:
                taken = taken or self._arrived(to)
                info = self._save(to, taken)
                self.outcomes.append(SaveOutcome(to, self.age_seconds, info))
            except BaseException as error:  # whoever asks for the outcome gets it
                self.outcomes.append(SaveOutcome(to, self.age_seconds, error=error))
        self._ended.set()

    def _arrived(self, to: SaveTo) -> Snapshot:
        waiting = Written(to.root, self.step, Ranks(self.group, self.group is None))
        with giving_up(waiting):
            return waiting.ranks.attempt(waiting.what, self.staged.arrived)

    def _save(self, to: SaveTo, taken: Snapshot) -> CheckpointInfo:
        if to.saver is not None:
            return to.saver(taken, self.group)
        alone = self.group is None
        written = write(
            to.root, taken, process_group=self.group, kept=to.kept, alone=alone, unchanged=to.unchanged, fence=to.fence
        )
        return publish(written, keep_last=to.keep_last, fence=partial(self._check, to), beside=to.beside)

    def _check(self, to: SaveTo) -> None:
        """Raise where the save must not be published any more."""
        if self._abandoned:
            raise StorageError(f"the save of step {self.step} was given up", "the ranks that made it part")
        if to.fence is not None:
            to.fence()
