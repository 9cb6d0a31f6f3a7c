"""From one world to the next: a rank leaves a world with the state that the rank holds, and takes a place elsewhere."""

from __future__ import annotations

import dataclasses

from paceline.errors import ConfigError
from paceline.run.loop.in_world import InWorld
from paceline.run.observe.observing import NodeWatch
from paceline.run.process.groups import Groups, abort_groups
from paceline.run.process.world import World, join_next
from paceline.run.record.recorder import Recorder, SilentRecorder
from paceline.run.survive.health.passed_over import PassedOver
from paceline.run.survive.points import points_of
from paceline.run.survive.recovered import Recovered
from paceline.run.survive.survivor import hold, is_lost_peer, next_place, why_not_reformed, without_frames
from paceline.run.survive.unrecorded import unrecorded_under
from paceline.supervise.control import Waits
from paceline.supervise.told.brief import take_brief


class NextWorld(InWorld):
    """What a rank does to go on in a further world: one that the user has joined, or the next one of the supervisor."""

    def _change_world(self, world: World) -> None:
        """Take this rank's place in another world, whose process group is the one that this process is in by now.

        Raises ConfigError where the rank that records is not the first one any more.
        """
        if world.is_first is isinstance(self._record, SilentRecorder):
            raise ConfigError(
                f"rank {self.world.rank} of a run is rank {world.rank} of its next world",
                "the first rank has the records of the run, and stays the first one",
                "let ranks keep their order",
            )
        self._leave_node()
        self._keeper.abandon()
        self._saved = self._keeper.known
        self.world, attempt = world, self._record.attempt if isinstance(self._record, Recorder) else 0
        self._call_roll()
        self._points = points_of(self.spec.run, self.dir, world.rank, world.size)
        self._passed_over = PassedOver(self.dir, world)
        self._node = NodeWatch(self.spec.run, self.dir, world, attempt, self._samples)

    def _reformed(self) -> bool:
        """Go on in the next world with what is left of this one; return False where this process has no part in it."""
        if why_not_reformed(self.spec.task, self.brief.plan):
            return False
        is_done = self._done_step >= self.progress.step
        self._roll.stop()
        self._callbacks.put_back()
        built, plan, step = self._under.built, self.brief.plan, self.progress.step
        every = self._in_steps.check_every
        is_due = bool(every) and step % (every or 1) == 0  # by the spec: more are made at first
        held = hold(self._run, built, plan, self.progress, self._made, is_done, self._agreed, is_due)
        state = dataclasses.replace(held.state, generation=self._generation.number, rank=self.world.rank)
        learnt, unrecorded = self._stragglers.learnt(), unrecorded_under(self._under)
        held = dataclasses.replace(held, learnt=learnt, unrecorded=unrecorded, state=state)
        self._keeper.abandon()
        self._node.close()
        self._saved = self._keeper.known
        waits: Waits | None = Waits(self.world.rank, self._generation.number, held.state)
        self.world.groups.forget()
        self.take_down()  # while the supervisor forms the next world
        while True:
            try:
                waits = waits or Waits(self.world.rank, self._generation.number, held.state)
                following, waits = next_place(self.world, waits), None
                if following is None:
                    return False
                place, self._generation = following  # of which this rank is, whether or not its world comes about
                self._record_fault()
                self.brief = take_brief() or self.brief
                self.world = dataclasses.replace(self.world, rank=place.rank, size=place.world_size, groups=Groups())
                self.world = join_next(self.world, place)
                self._take_place(self._generation)
                self._open_data()
                self._enter(held)
                return True
            except Exception as error:  # another one was lost meanwhile
                if not is_lost_peer(error):
                    raise
                without_frames(error)
            abort_groups()
            self.world.groups.forget()

    def _record_fault(self) -> None:
        """Record what ended the world before, if this rank has its records: the next world may end before it begins.

        Where the rank that had them is lost, the supervisor has told it. Where the first rank of that world had not
        begun its records yet, nobody has: they begin with it.
        """
        if self._generation.is_called:
            return
        fault = Recovered(self._generation).fault
        if self._is_on_record:
            self._record.fault(*fault)
        elif self.world.is_first:
            self._unrecorded_faults.append(fault)
