"""The keeper of a run's checkpoints: saves beside training, one at a time, and goes on where storage fails.

What became of a save is agreed on by all ranks when the next one begins. Until then only the journal hears of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch

from paceline.checkpoint.beside.flight import SaveInFlight, SaveOutcome
from paceline.checkpoint.beside.stage import HostStage
from paceline.checkpoint.save import CheckpointInfo
from paceline.checkpoint.tiers.retention import HELD_OUT
from paceline.errors import ExhaustedTogether, Requeue, RunInUse, StorageError
from paceline.run.assemble import Assembled
from paceline.run.loop.resume import Progress, RunIdentity, saved_state
from paceline.run.process.world import World
from paceline.run.record.recorder import Recorder, SilentRecorder, is_echo
from paceline.run.survive.listener import has_lost_a_peer, refuse_lost_world
from paceline.run.survive.saving.host_room import why_not_beside
from paceline.run.survive.saving.known_saves import KnownSave
from paceline.run.survive.saving.pace import SavingPace
from paceline.run.survive.saving.remote_copies import RemoteCopies
from paceline.run.survive.saving.tiers import DISK, MEMORY, Tier, Tiers
from paceline.run.survive.saving.within_notice import (
    ABANDON_SECONDS,
    LiveState,
    last_moment,
    save_waited_for,
    waited_for,
)
from paceline.spec.plan import Plan
from paceline.units import format_durations, format_seconds

PRESSURE_SECONDS = 0.01  # a shorter wait for the save before is none


class CheckpointKeeper:
    """Saves a run's state. Every rank has one and calls the same in the same order.

    A save that fails costs the run nothing but a warning: the next one is tried when it is due. One that finds no
    memory ends the run, as a step does. `good` is the newest checkpoint in the run's directory that is known to be
    whole, if there is one.
    """

    def __init__(
        self,
        run: RunIdentity,
        record: Recorder | SilentRecorder,
        fence: Callable[[], None] | None,
        every_steps: Sequence[int | None],
        known: KnownSave,
        remote: RemoteCopies,
        begun_step: int = 0,
    ) -> None:
        """`every_steps` are the steps between checkpoints on disk and in memory; `remote` makes copies of the former.

        `known` is the same on all ranks, and so is `good` at each save.
        """
        self.good, self._save_seconds = known.path, known.seconds  # the second of the last save to disk
        self._published, self._failures, self._is_pressed = known.published, known.failures, known.is_pressed
        self._run, self._record, self._spec = run, record, run.spec.run.checkpoints
        every = dict(zip((DISK, MEMORY), every_steps, strict=False))
        self._pace = SavingPace(run.spec, run.dir, every, begun_step, known.pace)
        self.tiers = Tiers(run, record, fence, self._pace.cadences, known.has_memory)
        self._remote = remote
        self._is_first = isinstance(record, Recorder)
        self._stage = HostStage()
        self._held_out: dict[str, object] = {}
        self._flight: SaveInFlight | None = None
        self._is_told = False  # of what became of that
        self._stall_seconds = self._copy_seconds = 0.0  # of that, on the host; the second without waiting for another
        self._beside = {"on": True, "off": False}.get(self._spec.asynchronous)
        self._was_beside = known.is_beside

    @property
    def known(self) -> KnownSave:
        """What this rank knows of the newest checkpoint on disk, for the world after this one."""
        is_beside = self._was_beside if self._beside is None else self._beside
        return KnownSave(
            self.good, self._save_seconds, self._published, self._failures, self._pace.known, is_beside,
            self.tiers.has_memory, self._is_pressed,
        )  # fmt: skip

    # ---- saving ----------------------------------------------------------------------------------------------------

    def save_if_due(self, built: Assembled, plan: Plan, world: World, progress: Progress) -> bool:
        """Begin the checkpoints that are due after this step, or make them where the run saves so; return if any was.

        What fails is a warning. Raises Requeue, or StorageError where there is no checkpoint, after too many failures.
        """
        self._pace.stepped()
        if self._pace.adapts and not self._pace.is_chosen:
            tensors, _ = saved_state(self._run, built, plan, progress)
            self._pace.assume(tensors, world)
            self._pace.choose(world, self._record)
        if not self.tiers.due(progress.step):
            return False
        try:
            return self._save_due(built, plan, world, progress)
        finally:
            self._pace.saves_ended()

    def _save_due(self, built: Assembled, plan: Plan, world: World, progress: Progress) -> bool:
        """Begin the checkpoints that are due, or make them; return whether there was any."""
        tensors, extra = self._state(built, plan, progress)
        if self._beside is None:
            self._decide_where(why_not_beside(tensors, world))
        tiers = self.tiers.ready(progress.step, tensors, world)
        if any(tier.to.saver for tier in tiers):
            self.tiers.with_peers() if self._beside else self.tiers.without_peers()
            tiers = [tier for tier in tiers if self._beside or not tier.to.saver]
        began = time.perf_counter()
        self._pace.saved_at(progress.step, [tier.name for tier in tiers])
        if not tiers or not self._settled(world, progress.step):
            return bool(tiers)
        if self._pace.adapts:
            self._pace.choose(world, self._record)
        if self._beside:
            copied = time.perf_counter()
            staged = self._stage.take(progress.step, tensors, extra)
            self._copy_seconds = time.perf_counter() - copied
            limit = self._spec.hanging_after
            group = world.groups.beside(timedelta(seconds=limit)) if world.size > 1 else None
            self._is_told = False
            self._flight = SaveInFlight([tier.to for tier in tiers], staged, group, limit)
            self._stall_seconds = time.perf_counter() - began
        else:
            made: list[SaveOutcome] = []
            for tier in tiers:
                made.append(self._save_here(tier, built, plan, world, progress))
                if self._flight is not None:  # it hangs
                    break
            self._count(made, world)
        return True

    def _decide_where(self, because: str) -> None:
        """Note whether checkpoints are written beside training, or why not, and tell that where it is another world's.

        The world before may have told the same.
        """
        self._beside, was = not because, self._was_beside is not False
        waits = "while training waits"
        if because and was:
            self._record.decided("checkpoint", "beside training", waits, because)
        elif not because and not was:
            self._record.decided("checkpoint", waits, "beside training", "host memory has the room for it by now")

    def save_now(self, built: Assembled, plan: Plan, world: World, progress: Progress, until: float = math.inf) -> Path:
        """Return the folder of a checkpoint of this moment on disk, which is there by then. Raises StorageError.

        So it does where a save takes longer than `hanging_after`, or goes on at the moment `until` (monotonic).
        """
        if not self._settled(world, progress.step, until):
            raise StorageError(
                f"the checkpoint of step {progress.step} was not saved in {self.tiers.disk.to.root}",
                "the save before it hangs",
                "look after the storage, or choose another run.dir",
            )
        made = self._save_here(self.tiers.disk, built, plan, world, progress, last=True, until=until)
        if made.error is not None:
            raise made.error
        assert made.info is not None
        self._heard(made.info.path)
        self._pace.saved_at(progress.step, [DISK])
        return made.info.path

    def save_or_keep(self, built: Assembled, plan: Plan, world: World, progress: Progress) -> Path:
        """Return `save_now`, or the newest checkpoint there is where that fails. Raises StorageError without one.

        Where a save takes longer than the machine stays it is the newest on disk: what is in its memory goes with it.
        A save is waited for as long as the machine stays, and then given up; where no notice is set, or nothing on disk
        would count instead, as long as one that does not hang may take.
        """
        notice, began, until = self._run.spec.run.recovery.notice, time.monotonic(), math.inf
        if notice is not None:
            if (kept := self._kept_within(notice, world)) is not None:
                return kept
            if self._good_on_disk is not None:
                until = last_moment(began, notice, self._save_seconds)
        try:
            return self.save_now(built, plan, world, progress, until)
        except RunInUse:
            raise
        except StorageError as error:
            if self.good is None:
                raise
            self._tell_failure(error)
            self.abandon()  # it may hang, and nobody looks for it any more
            return self.good

    def _kept_within(self, notice: float, world: World) -> Path | None:
        """Return the newest checkpoint on disk where a save of this moment would not end within so many seconds."""
        flight, took = self._flight, world.maximum([self._save_seconds])[0]
        has_ended, fits = waited_for(flight, took, notice, world)
        if flight is not None and has_ended:
            self._settled(world, flight.step)  # it may be the newest
        known = self._good_on_disk
        if known is None or fits:
            return None
        under_way = f", that of step {flight.step} is still under way" if flight is not None and not has_ended else ""
        if self._flight is not None:
            self.abandon()
        because = f"the last one took {format_seconds(took)}{under_way}, and the machine goes"
        because = f"{because} {format_seconds(notice)} after a notice"
        self._record.decided("stop", "a checkpoint of this moment", str(known), because)
        return known

    @property
    def _good_on_disk(self) -> Path | None:
        """The newest whole checkpoint, where it is in the run's directory and not in the machine's memory."""
        return self.good if self.good is not None and self.good.parent == self.tiers.disk.to.root else None

    def close(self, world: World) -> None:
        """Finish remote copies, and give the memory tier back: the newest state is on disk. Every rank calls it."""
        self._remote.finish()
        if self._settled(world, 0) and world.is_first:
            self.tiers.close()

    def _save_here(
        self,
        tier: Tier,
        built: Assembled,
        plan: Plan,
        world: World,
        progress: Progress,
        last: bool = False,
        until: float = math.inf,
    ) -> SaveOutcome:
        """Save to one tier while training waits, and record what is published; the `last` one is copied in any case.

        One that hangs is under way when this returns, given up.
        """
        state = LiveState(progress.step, *self._state(built, plan, progress))
        flight = save_waited_for(tier.to, state, world, self._spec.hanging_after, until)
        if flight.is_given_up:
            self._flight, self._is_told = flight, True
            what = f"the checkpoint of step {flight.step} is not written after {format_seconds(flight.age_seconds)}"
            return SaveOutcome(tier.to, flight.age_seconds, error=StorageError(what, "the storage hangs"))
        (outcome,) = flight.outcomes
        if outcome.info is None:
            assert outcome.error is not None
            if not isinstance(outcome.error, StorageError):
                raise outcome.error
            return outcome
        info = outcome.info
        self._took(tier, outcome.seconds)
        self._record.checkpoint(progress.step, info.path, info.bytes, outcome.seconds, outcome.seconds, tier.told)
        self._pace.saved(tier.name, outcome.seconds, outcome.seconds)
        self._on_disk(tier, info.path, progress.step, last)
        return outcome

    def evaluated(self, step: int, loss: float, metric: str, score: float) -> None:
        """Take note of the evaluation after a step: a checkpoint of that step has it, and may stay for its score."""
        known = score if math.isfinite(score) else None
        self._held_out = {"step": step, "loss": loss, "metric": metric, "score": known}

    def _state(
        self, built: Assembled, plan: Plan, progress: Progress
    ) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        tensors, extra = saved_state(self._run, built, plan, progress)
        known = self._held_out.get("step") == progress.step
        return tensors, {**extra, HELD_OUT: self._held_out} if known else extra

    # ---- what became of it -----------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Record a save that has ended since the last look. It waits for nothing."""
        self._remote.poll()
        flight = self._flight
        if flight is None or flight.is_running or self._is_told:
            return
        self._tell_all_made(flight, flight.outcomes)
        for outcome in flight.outcomes:
            if outcome.error is not None:
                self._tell_failure(outcome.error)

    def _tell_all_made(self, flight: SaveInFlight, outcomes: Sequence[SaveOutcome]) -> None:
        """Record, once, what was published beside training; training stood still once for all tiers."""
        self._is_told = True
        stall = self._stall_seconds + flight.staged.device_seconds
        for outcome in outcomes:
            if outcome.info is not None:
                self._tell_made(flight, outcome, outcome.info, stall)
                stall = 0.0

    def _tell_made(self, flight: SaveInFlight, outcome: SaveOutcome, info: CheckpointInfo, stall: float) -> None:
        """Record a checkpoint that was published beside training, for which training stood still for so long."""
        tier = self.tiers.of(outcome.to)
        self._took(tier, outcome.seconds)
        self._record.checkpoint(flight.step, info.path, info.bytes, outcome.seconds, stall, tier.told)
        self._pace.saved(tier.name, self._copy_seconds + flight.staged.device_seconds, outcome.seconds)
        self._on_disk(tier, info.path, flight.step)

    def refuse_exhausted(self, world: World) -> None:
        """Raise where this rank's memory was exhausted in a save beside training that has ended: its peers hear of it.

        What other ranks found no memory for is theirs to tell: they alone know what it was spent on.
        """
        flight = self._flight
        for outcome in flight.outcomes if flight is not None and not flight.is_running else ():
            if isinstance(outcome.error, ExhaustedTogether) and outcome.error.rank == world.rank:
                outcome.error.save_step = flight.step if flight else None
                raise outcome.error

    def _heard(self, path: Path) -> None:
        """Take note of the newest checkpoint on disk, which is whole."""
        self.good, self._failures = path, 0
        self._published += 1

    def _took(self, tier: Tier, seconds: float) -> None:
        """Take note of how long a save took, if it was to disk: the memory of a machine goes with it."""
        if tier.name == DISK:
            self._save_seconds = seconds

    def _on_disk(self, tier: Tier, path: Path, step: int, last: bool = False) -> None:
        """Have a checkpoint that was published copied to remote storage, where rank 0 does so."""
        if tier.name == DISK and self._is_first:
            self._remote.published(path, step, last)

    def finish(self) -> None:
        """Wait for the save under way and for remote copies, on this rank alone. One that hangs is given up."""
        if self._flight is not None:
            if self._flight.wait():
                self.poll()
            else:
                self.abandon()
        self._remote.finish()

    def abandon(self) -> None:
        """Give up the save under way: nothing waits for peers, which may be dead. Their group cannot be used again.

        What was published by then is recorded, and is the newest that this rank knows: the next world may have none.
        """
        self.poll()
        flight, self._flight = self._flight, None
        if flight is None:
            return
        was_over, is_counted = not flight.is_running, flight.is_given_up
        flight.abandon(ABANDON_SECONDS)
        outcomes = tuple(flight.outcomes)  # what a thread that goes on comes to later counts no more
        if not self._is_told:
            self._tell_all_made(flight, outcomes)
        made = {self.tiers.of(each.to).name: each.info.path for each in outcomes if each.info is not None}
        self._pace.given_up(made)
        failed = [
            each for each in outcomes
            if each.error is not None and not each.has_lost_a_peer and not is_echo(each.error)
        ]  # fmt: skip
        if DISK in made:
            self._heard(made[DISK])
        elif was_over and not is_counted and any(self.tiers.of(outcome.to).name == DISK for outcome in failed):
            self._failures += 1

    def _settled(self, world: World, step: int, until: float = math.inf) -> bool:
        """Return whether no save is under way; every rank waits for its own and they agree on what became of it."""
        flight = self._flight
        if flight is None:
            return True
        began, was_running = time.perf_counter(), flight.is_running
        hangs = not flight.wait(lambda: has_lost_a_peer() or time.monotonic() >= until)
        if hangs:
            refuse_lost_world(flight.step)
        waited = time.perf_counter() - began if was_running else 0.0
        lost = any(outcome.has_lost_a_peer for outcome in flight.outcomes)
        agreed = world.maximum([float(hangs), float(lost)])
        self.poll()
        self.refuse_exhausted(world)
        if agreed[0]:
            what = f"the checkpoint of step {flight.step} is not written after {format_seconds(flight.age_seconds)}"
            error = StorageError(what, f"that of step {step} is left out: the storage hangs")
            self._tell_failure(error)
            self._count([SaveOutcome(self.tiers.disk.to, flight.age_seconds, error=error)], world, told=True)
            return False
        self._flight = None
        self._tell_pressure(flight, step, waited)
        if agreed[1]:
            world.groups.drop_beside()
        if flight.is_given_up:  # which counted when it was: what was written since then is not known
            for outcome in flight.outcomes:
                outcome.to.unchanged.forget()
        else:
            self._count(flight.outcomes, world, told=True)
        return True

    def _count(self, outcomes: Sequence[SaveOutcome], world: World, told: bool = False) -> None:
        """Count the saves to disk that failed one after another. Every rank calls it, and stops where it is pointless.

        Raises Requeue where there is a checkpoint to go on from, StorageError where there is none.
        """
        for outcome in outcomes:
            if isinstance(outcome.error, RunInUse):
                raise outcome.error
            if outcome.error is not None and not told and outcome.info is None:
                self._tell_failure(outcome.error)
        mine = [outcome for outcome in outcomes if self.tiers.of(outcome.to).name == DISK]
        if not mine:
            return
        failed = world.maximum([float(any(outcome.error is not None for outcome in mine))]) != [0.0]
        failures = self._failures + 1 if failed else 0
        for info in (outcome.info for outcome in mine if outcome.info is not None):
            self._heard(info.path)
        self._failures = failures
        if self._failures < self._spec.most_failures:
            return
        because = f"{self._failures} checkpoints in a row could not be saved"
        if world.maximum([float(self.good is None)]) != [0.0]:
            last = next((str(outcome.error) for outcome in mine if outcome.error is not None), "another rank could not")
            raise StorageError(because, last, "mend the storage, or choose another run.dir")
        because = f"{because}; the last good one is {self.good}"
        self._record.decided("stop", "training", "requeue", because)
        raise Requeue(because)

    def _tell_pressure(self, flight: SaveInFlight, step: int, waited: float) -> None:
        if waited > PRESSURE_SECONDS and not self._is_pressed:
            self._is_pressed = True
            seconds = max((outcome.seconds for outcome in flight.outcomes), default=0.0)
            took, waits = format_durations(seconds, waited)
            self._record.decided(
                "checkpoint",
                f"step {flight.step} beside training",
                f"step {step} waits",
                f"the save of step {flight.step} took {took}, and that of step {step} was due:"
                f" training waited {waits}, and will again, since one save is under way at a time",
                {"write_seconds": seconds, "waited_seconds": waited},
            )

    def _tell_failure(self, error: BaseException) -> None:
        if is_echo(error):  # of a peer that has gone, which is told as such
            return
        what, because = (error.what, error.because) if isinstance(error, StorageError) else (str(error), "")
        kept = f"; {self.good} is kept" if self.good else ""
        self._record.fault(what, f"{because}{kept}")
