"""The keeper of a run's checkpoints: saves beside training, one at a time, and goes on where storage fails.

What became of a save is agreed on by all ranks when the next one begins. Until then only the journal hears of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from paceline.checkpoint import KeptPlan
from paceline.checkpoint.beside.flight import SaveInFlight, SaveTo
from paceline.checkpoint.beside.stage import HostStage
from paceline.cluster.machine import available_memory_bytes
from paceline.errors import Requeue, RunInUse, StorageError
from paceline.run.assemble import Assembled
from paceline.run.loop.resume import Progress, RunIdentity, checkpoint_root, save, saved_state
from paceline.run.process.world import World
from paceline.run.record.recorder import Recorder, SilentRecorder
from paceline.run.survive.host_room import copies_on_this_machine
from paceline.spec.plan import Plan
from paceline.units import format_bytes, format_seconds

ABANDON_SECONDS = 2.0  # for a thread that has lost its peers to end
PRESSURE_SECONDS = 0.01  # a shorter wait for the save before is none
SPARE = 2  # so many times the room that a copy takes must be free for one that nobody asked for


class CheckpointKeeper:
    """Saves a run's state. Every rank has one and calls the same in the same order.

    A save that fails costs the run nothing but a warning: the next one is tried when it is due. `good` is the newest
    checkpoint that is known to be whole, if there is one.
    """

    def __init__(
        self,
        run: RunIdentity,
        record: Recorder | SilentRecorder,
        fence: Callable[[], None] | None,
        good: Path | None = None,
    ) -> None:
        self.good = good
        self._run, self._record = run, record
        self._spec = run.spec.run.checkpoints
        self._to = SaveTo(checkpoint_root(run.dir), run.spec.run.keep_last, KeptPlan(), fence)
        self._stage = HostStage()
        self._flight: SaveInFlight | None = None
        self._is_told = False  # of what became of that
        self._stall_seconds = 0.0  # of that, on the host
        self._beside = {"on": True, "off": False}.get(self._spec.asynchronous)
        self._failures, self._is_pressed = 0, False

    # ---- saving ----------------------------------------------------------------------------------------------------

    def save(self, built: Assembled, plan: Plan, world: World, progress: Progress) -> None:
        """Begin a checkpoint of this moment, or make it at once where the run saves so.

        What fails is a warning. Raises Requeue, or StorageError where there is no checkpoint, after too many failures.
        """
        if not self._goes_beside(built, plan, world, progress):
            try:
                self.save_now(built, plan, world, progress)
            except RunInUse:
                raise
            except StorageError as error:
                self._tell_failure(error)
                self._failures += 1
                self._end_if_pointless(world, error)
            return
        began = time.perf_counter()
        if not self._settled(world, progress.step):
            return
        tensors, extra = saved_state(self._run, built, plan, progress)
        staged = self._stage.take(progress.step, tensors, extra)
        limit = self._spec.hanging_after
        group = world.groups.beside(timedelta(seconds=limit)) if world.size > 1 else None
        self._flight, self._is_told = SaveInFlight(self._to, staged, group, limit), False
        self._stall_seconds = time.perf_counter() - began

    def save_now(self, built: Assembled, plan: Plan, world: World, progress: Progress) -> Path:
        """Return the folder of a checkpoint of this moment, which is there when this returns. Raises StorageError."""
        if not self._settled(world, progress.step):
            raise StorageError(
                f"the checkpoint of step {progress.step} was not saved in {self._to.root}",
                "the save before it hangs",
                "look after the storage, or choose another run.dir",
            )
        info = save(self._run, built, plan, world, progress, self._to.fence, self._to.kept)
        self._record.checkpoint(progress.step, info.path, info.bytes, info.seconds, info.seconds)
        self.good, self._failures = info.path, 0
        return info.path

    def save_or_keep(self, built: Assembled, plan: Plan, world: World, progress: Progress) -> Path:
        """Return `save_now`, or the newest checkpoint there is where that fails. Raises StorageError without one."""
        try:
            return self.save_now(built, plan, world, progress)
        except RunInUse:
            raise
        except StorageError as error:
            if self.good is None:
                raise
            self._tell_failure(error)
            return self.good

    # ---- what became of it -----------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Record a save that has ended since the last look. It waits for nothing."""
        flight = self._flight
        if flight is None or flight.is_running or self._is_told:
            return
        self._is_told = True
        if flight.info is not None:
            stall = self._stall_seconds + flight.staged.device_seconds
            self._record.checkpoint(flight.step, flight.info.path, flight.info.bytes, flight.seconds, stall)
        elif isinstance(flight.error, StorageError):
            self._tell_failure(flight.error)

    def finish(self) -> None:
        """Wait for the save under way, on this rank alone, and record it. One that hangs is given up."""
        if self._flight is not None:
            if self._flight.wait():
                self.poll()
            else:
                self.abandon()

    def abandon(self) -> None:
        """Give up the save under way: nothing waits for peers, which may be dead. Their group cannot be used again."""
        if self._flight is not None:
            self._flight.abandon(ABANDON_SECONDS)
            self._flight = None

    def _settled(self, world: World, step: int) -> bool:
        """Return whether no save is under way; every rank waits for its own and they agree on what became of it."""
        flight = self._flight
        if flight is None:
            return True
        began, was_running = time.perf_counter(), flight.is_running
        hangs = not flight.wait()
        waited = time.perf_counter() - began
        broken = isinstance(getattr(flight.error, "__cause__", None), RuntimeError)
        hangs, failed, broken = (
            bool(flag) for flag in world.maximum([float(hangs), float(flight.error is not None), float(broken)])
        )
        self.poll()
        error = flight.error
        if hangs:
            what = f"the checkpoint of step {flight.step} is not written after {format_seconds(flight.age_seconds)}"
            error = StorageError(what, f"that of step {step} is left out: the storage hangs")
            self._tell_failure(error)
        else:
            self._flight = None
            self._tell_pressure(flight, step, waited if was_running else 0.0)
        if error is None and failed:
            error = StorageError(f"the checkpoint of step {flight.step} was not saved", "another rank could not")
        if broken and not hangs:
            world.groups.drop_beside()
        if isinstance(error, RunInUse):
            raise error
        if error is None:
            assert flight.info is not None
            self.good, self._failures = flight.info.path, 0
        else:
            self._failures += 1
            self._end_if_pointless(world, error)
        return not hangs

    def _tell_pressure(self, flight: SaveInFlight, step: int, waited: float) -> None:
        if waited > PRESSURE_SECONDS and not self._is_pressed:
            self._is_pressed = True
            took = format_seconds(flight.seconds)
            self._record.decided(
                "checkpoint",
                f"one save at a time, step {flight.step}",
                f"step {step} waits",
                f"the save of step {flight.step} took {took}, until that of step {step} was due: it waited"
                f" {format_seconds(waited)}, and so will others",
                {"write_seconds": flight.seconds, "waited_seconds": waited},
            )

    def _tell_failure(self, error: BaseException) -> None:
        what, because = (error.what, error.because) if isinstance(error, StorageError) else (str(error), "")
        kept = f"; {self.good} is kept" if self.good else ""
        self._record.fault(what, f"{because}{kept}")

    def _end_if_pointless(self, world: World, error: BaseException) -> None:
        """Raise where too many saves in a row have failed: Requeue where there is a checkpoint to go on from."""
        if self._failures < self._spec.most_failures:
            return
        because = f"{self._failures} checkpoints in a row could not be saved"
        if world.maximum([float(self.good is None)]) != [0.0]:
            last = f"the last one: {error.because}" if isinstance(error, StorageError) else str(error)
            raise StorageError(because, last, "mend the storage, or choose another run.dir")
        raise Requeue(because)

    # ---- beside training or not ------------------------------------------------------------------------------------

    def _goes_beside(self, built: Assembled, plan: Plan, world: World, progress: Progress) -> bool:
        """Return whether saves go on beside training; every rank asks, and where nobody has said so they find out."""
        if self._beside is None:
            tensors, _ = saved_state(self._run, built, plan, progress)
            needed, free = copies_on_this_machine(tensors, world), available_memory_bytes()
            self._beside = world.maximum([float(needed * SPARE > free)]) == [0.0]
            if not self._beside:
                self._record.decided(
                    "checkpoint", "beside training", "while training waits",
                    f"a copy takes {format_bytes(needed)} of host memory, of which {format_bytes(free)} are free",
                    {"copy_bytes": needed, "free_bytes": free},
                )  # fmt: skip
        return self._beside
