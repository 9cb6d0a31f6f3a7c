"""Copies of a run's checkpoints in remote storage, made by rank 0 in a thread after each is published on disk."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from paceline.checkpoint.tiers.remote import Copied, RemoteStore
from paceline.errors import PacelineError, StorageError
from paceline.patience import Patience
from paceline.run.record.recorder import Recorder, SilentRecorder
from paceline.run.survive.saving.intervals import Cadence
from paceline.spec.survive.checkpoints import CheckpointsSpec

LOOK_SECONDS = 0.25
REMOTE = "remote"


class RemoteCopies:
    """Copies checkpoints, one at a time; one that is due meanwhile waits, and gives way to a newer one.

    Rank 0 alone has one that does anything; no other rank waits for it.
    """

    def __init__(
        self, spec: CheckpointsSpec, every_steps: int | None, record: Recorder | SilentRecorder, begun_step: int = 0
    ) -> None:
        """Where intervals adapt, copies are counted from the one before: checkpoints are of any steps then.

        Who begins at a later step than the run does not know that one, and copies the first that there is.
        """
        self._spec, self._record = spec, record
        last = 0 if begun_step == 0 else begun_step - (every_steps or 0)
        self._cadence = Cadence(every_steps, spec.interval == "auto", last)
        self._thread: threading.Thread | None = None
        self._waiting: tuple[Path, int] | None = None
        self._outcome: tuple[int, float, Copied | PacelineError] | None = None

    def published(self, path: Path, step: int, last: bool = False) -> None:
        """Copy the checkpoint where that is due, or where it is the run's `last`."""
        if not self._spec.remote or not (last or self._cadence.every_steps is None or self._cadence.is_due(step)):
            return
        self._cadence.last = step
        self.poll()
        if self._thread is None:
            self._begin(path, step)
        else:
            self._waiting = (path, step)

    def poll(self) -> None:
        """Record a copy that has ended, and begin the one that waits."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread = None
        if self._outcome is not None:
            step, seconds, made = self._outcome
            self._outcome = None
            if isinstance(made, Copied):
                self._record.checkpoint(step, made.url, made.bytes, seconds, 0.0, REMOTE)
            else:
                self._record.fault(f"the checkpoint of step {step} was not copied: {made.what}", made.because)
        if self._waiting is not None:
            (path, step), self._waiting = self._waiting, None
            self._begin(path, step)

    def finish(self) -> None:
        """Wait for what is under way, as long as for a save that may hang."""
        patience = Patience(self._spec.hanging_after)
        while self._thread is not None and not patience.is_over:
            self._thread.join(LOOK_SECONDS)
            self.poll()
        if self._thread is not None:
            self._record.fault("a checkpoint was not copied", f"{self._spec.remote} hangs")

    def _begin(self, path: Path, step: int) -> None:
        self._thread = threading.Thread(target=self._copy, args=(path, step), name="paceline-remote", daemon=True)
        self._thread.start()

    def _copy(self, path: Path, step: int) -> None:
        began = time.perf_counter()
        try:
            made: Copied | PacelineError = RemoteStore(self._spec.remote).copy(path, self._spec.remote_keep)
        except PacelineError as error:
            made = error
        except OSError as error:  # the checkpoint has gone from the disk meanwhile
            made = StorageError(f"{path} cannot be read", str(error))
        self._outcome = (step, time.perf_counter() - began, made)
