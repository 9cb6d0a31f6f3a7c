"""Training: one process's part of a run, after the plan is made and the world is joined."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
import weakref
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from paceline.errors import ConfigError, Requeue, StorageError
from paceline.run.callbacks.callbacks import CallbackDecisions, moment_of
from paceline.run.evaluate.best import called_off
from paceline.run.loop.evaluate import EvaluationResult, evaluate
from paceline.run.loop.in_world import InWorld
from paceline.run.loop.loader import StepBatch
from paceline.run.loop.remarks import all_steps_made, data_faults, ended_early, remarks_on_batch
from paceline.run.loop.resume import Progress
from paceline.run.loop.step import StepStats
from paceline.run.loop.under_plan import refuse_replan
from paceline.run.memory.leaks import LeakWatch
from paceline.run.memory.spent import spent_now, spent_on
from paceline.run.numerics.invariants import check_agreement, is_due, numbers_of
from paceline.run.process.world import World, build_mesh
from paceline.run.record.left_loop import LeftLoop, left_at, record_left
from paceline.run.record.recorder import is_echo
from paceline.run.record.samples_read import ids_read
from paceline.run.record.tally import EVALUATING, SAVING
from paceline.run.survive.health.go_back import go_back
from paceline.run.survive.health.guard import RollBack
from paceline.run.survive.health.pressure import LOOKS_EVERY
from paceline.run.survive.idle import IdleWatch
from paceline.run.survive.replay import hold_against, rounding_of
from paceline.run.survive.survivor import is_lost_peer, without_frames
from paceline.run.trace.tracer import Tracer
from paceline.run.updates.distance_moved import moved
from paceline.spec.arguments import run_directory
from paceline.spec.plan import Plan
from paceline.spec.sync import refuse_between
from paceline.spec.task import ModelSpec
from paceline.supervise.signals import StopFlag
from paceline.task.data.protocol import Source
from paceline.task.data.rows.mixed import MixedSource
from paceline.task.data.rows.packed import for_device
from paceline.task.models.factory import gives_weights
from paceline.task.models.sizes import is_named
from paceline.task.objective import Objective
from paceline.task.optimizer.groups import freezing
from paceline.task.optimizer.schedule import learning_rate
from paceline.task.turns import objective_of


class Training(InWorld):
    """Iterates over the global batches of a task and makes one update with each."""

    def _begin(self) -> None:
        self._step_seconds = self._data_seconds = 0.0
        self._stop = StopFlag()
        own = weakref.proxy(self)  # a run that nobody uses any more is gone at once, with its memory and its lock
        self._tracer = Tracer(self.dir, self.world, lambda told: own._record.traced(told))
        self._leaks = LeakWatch(self.brief.usable_bytes)
        self._idle: IdleWatch | None = None  # of a `Run` alone: other loops are ours
        self._is_spent = False  # whether a budget has ended the run
        self._unended: weakref.finalize[..., Training] | None = None  # an end that waits for its reason
        # Until the first step has said what the built-in decoder does not read; a survey has said it of other models.
        self._objective: Objective | None = None
        task = self.spec.task
        if isinstance(task.model, ModelSpec) and is_named(task.model.name):
            self._objective = objective_of(task, self.source.unit)
        self._make_up()

    def replan(self, plan: Plan, world: World | None = None) -> None:
        """Go on under another plan from this moment. Every rank calls it between two steps.

        The state is saved as a checkpoint, what the plan made is taken down, and the new plan's is built and restored.
        Forecasts in the journal stay those of the first plan. Raises ConfigError for a plan of another global batch,
        and for a model that was given as an object, which the plan before has changed in place.
        """
        world, before = world or self.world, self.brief.plan
        build_mesh(plan.layout, world)  # raises where the plan is not for this world, while all is as it was
        refuse_replan(self.spec.task, before, plan)
        self.save()
        self.take_down()
        self.world, self.brief = world, dataclasses.replace(self.brief, plan=plan)
        self._under = self._build(plan, world)
        assert self._under.restored is not None
        self.progress = self._under.restored.progress
        self._record.replanned(self.progress.step, before, plan)
        self._notices.enter(self.brief.usd_per_second, self.world.is_first, self._open_budget())

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
            if self.progress.step == 0 and self._evaluate_every and gives_weights(self.spec.task.model):
                self.evaluate()  # what the weights can do before they are trained
            while self.progress.step < self.brief.steps and not (self._is_over or self._is_spent):
                before = self.progress.step
                self._went_back = False
                self._tracer.at(before + 1, self.world, self._points, self.model)
                batch = self._taken(before + 1)
                yield batch
                if self.progress.step == before and not self._went_back:
                    raise ConfigError(
                        "a batch was taken and no step was made with it",
                        "the loop body did not call run.step(batch)",
                        "call stats = run.step(batch) once for every batch",
                    )
            self._hook("on_end", self.progress.step)
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

    def _busy(self) -> AbstractContextManager[None]:
        """Return a block in which the run is not idle. Raises where it was ended since nobody used it."""
        return self._idle.busy() if self._idle is not None else nullcontext()

    def _end_idle(self, because: str) -> None:
        """Save and end a run of one process that stands still between two steps; called beside its main thread."""
        step = self.progress.step
        self._hook("on_save", step)
        path = self._keeper.save_or_keep(self._under.built, self.brief.plan, self.world, self.progress)
        self._record.stopped(step, because, path)
        self._ended("requeue", Requeue(because))

    def _left(self, loop: LeftLoop | None) -> None:
        """Record that the loop was left before its end: at once, or as soon as it shows whether an error was why."""
        if self._idle is not None:
            self._idle.left()
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
                if batch.position != self._position:
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
        while self.progress.step < wanted or self._done_step < wanted:
            lost: BaseException | None = None
            try:
                if self._make_up():
                    continue
                following = following or self._next_batch()
                try:
                    self._made = made = self._update(following)
                except RollBack as spike:
                    return self._go_back(following, spike)
                self._after(made, following)
                if self._called_away and not self._reformed():
                    raise Requeue("the supervisor has no further world for this rank")
            except (RuntimeError, StorageError) as error:
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
        self._after(self._made, self._batch(self._made.position_before, self._made.step))
        return True

    def _next_batch(self) -> StepBatch:
        """Return this rank's part of the batch of the next step."""
        self._position = self._passed_over.position_from(self.progress.position)
        return self._batch(self._position, self.progress.step + 1)

    def _batch(self, position: int, step: int) -> StepBatch:
        """Return this rank's part of the batch of a step."""
        return self._under.batches.take(position, step)

    def _update(self, batch: StepBatch) -> StepStats:
        self._tally.begins(self._data_seconds)
        began = time.perf_counter()
        task = self.spec.task
        lr = learning_rate(task.schedule, task.optimizer.lr, batch.step, self.brief.steps, self._warmup, self._decay)
        self._record.decided_now(freezing(task.optimizer, batch.step))
        growth = self._under.growth
        small_norm, small = math.nan, 0
        if growth is not None:
            growth.begin(batch.step, batch.samples)
            lr *= growth.rate_factor(batch.samples)
            if small := growth.small(batch.step, batch.samples):
                small_norm = self._stepper.grad_norm_of(self._under.first_of(batch, small))
        decided = self._hook("before_step", batch.step, lr=lr)
        lr = decided.lr[1] if decided.lr else lr
        self._stepper.leaves_out = decided.skip is not None
        if self._under.selection is not None:
            batch = self._under.selection.choose(batch)
        if self._second_look is not None:
            self._record.decided_now(self._second_look.check(self._stepper, batch, self._step_seconds))
        on_cuda = self.world.device.type == "cuda"
        stats = self._stepper.step(
            batch,
            lr,
            stop_requested=self._wants_to_stop(),
            while_busy=self._under.batches.read_begun if on_cuda else None,
        )
        self.progress = Progress(step=batch.step, position=stats.position_after)
        if growth is not None:
            if small and growth.measured(batch.step, batch.samples, stats.grad_norm, small, small_norm):
                self._under.batches.forget()  # the batch that is being read has the size of this one
            self._record.decided_now(growth.take())
        seconds = stats.seconds
        total = time.perf_counter() - began + self._data_seconds
        seconds["data"] = self._data_seconds
        seconds["other"] = max(0.0, total - sum(seconds.values()))
        seconds["total"] = self._step_seconds = total
        self._tally.ended()
        return stats

    def _go_back(self, batch: StepBatch, spike: RollBack) -> StepStats:
        """Go on from the newest checkpoint and pass over the batch from now on; without one, leave out its update."""
        self._keeper.finish()
        begun = go_back(batch, spike, self._under, self._run, self._passed_over, self.progress)
        self._record.decided_now(begun.decisions)
        self.progress, self._went_back = begun.progress, True
        self._judge.forget_after(begun.progress.step)
        self._done_step = begun.progress.step
        return begun.stats

    def _wants_to_stop(self) -> bool:
        self._stop.because = self._stop.because or self._notices.look()
        return bool(self._stop.because) or self._is_called()

    def _is_called(self) -> bool:
        """Return whether the supervisor has another world for this run, which is entered between two steps."""
        return self._call is not None and self._call.exists()

    # ---- between steps ---------------------------------------------------------------------------------------------

    def _after(self, stats: StepStats, batch: StepBatch) -> None:
        scaler, step, last = self._stepper.scaler, stats.step, stats.step == self.brief.steps
        self._keeper.poll()
        ids = ids_read(batch, self.world, self.brief.plan.layout) if self.spec.run.record_samples else None
        if self._expected is not None:
            ids = self.world.share(ids) if self.spec.run.record_samples else None  # every rank holds it against them
            rounding = rounding_of(self.brief.plan.precision, self.spec.task.model)
            self._record.replayed(hold_against(self._expected, stats, ids, rounding))
            self._expected = None
        self._record.step(stats, scaler.scale if scaler else None, ids)
        self._hook("after_step", step, stats=stats)
        last = last or self._stopped
        chosen = self._under.selection.take() if self._under.selection is not None else None
        if chosen is not None:
            self._record.selected(chosen)
        self._record.recovered(self._recovered.stepped())
        self._record.decided_now(self._stepper.guard.take() if self._stepper.guard else ())
        self._points.tell(self._record)
        for remark in remarks_on_batch(self._objective, batch.micro_batches[0].data) if self._objective else ():
            self._record.remark(remark)
        self._objective = None
        if last or batch.position == 0:
            self._measure_memory()
        self._points.reached("check", step)
        self._stragglers.add(stats, batch)
        self._tally.add(stats)
        if self._health is not None and (health := self._health.after(stats)) is not None:
            self._record.health(health)
        self._node.stepped(step)
        self._record.nodes(self._samples.taken())
        self._record.decided_now([*self._under.read_decisions(), *self._notices.take()])
        if self._check_every and (is_due(step, self._first_step, self._check_every) or last):
            numbers = numbers_of(stats, scaler.scale if scaler else None, (chosen and chosen.chosen) or "")
            apart = self._stepper.sync.apart_after(step)
            check_agreement(self.model, numbers, step, self.world, self.brief.plan.layout, apart)
            self._record.decided_now(self._stragglers.compare(step))
            self._watch_memory(step)
            self._record.ranks(self._tally.over_ranks(step, last, self._under.batches.tell))
            first = self.brief.plan.layout.reads_first(self.world.rank)
            for what, because in data_faults(self.source, self.world, first):
                self._record.fault(what, because)
        if evaluates := bool(self._evaluate_every and (step % self._evaluate_every == 0 or last)):
            self._points.reached("evaluate", step)
            with self._tally.beside(EVALUATING):
                self.evaluate()
            if self._judge.is_over and not last:
                last = True
                self._record.ended_early(self._judge.decision())
        last = last or self._stopped
        if self._writer and self._write_every and (step % self._write_every == 0 or last):
            self._points.reached("evaluate", step)
            began = time.perf_counter()
            with self._tally.beside(EVALUATING):
                texts = self._writer.write(self._stepper, step)
            self._record.written(step, self._writer.spec, texts, time.perf_counter() - began)
        if isinstance(self.source, MixedSource) and (evaluates or last or stats.stop_requested):
            given = self.source.given(self.spec.task.seed, self.progress.position)
            self._record.sources(step, self.progress.position, given)
        if self._pressure and not last and is_due(step, self._first_step, self._check_every or LOOKS_EVERY):
            self._ease(step)
        self._called_away = stats.stop_requested and not last and self._is_called()
        if stats.stop_requested and not last and not self._called_away:
            self._stop_as_asked(step)
            return
        is_best = evaluates and self._judge.best is not None and self._judge.best[0] == step
        if last:
            self._save()  # as above: a second SIGINT that waits has nothing left to end
        elif is_best and self.spec.run.checkpoints.save_best:
            self.save()
        else:
            if self._keeper.tiers.due(step):
                self._points.reached("save", step)
                self._hook("on_save", step)
            with self._stop.saving(), self._tally.beside(SAVING):
                saved = self._keeper.save_if_due(self._under.built, self.brief.plan, self.world, self.progress)
            if saved:
                self._stop.interrupt_if_asked()
        self._done_step = step
        if not last:
            self._stragglers.leave(self._save)

    def _stop_as_asked(self, step: int) -> None:
        """Save and end here: for good where a budget says so, else by Requeue. Every rank calls it."""
        # A signal may reach the ranks in different steps: whoever was asked knows why.
        said = self.world.gather((self._stop.because, self._notices.is_over))
        because = next((each for each, _ in said if each), "a rank was asked to stop")
        self._is_spent = any(over for _, over in said)
        self._points.reached("save", step)
        self._hook("on_save", step)
        with self._stop.saving():
            path = self._keeper.save_or_keep(self._under.built, self.brief.plan, self.world, self.progress)
        self._record.stopped(step, because, path, "stopped" if self._is_spent else "requeue")
        if not self._is_spent:
            raise Requeue(because)
        self._done_step = step

    def _ease(self, step: int) -> None:
        """Go on with a smaller micro-batch where a rank's memory gets short. Every rank calls it between two steps."""
        assert self._pressure is not None
        plan, decisions = self._pressure.decided(step)
        if plan is not None:
            self._under.recut(plan)
            self._stragglers.rebase(plan)
        self._record.decided_now(decisions)

    def evaluate(self) -> float:
        """Return the mean loss per item on held-out samples, each counted once. Every rank calls it.

        Metrics and further sets are in the journal.
        """
        if self.held_out is None:
            raise ConfigError(
                "there is no held-out data",
                "the data set has no validation part",
                "give a pair of data sets (train, validation), or a task.data.validation_fraction above 0",
            )
        refuse_between(self.brief.plan.sync, {"an evaluation": self.progress.step})
        with self._busy():
            step, found = self.progress.step, self._measured("", self.held_out)
            sets = {name: self._measured(name, source) for name, source in self._sets.items()}
        value = self._judge.add(step, found)
        self._record.evaluation(step, found, sets)
        told = {"loss": found.loss, **found.metrics}
        told |= {f"{name}.{what}": number for name, each in sets.items()
                 for what, number in {"loss": each.loss, **each.metrics}.items()}  # fmt: skip
        self._hook("after_evaluation", step, evaluation=told)
        self._keeper.evaluated(step, found.loss, self._judge.spec.metric, self._judge.score(value))
        return found.loss

    def _measured(self, name: str, source: Source) -> EvaluationResult:
        """Return what the held-out samples of a set give. Every rank calls it."""
        samples, metrics = self.spec.run.evaluate_samples, self._metrics[name]
        held_out = for_device(source, self.world.device.type, self.spec.task.model)
        return evaluate(self._stepper, held_out, samples, self._under.data_rank, metrics)

    def save(self) -> Path:
        """Write a checkpoint and return its folder. Every rank calls it.

        A second SIGINT meanwhile raises KeyboardInterrupt when the checkpoint is there, a third one at once.
        """
        with self._busy():
            path = self._save()
        self._stop.interrupt_if_asked()
        return path

    def _save(self) -> Path:
        self._points.reached("save", self.progress.step)
        self._hook("on_save", self.progress.step)
        with self._stop.saving(), self._tally.beside(SAVING):
            return self._keeper.save_now(self._under.built, self.brief.plan, self.world, self.progress)

    def _hook(self, hook: str, step: int, **more: Any) -> CallbackDecisions:
        """Call the callbacks that have a hook, and record what they decide. Every rank calls it."""
        if not self._callbacks.has(hook):
            return CallbackDecisions()
        steps = self.brief.steps
        moment = moment_of(self.world, step, steps, self.progress.position, self._under.built, **more)
        found = self._callbacks.at(hook, moment)
        for name, numbers in found.logs:
            self._record.logged(step, name, numbers)
        if found.skip is not None:
            self._record.decided("update", "made", "left out", f"step {step}, {found.skip[0]}: {found.skip[1]}")
        if found.lr is not None:
            self._record.told_rate(step, more["lr"], *found.lr)
        if found.stop is not None and not self._stopped and step < steps:
            self._stopped = True
            self._record.ended_early(called_off(*found.stop, step, steps))
        return found

    def _watch_memory(self, step: int) -> None:
        """Tell of memory that grows from check to check. Every rank does its part."""
        spent = spent_now(self.model, self.optimizer, self._meter, self.world.maximum)
        growth = self._leaks.look(step, spent)
        if growth is not None:
            self._record.fault("memory grows", growth.because)

    def _measure_memory(self) -> None:
        components, peak = spent_on(self.model, self.optimizer, self._meter, self.world.maximum)
        self._record.memory(self.progress.step, components, peak)

    def _fail(self, error: BaseException) -> NoReturn:
        """Record an error of this rank, let its peers go, and raise the error as the run tells it."""
        told = self._told(error)
        self.failed(told)
        self._let_peers_go(told)
        if told is error:
            raise error
        raise told from error

    def failed(self, error: BaseException) -> None:
        """Record that the run ends with an error, after a save under way; a dead peer is not waited for."""
        try:
            self._keeper.abandon() if is_echo(error) else self._keeper.finish()
        except KeyboardInterrupt:
            self._keeper.abandon()
        self._ended("requeue" if isinstance(error, Requeue) else "failed", error)

    def _tell_moved(self) -> None:
        """Record how far the model is from the weights that it started from. Every rank does its part."""
        found = moved(self._under.built.model, self.spec.task, self.world, self.progress.step)
        if isinstance(found, str):
            self._record.remark(f"how far the model has moved is not known: {found}")
        else:
            self._record.moved(found)

    def _ended(self, status: str, error: BaseException | None = None) -> None:
        self._notices.close()
        self._leave_node()
        self._points.tell(self._record)
        goes_on = self._notices.goes_on() if isinstance(error, Requeue) else None
        self._record.ended(status, self.progress.step, time.monotonic() - self._began, error, goes_on)
