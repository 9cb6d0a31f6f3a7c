"""A run on this rank in the world it is in: built under its plan, and taken down."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from paceline.checkpoint.tiers.held_by_ranks import HeldByRanks
from paceline.checkpoint.tiers.remote import RUN
from paceline.errors import OutOfMemory, StorageError
from paceline.lock import RunLock, take
from paceline.run.callbacks.callbacks import Callbacks
from paceline.run.evaluate.best import BestEvaluation, judged_so_far
from paceline.run.evaluate.samples import sample_writer
from paceline.run.loop.evaluate import unigram_bar
from paceline.run.loop.resume import KeepsState, Progress, Restored, RunIdentity, state_tensors
from paceline.run.loop.sources import open_data
from paceline.run.loop.step import Stepper, StepStats
from paceline.run.loop.under_plan import UnderPlan
from paceline.run.memory.exhausted import out_of_memory
from paceline.run.memory.spent import MemoryMeter
from paceline.run.observe.health.judge import HealthJudge
from paceline.run.observe.health.run_health import TrainingHealth
from paceline.run.observe.node import SamplesOfFirst
from paceline.run.observe.observing import NodeWatch
from paceline.run.process.alike import hashes_differ
from paceline.run.process.roll_call import RollCall
from paceline.run.process.world import World
from paceline.run.record.journal import Journal
from paceline.run.record.recorder import Recorder, SilentRecorder
from paceline.run.record.sink import OpenSink, Sink
from paceline.run.record.status import StatusLine
from paceline.run.record.tally import RankTally
from paceline.run.survive.agreed import Agreed
from paceline.run.survive.budget import RunBudgets, budget_of
from paceline.run.survive.health.passed_over import PassedOver
from paceline.run.survive.health.pressure import MemoryPressure, as_settled
from paceline.run.survive.health.second_look import SecondLook
from paceline.run.survive.health.stragglers import Stragglers
from paceline.run.survive.listener import listen_for_abort, watch_updates
from paceline.run.survive.notice import Notices
from paceline.run.survive.points import points_of
from paceline.run.survive.recovered import Recovered, ToldFault
from paceline.run.survive.replay import step_on_record
from paceline.run.survive.saving.keeper import CheckpointKeeper
from paceline.run.survive.saving.known_saves import KnownSave, agreed_save, seconds_on_record
from paceline.run.survive.saving.remote_copies import RemoteCopies
from paceline.run.survive.saving.run_name import RunName
from paceline.run.survive.survivor import (
    Brought,
    Together,
    bring_together,
    call_of_supervisor,
    is_lost_peer,
    let_go,
    why_not_reformed,
)
from paceline.run.survive.telling import telling
from paceline.run.survive.unrecorded import give_back
from paceline.spec.journal.timing.clock import passed_seconds
from paceline.spec.load import Spec
from paceline.spec.plan import Plan
from paceline.spec.steps.counts import step_counts
from paceline.spec.sync import refuse_between
from paceline.supervise.told.brief import Brief
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


class InWorld:
    """What a run has on this rank in the world that the rank is in. The training loop stands on it."""

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
        samples, has_held_out = self.source.samples, bool(self.held_out)
        self._in_steps = counts = step_counts(
            spec, brief.steps, brief.plan.batch_samples, brief.items_per_sample, samples, has_held_out
        )
        refuse_between(
            brief.plan.sync,
            {
                "task.stop": brief.steps,
                "run.evaluate_every": counts.evaluate_every,
                "task.samples.every": counts.write_every if task.samples.prompts else None,
            },
        )
        peak, schedule = task.optimizer.lr, task.schedule
        course = course_of(schedule, peak, brief.steps, counts.warmup, counts.decay)
        self._callbacks = Callbacks(task.callbacks)
        kept: dict[str, KeepsState] = {"callbacks": self._callbacks} if task.callbacks else {}
        self._run_name = kept[RUN] = RunName(bool(spec.run.checkpoints.remote))
        self._run = RunIdentity(run_dir, spec, self.source.fingerprint, course, described(self.source), kept)
        observe, self._samples = spec.run.observe, SamplesOfFirst()
        self._health = TrainingHealth(counts.health_every, HealthJudge()) if observe.health else None
        told = seconds_on_record(run_dir) if world.is_first and spec.run.recovery.notice is not None else 0.0
        self._saved = KnownSave(seconds=told)
        self._second_look: SecondLook | None = None
        self._made: StepStats | None = None  # what the last step did
        self._done_step = 0  # the last step of which all that follows is done
        self._stopped: bool = False  # whether a callback has ended training
        self._record: Recorder | SilentRecorder = SilentRecorder()
        self._is_on_record = False  # whether this rank has begun records: those of another are taken over with a world
        self._unrecorded_faults: list[ToldFault] = []  # which are this rank's to record when it begins
        self._notices = Notices(spec.run, self._generation.begun_after, self._generation.usd_before)
        self._enter(None)
        self._begin()

    def _begin(self) -> None:
        """Do what follows once, after the first world is entered. What stands on this class does it."""

    def _open_data(self) -> None:
        """Open what is trained on and what is held out. Every rank calls it."""
        with self._telling(self.brief.plan, ("data", 0)):
            self.source, self.held_out, self._sets = open_data(self.spec.task, self.world)

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
        together, refused = self._build_on(held)
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
        is_new = self.world.is_first and not self._is_on_record
        if isinstance(self._record, SilentRecorder) and is_new:  # else the world before ended as it began them
            self._record = self._open_record()
        if is_new or not held:  # who goes on with the records goes on with the copies that are under way
            saved, every = self.spec.run.checkpoints, self._in_steps.remote_every
            self._remote = RemoteCopies(saved, every, self._record, self.progress.step)
        self._open_keeper(restored.path if restored and not together else None)
        if is_new:
            if not restored:
                keep_folder(self.spec.task.model, self.dir)
            bar = unigram_bar(self.source, self.held_out, self.spec.run.evaluate_samples)
            # Who takes over the records in a world that is formed anew began with an earlier one.
            began = None if held else passed_seconds() - (time.monotonic() - self._began)
            goes_on = self._generation.number > 1
            self._record.started(self.progress, restored, bar, began, self._run.fingerprint, goes_on)
            self._is_on_record = True
            while self._unrecorded_faults:
                self._record.fault(*self._unrecorded_faults.pop(0))
        if refused:
            what = f"the state after step {self._generation.rescue_step} that ranks were left with"
            self._record.decided("restore", what, f"step {self.progress.step}", refused)
        self._enter_notices()
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

    def _build_on(self, held: Brought | None) -> tuple[Together | None, str]:
        """Build on what the ranks of this world bring together, or on the newest checkpoint. Every rank calls it.

        Returns what was brought together and is restored, if that is, and why it is not where it was meant to be: a
        value may be lost between the moment in which a rank has told of its state and that in which the rank sends it.
        """
        plan, together = self.brief.plan, None
        try:
            together = bring_together(self.world, self._generation, held)
            self._under = self._build(plan, self.world, together.root if together else None)
            refused = ""
        except StorageError as error:  # on all ranks
            if not self._generation.rescue or is_lost_peer(error):
                raise
            refused = f"{error.what}: {error.because}"
        let_go(together, self.world)
        if refused:
            self._under = self._build(plan, self.world)
        return (None if refused else together), refused

    def _open_keeper(self, restored: Path | None) -> None:
        """Have this world's ranks keep checkpoints, which all begin with what they know. Every rank calls it.

        `restored` is the checkpoint on disk from which they go on, if they do.
        """
        every = self._in_steps.checkpoint_every, self._in_steps.memory_every
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
        is_known = restored and not restored.data_changed
        plan = self.brief.plan
        self._expected = step_on_record(self._run, self.world, self.progress, plan) if is_known else None

    def _agree(self) -> None:
        """Note the state at hand as what the ranks agree on: they have compared it, or a checkpoint was its source."""
        self._agreed.after(self.progress.step, state_tensors(self._under.built) if self._agreed.remembers else {})

    def _metrics_under(self, plan: Plan) -> dict[str, tuple[Metric, ...]]:
        """Return the metrics of every held-out set. Raises ConfigError for those that cannot be had under the plan."""
        measured = {"": self.held_out, **self._sets} if self.held_out else {}
        objective, cp = self._main_objective, plan.layout.cp
        return {name: metrics_of(self.spec.task.evaluate, source, objective, cp) for name, source in measured.items()}

    @property
    def _main_objective(self) -> Objective:
        return self._stepper.turns[self._stepper.main].turn.objective

    def _enter_notices(self) -> None:
        """Look for notices in this world, whose price counts from here on."""
        world = self.world
        self._notices.enter(self.brief.usd_per_second, world.is_first, self._open_budget(), world.local_rank == 0)

    def _open_budget(self) -> RunBudgets | None:
        """Return the budgets of the run in this world, once its records have begun; the first rank counts it."""
        first = self.world.is_first
        return budget_of(self.spec.run, self.dir, self.brief.record, self.world.size) if first else None

    def _judge_of_record(self, survives: bool = False) -> BestEvaluation:
        """Return what judges evaluations, with those of the journal up to this step. Every rank calls it.

        A first rank that `survives` a world knows them: a long run's journal is not read while all wait.
        """
        known = (self._judge, self._stopped) if survives else None
        spec, step, steps = self.spec.task.evaluate, self.progress.step, self.brief.steps
        judge, self._stopped = judged_so_far(self.dir, self.world, spec, step, steps, known)
        return judge

    @property
    def _is_over(self) -> bool:
        """Whether training has ended before its planned end: by early stopping, or by a callback."""
        return self._stopped or self._judge.is_over

    def _open_record(self) -> Recorder:
        """Return what rank 0 records by."""
        if self._lock is None:  # this process was not the first rank so far
            self._lock = take(self.dir)
        self._fence = self._lock.check_saving
        journal = Journal(self.dir, self._lock.check, self.spec.run.group_read)
        status = StatusLine(self.brief, self._in_steps.log_every, self._notices.steps_left)
        every: list[Sink] = [journal, status, *(open_sink(self.dir) for open_sink in self._sinks)]
        record = Recorder(self.dir, journal.attempt, self.spec, self.brief, self.world, self._meter, every)
        journal.tell_by(record.fault, record.decided)
        return record

    def _build(self, plan: Plan, world: World, root: Path | HeldByRanks | None = None) -> UnderPlan:
        self._points.starting("load", self.dir)
        plan = as_settled(self._run, plan, world)
        with self._telling(plan):
            # What a later generation could find in remote storage, this call has copied there from the run's directory.
            is_first = self._generation.number == 1
            under = UnderPlan(self._run, plan, world, self.source, self.brief.items_per_sample, root, is_first)
        if self.brief.read_steps is not None:
            under.read_until(self.brief.read_steps)
        self._points.bind(under.built.stepper)
        watch_updates(under.built.stepper.last_update)
        run = self.spec.run
        if looks_every := self._in_steps.recompute_every:
            self._second_look = SecondLook(looks_every, plan, world, run.deterministic, self._second_look)
        self._stragglers = Stragglers(run.health, world, under, self.dir)
        self._tally = RankTally(world)
        if self._health is not None:
            self._health.of(under.built.stepper, world)
        self._pressure = None
        if self.spec.plan.confirms:
            self._pressure = MemoryPressure(world, under, self._meter, run.health.memory_pressure)
        return under

    @property
    def model(self) -> nn.Module:
        """The model on this rank, laid out as the plan says."""
        return self._under.built.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What updates the model."""
        return self._under.built.optimizer

    def _out_of_memory(
        self, building: Plan | None, at: tuple[str, int] | None, exhausted: BaseException, save_step: int | None = None
    ) -> OutOfMemory:
        """Return the error of an exhausted memory. Arguments as of `_telling`; `save_step` is that of a failed save."""
        plan, model, optimizer = building or self._under.plan, None, None
        if not building and not self._under.is_down:
            model, optimizer = self.model, self.optimizer
        at = ("save", save_step) if save_step is not None else at or self._points.at
        return out_of_memory(exhausted, at, self.brief, plan, self.world, self._meter, model, optimizer)

    def _telling(
        self, building: Plan | None = None, at: tuple[str, int] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block whose errors are told as those of a step are: a loop of the user's may call what it does.

        `building` is the plan whose model and optimizer are not there yet, `at` the phase and step where no point has
        told them.
        """
        return telling(self.world, functools.partial(self._out_of_memory, building, at))

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
