"""Training: one process's part of a run, after the plan is made and the world is joined."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import time
import weakref
from collections.abc import Generator
from typing import NoReturn

from paceline.errors import ConfigError, NothingToLearn, NumericalStop, Requeue, StorageError
from paceline.run.loop.between_steps import BetweenSteps
from paceline.run.loop.evaluate import try_evaluation
from paceline.run.loop.loader import StepBatch
from paceline.run.loop.resume import Progress
from paceline.run.loop.step import StepStats
from paceline.run.loop.under_plan import refuse_replan
from paceline.run.numerics.not_finite import of_the_data
from paceline.run.process.world import World, build_mesh
from paceline.run.record.left_loop import LeftLoop, left_at, record_left
from paceline.run.record.recorder import is_echo
from paceline.run.record.remarks import all_steps_made, ended_early
from paceline.run.record.tally import SCORING
from paceline.run.survive.health.go_back import go_back
from paceline.run.survive.health.guard import RollBack, refuse_kept_rounding
from paceline.run.survive.survivor import is_lost_peer, without_frames
from paceline.run.survive.telling import as_told, let_peers_go
from paceline.run.survive.unrecorded import take_decided
from paceline.run.trace.tracer import Tracer
from paceline.spec.arguments import run_directory
from paceline.spec.plan import Plan
from paceline.task.data.rows.packed import for_device
from paceline.task.models.factory import gives_weights
from paceline.task.optimizer.groups import freezing
from paceline.task.optimizer.schedule import learning_rate


class Training(BetweenSteps):
    """Iterates over the global batches of a task and makes one update with each."""

    def _begin(self) -> None:
        super()._begin()
        self._step_seconds = self._data_seconds = 0.0
        own = weakref.proxy(self)  # a run that nobody uses any more is gone at once, with its memory and its lock
        self._tracer = Tracer(self.dir, self.world, lambda told: own._record.traced(told))
        self._unended: weakref.finalize[..., Training] | None = None  # an end that waits for its reason
        self._make_up()

    def replan(self, plan: Plan, world: World | None = None) -> None:
        """Go on under another plan from this moment. Every rank calls it between two steps.

        The state is saved as a checkpoint, what the plan made is taken down, and the new plan's is built and restored.
        `world` is one that this process has joined since it saved the run and left the world before (`join_next`); the
        newest checkpoint is restored there. Forecasts in the journal stay those of the first plan.

        Raises ConfigError for a plan of another global batch, for one under which a metric cannot be had, and for a
        model that was given as an object, which the plan before has changed in place.
        """
        before, has_left = self.brief.plan, world is not None and world is not self.world
        if not has_left:
            self._roll.meet("run.replan", self.progress.step)
        build_mesh(plan.layout, world or self.world)  # raises where the plan is not for it, while all is as it was
        refuse_replan(self.spec.task, before, plan)
        self._metrics_under(plan)
        if world is not None and has_left:
            self._change_world(world)
        else:
            self._tell_health()
            self._save_and_heed()
        self.take_down()
        self.brief = dataclasses.replace(self.brief, plan=plan)
        self._under = self._build(plan, self.world)
        assert self._under.restored is not None
        reached = self.progress.step
        self._follow_plan(self._under.restored)
        if has_left:  # copies in memory go to other nodes than before
            self._open_keeper(self._under.restored.path)
        if self.progress.step < reached:  # the world was left after steps that no checkpoint has
            self._judge.forget_after(self.progress.step)
            self._done_step, self._went_back = self.progress.step, True
        self._record.replanned(self.progress.step, before, plan)
        self._enter_notices()

    # ---- the loop --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[StepBatch, None, None]:
        with self._busy():
            pass  # raises where the run was ended meanwhile
        if self._unended is not None:
            self._unended.detach()  # the error was caught, and the loop goes on
        self._stop.watch()
        self._tracer.watch(self.progress.step + 1)
        if self.progress.step >= self.brief.steps:
            self._record.say(all_steps_made(self.brief.steps, run_directory(self.spec)))
        elif self._is_over:
            self._record.say(ended_early(self.progress.step, run_directory(self.spec)))
        try:
            self._hook("on_start", self.progress.step)
            is_first = self.progress.step == 0 and not self._joins
            if is_first and self._in_steps.evaluate_every and gives_weights(self.spec.task.model):
                self._evaluate()  # what the weights can do before they are trained
            elif self._in_steps.evaluate_every and self._is_fresh:
                self._try_metrics()
            while self.progress.step < self.brief.steps and not (self._is_over or self._is_spent):
                before = self.progress.step
                self._went_back = False
                self._tracer.at(before + 1, self.world, self._points, self.model)
                if self._tracer.is_tracing:
                    self._leaks.begin_anew()
                batch = self._taken(before + 1)
                yield batch
                if self.progress.step == before and not self._went_back:
                    raise ConfigError(
                        "a batch was taken and no step was made with it",
                        "the loop body did not call run.step(batch)",
                        "call stats = run.step(batch) once for every batch",
                    )
            self._join_peers()
            self._hook("on_end", self.progress.step)
            self._points.leaves_loop(self.progress.step)  # the first rank may upload for long, and its peers be gone
            self._keeper.close(self.world)
            if self.progress.step >= self._first_step:
                self._tell_moved()
            self._points.reached("ended", self.progress.step)
            self._tracer.close(self.model)
            self._ended("stopped" if self._is_spent else "complete")
        except GeneratorExit:
            self._left(left_at(sys._getframe().f_back))
            raise
        except BaseException as error:
            self._fail(error)
        finally:
            self._tracer.close()
            self._stop.release()

    @property
    def _is_fresh(self) -> bool:
        """Whether a run is yet to make the first step of its start: no rank of it was in a world before."""
        return self._generation.number == 1 and self._first_step == self.progress.step + 1 <= self.brief.steps

    def _try_metrics(self) -> None:
        """Raise the error of a metric that cannot be had, before training and not at the first evaluation."""
        with self._busy(), self._telling():
            for name, source in {"": self.held_out, **self._sets}.items():
                if source is not None and (metrics := self._metrics.get(name)):
                    held_out = for_device(source, self.world.device.type, self.spec.task.model)
                    samples = self.spec.run.evaluate_samples
                    try_evaluation(self._stepper, held_out, samples, self._under.data_rank, metrics)

    def _taken(self, step: int) -> StepBatch:
        """Return this rank's part of the batch of a step that the loop begins with, and read further ones ahead."""
        with self._busy():
            self._points.reached("data", step)
            began = time.perf_counter()
            self._position = self._passed_over.position_from(self.progress.position)
            batch = self._under.batches.take(self._position, step)
            self._under.read_ahead(batch, self.brief.steps, self._passed_over.position_from)
            self._data_seconds = time.perf_counter() - began
            self._points.reached("loop", step)
            return batch

    def _end_idle(self, because: str) -> None:
        """Save and end a run of one process that stands still between two steps; called beside its main thread."""
        step = self.progress.step
        self._tell_health()
        self._hook("on_save", step)
        path = self._keeper.save_or_keep(self._under.built, self.brief.plan, self.world, self.progress)
        self._record.stopped(step, because, path)
        self._ended("requeue", Requeue(because))

    def _left(self, loop: LeftLoop | None) -> None:
        """Record that the loop was left before its end: at once, or as soon as it shows whether an error was why."""
        if self._idle is not None:
            self._idle.left()
        self._points.leaves_loop(self.progress.step)
        self._tell_health()
        self._keeper.finish()
        self._leave_node()
        seconds = time.monotonic() - self._began
        if loop is None or loop.on_purpose:
            self._record.ended("stopped", self.progress.step, seconds)
        else:
            self._unended = weakref.finalize(self, record_left, self._record, loop, self.progress.step, seconds)

    def step(self, batch: StepBatch) -> StepStats:
        """Make one optimizer update with the batch and return what it did, over all ranks.

        Writes the journal, and evaluates, saves and stops when it is time to. Raises Requeue (exit code 75) after the
        ranks have agreed to stop and saved, NumericalStop (6) where the loss is no longer a number.
        """
        with self._busy():
            try:
                if batch.position != self._position or batch.step <= self.progress.step:
                    raise ConfigError(
                        f"the batch of step {batch.step} is not the next one",
                        f"step {self.progress.step + 1} comes next",
                        "give run.step the batch that the loop has just taken",
                    )
                return self._until(batch.step, batch)
            except BaseException as error:
                self._fail(error)

    def _until(self, wanted: int, batch: StepBatch) -> StepStats:
        """Make the steps up to one, in further worlds where peers are lost, and return what it did.

        Those are more than one where the state that is left is older. Who calls the loop sees each step once.
        """
        following: StepBatch | None = batch
        while self.progress.step < wanted or self._done_step < wanted or self._starts_again:
            lost: BaseException | None = None
            try:
                if self._make_up():
                    continue
                if self._starts_again:  # as ranks do that have come later, before they take a batch
                    self._hook("on_start", self.progress.step)
                    self._starts_again = False
                    continue
                following = following or self._next_batch()
                try:
                    self._made = made = self._update(following)
                except RollBack as spike:
                    self._roll.begins(-1)  # what it has begun is not made
                    return self._go_back(following, spike)
                self._after(made, following)
                if self._called_away and not self._reformed():
                    raise Requeue("the supervisor has no further world for this rank")
            except Exception as error:  # a world that is ended at the supervisor's word has errors of any kind
                if not is_lost_peer(error):
                    raise
                lost = without_frames(error)
            following = None
            if lost is not None and not self._reformed():
                raise lost
        assert self._made is not None
        return self._made

    def _make_up(self) -> bool:
        """Do the duties of the last step where they were cut short in the world before; return whether they were."""
        if self._done_step == self.progress.step:
            return False
        assert self._made is not None
        # A call to this world has been answered, and whoever was asked to stop says so with the next step again.
        made = dataclasses.replace(self._made, stop_requested=False)
        self._after(made, self._batch(made.position_before, made.step), is_made_up=True)
        return True

    def _next_batch(self) -> StepBatch:
        """Return this rank's part of the batch of the next step."""
        self._position = self._passed_over.position_from(self.progress.position)
        return self._batch(self._position, self.progress.step + 1)

    def _batch(self, position: int, step: int) -> StepBatch:
        """Return this rank's part of the batch of a step."""
        return self._under.batches.take(position, step)

    def _join_peers(self) -> None:
        """Come to a step, or the end, with all ranks of a world that is formed anew: loops may ask for more before."""
        if self.progress.step < self._meets_until:
            step, joins = self.progress.step, {"run.evaluate": self.evaluate, "run.save": self.save}
            self._roll.come_to_step(step, joins, lambda: self._points.waits(step + 1))
            self._points.has_met(step + 1)

    def _update(self, batch: StepBatch) -> StepStats:
        self._join_peers()
        self._roll.begins(batch.step)
        self._tally.begins(self._data_seconds)
        began = time.perf_counter()
        task, counts = self.spec.task, self._in_steps
        self._mark()
        lr = learning_rate(task.schedule, task.optimizer.lr, batch.step, self.brief.steps, counts.warmup, counts.decay)
        self._under.decided = freezing(task.optimizer, batch.step)  # anew, where a step is made again
        growth = self._under.growth
        small_norm, small = math.nan, 0
        if growth is not None:
            growth.begin(batch.step, batch.samples)
            lr *= growth.rate_factor(batch.samples)
            if small := growth.small(batch.step, batch.samples):
                with self._tally.within(SCORING):
                    small_norm = self._stepper.grad_norm_of(self._under.first_of(batch, small))
        self._roll.begins(batch.step - 1)  # where a hook evaluates, all ranks come to it before they begin the step
        decided = self._hook("before_step", batch.step, lr=lr)
        self._roll.begins(batch.step)
        lr = decided.lr[1] if decided.lr else lr
        if decided.skip is not None:
            refuse_kept_rounding(self.brief.plan, f"a callback leaves out the update of step {batch.step}")
        self._stepper.leaves_out = decided.skip is not None
        if self._under.selection is not None:
            with self._tally.within(SCORING):
                batch = self._under.selection.choose(batch)
        if self._second_look is not None:
            self._record.decided_now(self._second_look.check(self._stepper, batch, self._step_seconds))
        on_cuda = self.world.device.type == "cuda"
        try:
            stats = self._stepper.step(
                batch,
                lr,
                stop_requested=self._wants_to_stop(),
                while_busy=self._under.batches.read_begun if on_cuda else None,
            )
        except NothingToLearn as error:
            raise self._named(error, batch) from error
        except NumericalStop as error:
            raise of_the_data(error, batch, self._main_objective, self.world) from error
        self.progress = Progress(step=batch.step, position=stats.position_after)
        if growth is not None:
            at = batch.step, batch.position, batch.samples
            if small and growth.measured(*at, stats.grad_norm, small, small_norm):
                self._under.batches.forget()  # the batch that is being read has the size of this one
            self._record.decided_in(batch.step, growth.take())
        seconds = stats.seconds
        total = time.perf_counter() - began + self._data_seconds
        seconds["data"] = self._data_seconds
        seconds["other"] = max(0.0, total - sum(seconds.values()))
        seconds["total"] = self._step_seconds = total
        self._tally.ended()
        return stats

    def _go_back(self, batch: StepBatch, spike: RollBack) -> StepStats:
        """Go on from the newest checkpoint and pass over the batch from now on; without one, leave out its update."""
        self._tell_health()
        self._keeper.finish()
        begun = go_back(batch, spike, self._under, self._run, self._passed_over, self.progress)
        self._record.decided_now(begun.decisions)
        self.progress, self._went_back, self._expected = begun.progress, True, None
        self._judge.forget_after(begun.progress.step)
        self._done_step = begun.progress.step
        if begun.is_restored:  # else the state is the one that was compared last
            self._agree()
        return begun.stats

    def _wants_to_stop(self) -> bool:
        self._stop.because = self._stop.because or self._notices.look()
        return bool(self._stop.because) or self._is_called()

    def _fail(self, error: BaseException) -> NoReturn:
        """Record an error of this rank, let its peers go, and raise the error as the run tells it."""
        told = as_told(error, self.world, functools.partial(self._out_of_memory, None, None))
        self.failed(told)
        let_peers_go(told, error)
        if told is error:
            raise error
        raise told from error

    def failed(self, error: BaseException) -> None:
        """Record that the run ends with an error, after a save under way; a dead peer is not waited for."""
        if not is_echo(error):  # else the step is made again
            if not self._under.is_down:  # as between two worlds, of which the next one was not built
                with contextlib.suppress(StorageError):  # what the end of the run says comes first
                    self._record.decided_in(self.progress.step + 1, take_decided(self._under))
            with contextlib.suppress(StorageError, RuntimeError):  # the latter of a device that is broken
                self._tell_health()
        try:
            self._keeper.abandon() if is_echo(error) else self._keeper.finish()
        except KeyboardInterrupt:
            self._keeper.abandon()
        self._ended("requeue" if isinstance(error, Requeue) else "failed", error)
