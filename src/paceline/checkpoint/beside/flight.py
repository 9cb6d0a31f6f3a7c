"""A save that goes on in a thread beside training, on a process group of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from paceline.checkpoint.beside.stage import Staged
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.save import CheckpointInfo, Written, giving_up, publish, write
from paceline.checkpoint.save_plan import KeptPlan
from paceline.errors import StorageError
from paceline.patience import Patience

LOOK_SECONDS = 0.25  # between two looks at the load, while a save is waited for


@dataclass(frozen=True)
class SaveTo:
    """Where a save goes and what belongs to it: the same for every save of a training."""

    root: Path
    keep_last: int
    kept: KeptPlan = field(default_factory=KeptPlan)
    fence: Callable[[], None] | None = None


class SaveInFlight:
    """A save under way. `info` is the checkpoint when it is published, `error` why there is none.

    Every rank starts one, with its own staged snapshot of one step, and no other save runs on their group meanwhile.
    The thread ends with the process, wherever it hangs.
    """

    def __init__(self, to: SaveTo, staged: Staged, group: dist.ProcessGroup | None, limit_seconds: float) -> None:
        self.step, self.staged, self.group = staged.taken.step, staged, group
        self.info: CheckpointInfo | None = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.began, self.seconds = time.perf_counter(), 0.0
        self._to, self._patience = to, Patience(limit_seconds)
        self._thread = threading.Thread(target=self._run, name="paceline-save", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the save has not ended."""
        return self._thread.is_alive()

    @property
    def age_seconds(self) -> float:
        """How long ago the save began."""
        return time.perf_counter() - self.began

    def wait(self) -> bool:
        """Return whether the save ended within its limit; wait for it until then."""
        while self.is_running and not self._patience.is_over:
            self._thread.join(LOOK_SECONDS)
        return not self.is_running

    def abandon(self, seconds: float) -> None:
        """Have the save end without a checkpoint: peers that may be dead are waited for no longer."""
        self.abandoned = True
        if self.is_running and self.group is not None:
            self.group.abort()
        patience = Patience(seconds)
        while self.is_running and not patience.is_over:
            self._thread.join(LOOK_SECONDS)

    def _run(self) -> None:
        try:
            self.info = self._save()
        except BaseException as error:  # whoever asks for the outcome gets it
            self.error = error
        self.seconds = time.perf_counter() - self.began

    def _save(self) -> CheckpointInfo:
        to, alone = self._to, self.group is None
        waiting = Written(to.root, self.step, Ranks(self.group, alone))
        with giving_up(waiting):
            taken = waiting.ranks.attempt(waiting.what, self.staged.arrived)
        written = write(to.root, taken, process_group=self.group, kept=to.kept, alone=alone)
        return publish(written, keep_last=to.keep_last, fence=self._check)

    def _check(self) -> None:
        """Raise where the save must not be published any more."""
        if self.abandoned:
            raise StorageError(f"the save of step {self.step} was given up", "the ranks that made it part")
        if self._to.fence is not None:
            self._to.fence()
