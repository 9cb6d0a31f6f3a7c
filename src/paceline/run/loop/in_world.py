"""A run on this rank in the world it is in: built under its plan, taken down, and built again in the next world."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from paceline.checkpoint.tiers.held_by_ranks import HeldByRanks
from paceline.checkpoint.tiers.remote import RUN
from paceline.errors import ConfigError, ExhaustedTogether, OutOfMemory, StorageError, exhausted_by
from paceline.lock import RunLock, take
from paceline.plan.feasible.micro_batch import with_micro_batch
from paceline.run.callbacks.callbacks import Callbacks
from paceline.run.evaluate.best import BestEvaluation, values_on_record, was_stopped
from paceline.run.evaluate.samples import sample_writer
from paceline.run.loop.evaluate import unigram_bar
from paceline.run.loop.resume import KeepsState, Progress, Restored, RunIdentity, state_tensors
from paceline.run.loop.sources import open_sets, open_together
from paceline.run.loop.step import Stepper, StepStats
from paceline.run.loop.under_plan import UnderPlan
from paceline.run.memory.exhausted import out_of_memory, tell_peers, told_by_peer, told_together
from paceline.run.memory.spent import MemoryMeter
from paceline.run.observe.health.judge import HealthJudge
from paceline.run.observe.health.run_health import TrainingHealth
from paceline.run.observe.node import SamplesOfFirst
from paceline.run.observe.observing import NodeWatch
from paceline.run.process.alike import hashes_differ
from paceline.run.process.groups import Groups, abort_groups
from paceline.run.process.roll_call import RollCall
from paceline.run.process.world import World, join_next
from paceline.run.record.journal import Journal
from paceline.run.record.recorder import Recorder, SilentRecorder
from paceline.run.record.sink import OpenSink, Sink
from paceline.run.record.status import StatusLine
from paceline.run.record.tally import RankTally
from paceline.run.survive.agreed import Agreed
from paceline.run.survive.budget import RunBudgets, budget_of
from paceline.run.survive.health.passed_over import PassedOver
from paceline.run.survive.health.pressure import MemoryPressure
from paceline.run.survive.health.second_look import SecondLook
from paceline.run.survive.health.stragglers import Stragglers
from paceline.run.survive.listener import listen_for_abort, watch_updates
from paceline.run.survive.notice import Notices
from paceline.run.survive.points import points_of
from paceline.run.survive.recovered import Recovered
from paceline.run.survive.replay import SWITCHES, StepBefore, expected_step
from paceline.run.survive.saving.keeper import CheckpointKeeper
from paceline.run.survive.saving.known_saves import KnownSave, agreed_save, seconds_on_record
from paceline.run.survive.saving.remote_copies import RemoteCopies
from paceline.run.survive.saving.run_name import RunName
from paceline.run.survive.survivor import (
    Brought,
    bring_together,
    call_of_supervisor,
    hold,
    is_lost_peer,
    let_go,
    next_place,
    why_not_reformed,
    without_frames,
)
from paceline.run.survive.unrecorded import give_back, unrecorded_under
from paceline.spec.amounts import in_steps
from paceline.spec.journal.settled import settled_micro_batch
from paceline.spec.journal.timing.clock import passed_seconds
from paceline.spec.load import Spec, spec_to_dict
from paceline.spec.plan import Plan
from paceline.spec.sync import refuse_between
from paceline.supervise.control import Waits
from paceline.supervise.supervisor import is_supervised
from paceline.supervise.told.brief import Brief, take_brief
from paceline.supervise.told.generation import REFORMED, Generation, take_generation
from paceline.task.data.described import described
from paceline.task.data.listed_once import list_anew
from paceline.task.known_sum import is_known_sum
from paceline.task.metrics.metric import Metric
from paceline.task.metrics.resolve import metrics_of
from paceline.task.models.huggingface.export import keep_folder
from paceline.task.objective import Objective
from paceline.task.optimizer.schedule import course_of
from paceline.task.settled import settle
from paceline.units import Amount


class InWorld:
    """What a run has on this rank, in one world after the other. The training loop stands on it."""

    def __init__(
        self,
        spec: Spec,
        brief: Brief,
        world: World,
        run_dir: Path,
        sinks: Sequence[OpenSink] = (),
        lock: RunLock | None = None,
    ) -> None:
        """`sinks` take rank 0's records beside the journal and the status line; they are opened as the start begins.

        `lock` is rank 0's hold on the run's directory: nothing is written once another start has taken it.
        """
        spec = settle(spec).spec  # of `Run` it is as the user gave it
        self.spec, self.brief, self.world, self.dir = spec, brief, world, run_dir
        self._fence = lock.check_saving if lock else None
        self._began, self._lock, self._sinks = time.monotonic(), lock, sinks
        self._roll = RollCall(0, 1)  # until this process has taken its place
        self._take_place(take_generation())
        task = spec.task
        self._meter = MemoryMeter(world.device)
        self._open_data()
        list_anew()
        self._warmup = self._steps(task.schedule.warmup) or 0
        self._decay = self._steps(task.schedule.decay) or max(1, brief.steps // 10)
        self._check_every = self._steps(spec.run.check_every)
        self._write_every = self._steps(task.samples.every)
        self._evaluate_every = self._steps(spec.run.evaluate_every) if self.held_out else None
        refuse_between(
            brief.plan.sync,
            {
                "task.stop": brief.steps,
                "run.evaluate_every": self._evaluate_every,
                "task.samples.every": self._write_every if task.samples.prompts else None,
            },
        )
        peak, schedule = task.optimizer.lr, task.schedule
        course = course_of(schedule, peak, brief.steps, self._warmup, self._decay)
        self._callbacks = Callbacks(task.callbacks)
        kept: dict[str, KeepsState] = {"callbacks": self._callbacks} if task.callbacks else {}
        self._run_name = kept[RUN] = RunName(bool(spec.run.checkpoints.remote))
        self._run = RunIdentity(run_dir, spec, self.source.fingerprint, course, described(self.source), kept)
        observe, self._samples = spec.run.observe, SamplesOfFirst()
        every = self._steps(observe.health_every) or 1
        self._health = TrainingHealth(every, HealthJudge()) if observe.health else None
        told = seconds_on_record(run_dir) if world.is_first and spec.run.recovery.notice is not None else 0.0
        self._saved = KnownSave(seconds=told)
        self._second_look: SecondLook | None = None
        self._made: StepStats | None = None  # what the last step did
        self._done_step = 0  # the last step of which all that follows is done
        self._stopped: bool = False  # whether a callback has ended training
        self._record: Recorder | SilentRecorder = SilentRecorder()
        self._notices = Notices(spec.run, self._generation.begun_after, self._generation.usd_before)
        self._enter(None)
        self._begin()

    def _begin(self) -> None:
        """Do what follows once, after the first world is entered. What stands on this class does it."""

    def _open_data(self) -> None:
        """Open what is trained on and what is held out. Every rank calls it."""
        with self._telling(self.brief.plan, ("data", 0)):
            self._open_sources()

    def _open_sources(self) -> None:
        task = self.spec.task
        self.source, self.held_out = open_together(task.data, task.seed, self.world)
        self._sets = open_sets(task, self.world, self.held_out or self.source)
        if self.held_out is None and self._sets:  # then the first of them is what is evaluated
            self.held_out = self._sets.pop(next(iter(self._sets)))

    def _take_place(self, generation: Generation) -> None:
        """Note which generation's world this is, and how the supervisor would call this rank out of it."""
        self._generation, self._recovered = generation, Recovered(generation)
        may_leave = not why_not_reformed(self.spec.task, self.brief.plan)
        self._call, self._called_away = call_of_supervisor() if may_leave else None, False
        listen_for_abort(self.world.device)
        self._call_roll()

    def _call_roll(self) -> None:
        """Have this world's ranks meet before calls that all of them must make."""
        self._roll.stop()
        # There ranks may have come in the middle of a loop.
        self._is_reformed, self._meets_until = self._generation.rung == REFORMED, 0
        self._roll = RollCall(self.world.rank, self.world.size, is_reformed=self._is_reformed)
        weakref.finalize(self, self._roll.leave)

    def _enter(self, held: Brought | None) -> None:
        """Build under the plan in this generation's world, and go on from the newest state. Every rank calls it.

        `held` is what this rank brings from the generation before. Where the duties of the last step were cut short,
        `_done_step` is the step before it.
        """
        self._points = points_of(self.spec.run, self.dir, self.world.rank, self.world.size)
        self._joins, self._starts_again = held is None and self._is_reformed, held is not None
        together = bring_together(self.world, self._generation, held)
        self._under = self._build(self.brief.plan, self.world, together.root if together else None)
        let_go(together, self.world)
        self._run_name.agree(self.world)
        restored = self._under.restored
        self._recovered.built(restored)
        self._follow_plan(restored)
        self._judge = self._judge_of_record(survives=held is not None)
        self._first_step = self.progress.step + 1
        if self._is_reformed:  # until survivors have made again what was made: the loop of a new rank sees these steps
            self._meets_until = max(self.progress.step, self._generation.reached) + 1
        self._passed_over = PassedOver(self.dir, self.world)
        self._position, self._went_back = self._passed_over.position_from(self.progress.position), False
        assert self.world.is_first or isinstance(self._record, SilentRecorder), "one rank records, and goes on doing so"
        is_new = self.world.is_first and isinstance(self._record, SilentRecorder)
        if is_new:
            self._record = self._open_record()
        if is_new or not held:  # who goes on with the records goes on with the copies that are under way
            saved = self.spec.run.checkpoints
            self._remote = RemoteCopies(saved, self._steps(saved.remote_every), self._record, self.progress.step)
        self._open_keeper(restored.path if restored and not together else None)
        if is_new:
            if not restored:
                keep_folder(self.spec.task.model, self.dir)
            bar = unigram_bar(self.source, self.held_out, self.spec.run.evaluate_samples)
            # Who takes over the records in a world that is formed anew began with an earlier one.
            began = None if held else passed_seconds() - (time.monotonic() - self._began)
            goes_on = self._generation.number > 1
            self._record.started(self.progress, restored, bar, began, self._run.fingerprint, goes_on)
        elif held and not self._generation.is_called:
            self._record.fault(*self._recovered.fault)
        self._notices.enter(self.brief.usd_per_second, self.world.is_first, self._open_budget())
        self._record.decided_before(self._recovered.decisions)
        self._record.decided_once(self._recovered.lasting)
        if self._generation.rung == REFORMED:
            self._record.decided_now(self._stragglers.go_on(self.progress.step, held.learnt if held else None))
        self._points.tell(self._record)
        # In the first generation all ranks are new. In a later one some may hold what they had, and do not ask.
        is_asked = self._generation.number == 1 and not is_known_sum(self.spec.task)
        hashed = hashes_differ(self.world) if is_asked else []
        for remark in (*self._under.built.remarks, *hashed) if not held else ():
            self._record.remark(remark)
        attempt = self._record.attempt if isinstance(self._record, Recorder) else 0
        self._node = NodeWatch(self.spec.run, self.dir, self.world, attempt, self._samples)
        self._done_step = self.progress.step
        self._made = together.stats if together and together.stats else self._made
        if together and together.stats and not together.is_done:
            self._done_step -= 1
            give_back(together.unrecorded, self._under)

    def _open_keeper(self, restored: Path | None) -> None:
        """Have this world's ranks keep checkpoints, which all begin with what they know. Every rank calls it.

        `restored` is the checkpoint on disk from which they go on, if they do.
        """
        often = (self.spec.run.checkpoint_every, self.spec.run.checkpoints.memory_every)
        every = tuple(self._steps(amount) for amount in often)
        known = agreed_save(self._saved, restored, self.world)
        self._keeper = CheckpointKeeper(
            self._run, self._record, self._fence, every, known, self._remote, self.progress.step
        )

    def _follow_plan(self, restored: Restored | None) -> None:
        """Go on from what was restored under the plan at hand, and make what depends on both. Every rank calls it."""
        self.progress = restored.progress if restored else Progress(0, 0)
        self._metrics = self._metrics_under(self.brief.plan)
        samples, seed = self.spec.task.samples, self.spec.task.seed
        self._writer = sample_writer(samples, self.source, self._main_objective, seed)
        copies = self.brief.plan.layout.dp_replicate if self.brief.plan.sync.is_plain else 1
        self._agreed = Agreed(remembers=copies > 1 and self._call is not None)
        if restored:
            self._agree()
        self._expected: StepBefore | None = self._step_before() if restored and not restored.data_changed else None

    def _agree(self) -> None:
        """Note the state at hand as what the ranks agree on: they have compared it, or a checkpoint was its source."""
        self._agreed.after(self.progress.step, state_tensors(self._under.built) if self._agreed.remembers else {})

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

    def _metrics_under(self, plan: Plan) -> dict[str, tuple[Metric, ...]]:
        """Return the metrics of every held-out set. Raises ConfigError for those that cannot be had under the plan."""
        measured = {"": self.held_out, **self._sets} if self.held_out else {}
        objective, cp = self._main_objective, plan.layout.cp
        return {name: metrics_of(self.spec.task.evaluate, source, objective, cp) for name, source in measured.items()}

    @property
    def _main_objective(self) -> Objective:
        return self._stepper.turns[self._stepper.main].turn.objective

    def _open_budget(self) -> RunBudgets | None:
        """Return the budgets of the run in this world, once its records have begun; the first rank counts it."""
        first = self.world.is_first
        return budget_of(self.spec.run, self.dir, self.brief.record, self.world.size) if first else None

    def _judge_of_record(self, survives: bool = False) -> BestEvaluation:
        """Return what judges evaluations, with those of the journal up to this step. Every rank calls it.

        A first rank that `survives` a world knows them: a long run's journal is not read while all wait.
        """
        spec, step, steps = self.spec.task.evaluate, self.progress.step, self.brief.steps
        values, stopped = dict[int, float](), False
        if self.world.is_first and survives:
            self._judge.forget_after(step)
            values, stopped = self._judge.values, self._stopped and was_stopped(self.dir, step, steps)
        elif self.world.is_first and step:
            values, stopped = values_on_record(self.dir, spec.judged, step), was_stopped(self.dir, step, steps)
        self._stopped = bool(self.world.share(stopped))
        return BestEvaluation(spec, steps, self.world.share(values))

    @property
    def _is_over(self) -> bool:
        """Whether training has ended before its planned end: by early stopping, or by a callback."""
        return self._stopped or self._judge.is_over

    def _step_before(self) -> StepBefore | None:
        """Return what the journal says of the step that comes next, on all ranks."""
        run = self.spec.run
        if not run.replay:
            return None
        switches = [getattr(run, name) for name in SWITCHES]
        asked = self.progress, self.brief.plan, switches, self._run.fingerprint, spec_to_dict(self.spec)
        found = expected_step(self.dir, *asked) if self.world.is_first else None
        shared: StepBefore | None = self.world.share(found)
        return shared

    def _open_record(self) -> Recorder:
        """Return what rank 0 records by."""
        if self._lock is None:  # this process was not the first rank so far
            self._lock = take(self.dir)
        self._fence = self._lock.check_saving
        journal = Journal(self.dir, self._lock.check, self.spec.run.group_read)
        status = StatusLine(self.brief, self._steps(self.spec.run.log_every) or 1, self._notices.steps_left)
        every: list[Sink] = [journal, status, *(open_sink(self.dir) for open_sink in self._sinks)]
        record = Recorder(self.dir, journal.attempt, self.spec, self.brief, self.world, self._meter, every)
        journal.tell_by(record.fault, record.decided)
        return record

    def _build(self, plan: Plan, world: World, root: Path | HeldByRanks | None = None) -> UnderPlan:
        self._points.starting("load", self.dir)
        plan = self._as_settled(plan, world)
        with self._telling(plan):
            # What a later generation could find in remote storage, this call has copied there from the run's directory.
            is_first = self._generation.number == 1
            under = UnderPlan(self._run, plan, world, self.source, self.brief.items_per_sample, root, is_first)
        if self.brief.read_steps is not None:
            under.read_until(self.brief.read_steps)
        self._points.bind(under.built.stepper)
        watch_updates(under.built.stepper.last_update)
        run = self.spec.run
        looks_every = self._steps(run.health.recompute_every)
        if looks_every:
            self._second_look = SecondLook(looks_every, plan, world, run.deterministic, self._second_look)
        self._stragglers = Stragglers(run.health, world, under, self.dir)
        self._tally = RankTally(world)
        if self._health is not None:
            self._health.of(under.built.stepper, world)
        self._pressure = None
        if self.spec.plan.confirms:
            self._pressure = MemoryPressure(world, under, self._meter, run.health.memory_pressure)
        return under

    def _as_settled(self, plan: Plan, world: World) -> Plan:
        """Return the plan with the micro-batch that the run has settled on so far, where it is the run's to settle."""
        if not self.spec.plan.confirms:
            return plan
        settled: int | None = world.share(settled_micro_batch(self.dir, plan) if world.is_first else None)
        return plan if settled is None else with_micro_batch(plan, settled)

    @property
    def model(self) -> nn.Module:
        """The model on this rank, laid out as the plan says."""
        return self._under.built.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What updates the model."""
        return self._under.built.optimizer

    def _told(
        self, error: BaseException, building: Plan | None = None, at: tuple[str, int] | None = None
    ) -> BaseException:
        """Return an error of this rank as the run tells it: memory that is exhausted with what it was spent on.

        Where no supervisor of ours hears of a peer's, this rank that has lost the peer says the same. `building` is the
        plan whose model and optimizer are not there yet, `at` the phase and step where no point has told them. What a
        call found no memory for on which ranks agree comes to every rank, and each tells what that one rank knows.
        """
        if is_lost_peer(error) and not is_supervised():
            return told_by_peer() or error
        together = error if isinstance(error, ExhaustedTogether) else None
        if together and (together.rank != self.world.rank or together.__cause__ is None):
            return told_together(together, None, self.world)
        if (exhausted := exhausted_by((together and together.__cause__) or error)) is None:
            return error
        plan, model, optimizer = (building, None, None) if building else (self._under.plan, self.model, self.optimizer)
        if together and together.save_step is not None:
            at = "save", together.save_step
        told = out_of_memory(
            exhausted, at or self._points.at, self.brief, plan, self.world, self._meter, model, optimizer
        )
        if together and together.save_step is None:
            return told_together(together, told, self.world)
        tell_peers(told)
        return told

    @contextlib.contextmanager
    def _telling(self, building: Plan | None = None, at: tuple[str, int] | None = None) -> Iterator[None]:
        """Return a block whose errors are told as those of a step are: a loop of the user's may call what it does."""
        try:
            yield
        except Exception as error:  # a user's model may raise anything
            told = self._told(error, building, at)
            self._let_peers_go(told, error)
            if told is error:
                raise
            raise told from error

    def _let_peers_go(self, told: BaseException, error: BaseException) -> None:
        """Leave peers of a rank that is out of memory in no collective, where no supervisor of ours ends them.

        Those that have agreed on it are in none.
        """
        have_agreed = isinstance(error, ExhaustedTogether) and error.save_step is None
        if isinstance(told, OutOfMemory) and not have_agreed and not is_supervised():
            abort_groups()

    def _leave_node(self) -> None:
        """Sample the node no more, and record what it has last been seen to do.

        Where another start has the directory meanwhile, that is for the next record to say.
        """
        self._node.close()
        with contextlib.suppress(StorageError):
            self._record.nodes(self._samples.taken())

    @property
    def _stepper(self) -> Stepper:
        return self._under.built.stepper

    def take_down(self) -> None:
        """Let go of all that the plan made, device memory included. The run's directory and its journal stay."""
        self._under.take_down()

    def _steps(self, amount: Amount | None) -> int | None:
        if amount is None:
            return None
        read = self.spec.task.selection.candidates_of(self.brief.plan.batch_samples)
        return in_steps(amount, read, self.brief.items_per_sample, self.source.samples)

    def _reformed(self) -> bool:
        """Go on in the next world with what is left of this one; return False where this process has no part in it."""
        if why_not_reformed(self.spec.task, self.brief.plan):
            return False
        is_done = self._done_step >= self.progress.step
        self._roll.stop()
        self._callbacks.put_back()
        built, plan, step = self._under.built, self.brief.plan, self.progress.step
        is_due = bool(self._check_every) and step % (self._check_every or 1) == 0  # by the spec: more are made at first
        held = hold(self._run, built, plan, self.progress, self._made, is_done, self._agreed, is_due)
        of_world = dataclasses.replace(held.state, generation=self._generation.number, rank=self.world.rank)
        held = dataclasses.replace(
            held, learnt=self._stragglers.learnt(), unrecorded=unrecorded_under(self._under), state=of_world
        )
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
