"""What follows a step, in one order on all ranks: records, checks, evaluations, texts, checkpoints, an early end."""

from __future__ import annotations

import gc
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, DataError, NothingToLearn, PacelineError, Requeue
from paceline.run.callbacks.callbacks import CallbackDecisions, moment_of
from paceline.run.evaluate.best import called_off
from paceline.run.loop.evaluate import EvaluationResult, evaluate
from paceline.run.loop.loader import StepBatch
from paceline.run.loop.next_world import NextWorld
from paceline.run.loop.resume import Restored
from paceline.run.loop.step import StepStats
from paceline.run.memory.leaks import LeakWatch
from paceline.run.memory.spent import spent_now, spent_on
from paceline.run.numerics.invariants import check_agreement, is_due, numbers_of
from paceline.run.record.own_counts import OwnCounts
from paceline.run.record.remarks import damage_of_all, data_faults, remarks_on_batch
from paceline.run.record.samples_read import ids_read
from paceline.run.record.tally import EVALUATING, SAVING
from paceline.run.survive.clouds.departing import departing, departure_of
from paceline.run.survive.health.pressure import LOOKS_EVERY
from paceline.run.survive.idle import IdleWatch
from paceline.run.survive.replay import hold_against, rounding_of
from paceline.run.survive.unrecorded import take_decided
from paceline.run.trace.tensors import HeldBytes, grown, grown_text, tensors_held
from paceline.run.updates.distance_moved import moved
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.sync import refuse_between
from paceline.spec.task import ModelSpec
from paceline.supervise.signals import StopFlag
from paceline.task.data.protocol import Source
from paceline.task.data.rows.mixed import MixedSource
from paceline.task.data.rows.packed import for_device
from paceline.task.data.storage.notices import HELD_OUT_LEFT_OUT, left_out_of
from paceline.task.models.sizes import is_named
from paceline.task.objective import Objective
from paceline.task.turns import objective_of


class BetweenSteps(NextWorld):
    """The duties of a rank that follow a step, and what a loop may ask for between two: evaluations and saves."""

    def _begin(self) -> None:
        self._stop = StopFlag()
        self._idle: IdleWatch | None = None  # of a `Run` alone: other loops are ours
        self._counts = OwnCounts()
        self._left_out = Counter[str]()  # why samples were left out that this rank has trained on, since the last check
        self._is_spent = False  # whether a budget has ended the run
        self._is_uncollected = True  # what imports, planning and the first looks at the model have left
        # Until the first step has said what the built-in decoder does not read; a survey has said it of other models.
        self._objective: Objective | None = None
        task = self.spec.task
        if isinstance(task.model, ModelSpec) and is_named(task.model.name):
            self._objective = objective_of(task, self.source.unit)

    def _follow_plan(self, restored: Restored | None) -> None:
        super()._follow_plan(restored)
        self._leaks = LeakWatch(self.brief.usable_bytes)  # under another plan a rank holds more, or less
        self._held: tuple[int, HeldBytes] | None = None  # the tensors at the look that told of growing memory

    def _remark(self, batch: StepBatch) -> None:
        """Say what the first steps show of the batch and of the model, and of rates that a program has set."""
        of_batch = remarks_on_batch(self._objective, batch.micro_batches[0].data) if self._objective else []
        self._objective = None
        for remark in (*of_batch, *self._counts.after_step(self.model), self._stepper.rates.take()):
            if remark:
                self._record.remark(remark)

    def _after(self, stats: StepStats, batch: StepBatch, is_made_up: bool = False) -> None:
        """Do what follows a step; `is_made_up` where a lost peer has cut that short, and what was read is counted."""
        step, counts = stats.step, self._in_steps
        self._mark()
        self._keeper.poll()
        self._keeper.refuse_exhausted(self.world)
        if not is_made_up:
            self._left_out += self._left_out_of(batch)
        self._tell_step(stats, batch)
        last = step == self.brief.steps or self._stopped
        chosen = self._tell_what_came(stats, batch, last)
        if counts.check_every and (is_due(step, self._first_step, counts.check_every) or last):
            self._check(stats, chosen, last)
        if evaluates := bool(counts.evaluate_every and (step % counts.evaluate_every == 0 or last)):
            last = self._evaluate_here(step, last)
        if counts.write_every and (step % counts.write_every == 0 or last):
            self._write(step)
        if isinstance(self.source, MixedSource) and (evaluates or last or stats.stop_requested):
            given = self.source.given(self.spec.task.seed, self.progress.position)
            self._record.sources(step, self.progress.position, given)
        if last or stats.stop_requested:
            self._tell_health()
        if not last:
            self._make_room(stats)
        self._called_away = stats.stop_requested and not last and self._are_called()
        if stats.stop_requested and not last and not self._called_away:
            self._stop_as_asked(step)
            self._callbacks.unmark()
            return
        self._save_here(step, evaluates, last)
        self._done_step = step
        self._callbacks.unmark()
        if not last:
            self._stragglers.leave(self._save)

    def _tell_step(self, stats: StepStats, batch: StepBatch) -> None:
        """Record the step, hold it against what an earlier start has recorded of it, and call the users' hook."""
        step, scaler, ids = stats.step, self._stepper.scaler, None
        if self.spec.run.record_samples:
            ids = ids_read(batch, self.world, self.brief.plan.layout, self._under.ids_of)
        if self._expected is not None and self._expected.step == step:  # and not the duties of the one before
            ids = self.world.share(ids) if self.spec.run.record_samples else None  # every rank holds it against them
            rounding = rounding_of(self.brief.plan.precision, self.spec.task.model)
            held = hold_against(self._expected, stats, ids, rounding)
            if not self._expected.is_second:
                self._record.replayed(held)
            self._expected = self._expected.after(stats)
        self._record.step(stats, scaler.scale if scaler else None, ids)
        self._hook("after_step", step, stats=stats)

    def _tell_what_came(self, stats: StepStats, batch: StepBatch, last: bool) -> str:
        """Record what has come up in the step beside its numbers; return what a selection has chosen, or ""."""
        step = stats.step
        chosen = self._under.selection.take() if self._under.selection is not None else None
        if chosen is not None:
            self._record.selected(chosen)
        self._record.recovered(self._recovered.stepped())
        self._record.decided_in(step, take_decided(self._under))
        self._points.tell(self._record)
        self._remark(batch)
        self._collect()
        if last or batch.position == 0:
            self._measure_memory()
        self._points.reached("check", step)
        self._stragglers.add(stats, batch)
        self._tally.add(stats)
        if self._health is not None:
            self._record.health(self._health.after(stats))
        self._node.stepped(step)
        self._record.nodes(self._samples.taken())
        self._record.decided_now([*self._under.read_decisions(), *self._notices.take()])
        return (chosen and chosen.chosen) or ""

    def _tell_health(self) -> None:
        """Record the measurement of a step's health that has not arrived yet, where no step follows, or another one."""
        if self._health is not None:
            self._record.health(self._health.rest())

    def _evaluate_here(self, step: int, last: bool) -> bool:
        """Evaluate, and return whether the run ends here: it did already, or the evaluation or a hook says so."""
        self._points.reached("evaluate", step)
        with self._tally.beside(EVALUATING):
            self._evaluate()
        if self._judge.is_over and not last:
            last = True
            self._record.ended_early(self._judge.decision())
        return last or self._stopped

    def _make_room(self, stats: StepStats) -> None:
        """Look whether memory gets short, or would with longer samples that come, and go on with less at a time."""
        if not self._pressure:
            return
        coming = self._under.longest(self._passed_over.position_from(self.progress.position), stats.step + 1)
        growth = self._pressure.growth(self._under.longest(stats.position_before, stats.step), coming)
        if growth > 1.0 or is_due(stats.step, self._first_step, self._in_steps.check_every or LOOKS_EVERY):
            self._ease(stats.step, growth)

    def _save_here(self, step: int, evaluates: bool, last: bool) -> None:
        """Save where the run ends, where its best evaluation was, or where a checkpoint is due."""
        is_best = evaluates and self._judge.best is not None and self._judge.best[0] == step
        if last:
            self._save()  # a second SIGINT that waits has nothing left to end
        elif is_best and self.spec.run.checkpoints.save_best:
            self._save_and_heed()
        else:
            if self._keeper.tiers.due(step):
                self._points.reached("save", step)
                self._hook("on_save", step)
            with self._stop.saving(), self._tally.beside(SAVING):
                saved = self._keeper.save_if_due(self._under.built, self.brief.plan, self.world, self.progress)
            if saved:
                self._stop.interrupt_if_asked()

    def _collect(self) -> None:
        """Collect what the start has left, once: the first step has not waited for it, and later ones need the room."""
        if self._is_uncollected and gc.isenabled():
            gc.collect()
        self._is_uncollected = False

    def _left_out_of(self, batch: StepBatch) -> Counter[str]:
        """Return why samples of this rank's part of a batch are damaged and left out, and how many."""
        counted = [micro.ids for micro in batch.micro_batches if micro.counts]
        return sum((left_out_of(self.source, ids) for ids in counted), Counter[str]())

    def _named(self, error: NothingToLearn, batch: StepBatch) -> PacelineError:
        """Return what is to be told of a batch with nothing to learn from: damage, where there is any.

        Every rank calls it.
        """
        reads_first = self.brief.plan.layout.reads_first(self.world.rank)
        damaged, first = damage_of_all(self.world, reads_first, self._left_out_of(batch))
        if not damaged:
            return error
        rest = "" if damaged >= batch.samples else "; nothing of the others counts"
        return DataError(
            f"{error.what}: {damaged:,} of its {batch.samples:,} samples are damaged and left out{rest}",
            f"the first: {first}",
            "mend what is damaged, or take a larger task.global_batch",
        ).naming_ranks()

    def _write(self, step: int) -> None:
        """Have the model write its samples, where the run asks for any. Every rank calls it."""
        if self._writer is None:
            return
        self._points.reached("evaluate", step)
        began = time.perf_counter()
        with self._tally.beside(EVALUATING):
            texts = self._writer.write(self._stepper, step)
        self._record.written(step, self._writer.spec, texts, time.perf_counter() - began)

    def _check(self, stats: StepStats, chosen: str, last: bool) -> None:
        """Hold the ranks against each other, and take what all of them have measured. Every rank calls it."""
        scaler, step, layout = self._stepper.scaler, stats.step, self.brief.plan.layout
        numbers = numbers_of(stats, scaler.scale if scaler else None, chosen)
        check_agreement(self.model, numbers, step, self.world, layout, self._stepper.sync.apart_after(step))
        self._agree()
        self._record.decided_now(self._stragglers.compare(step))
        self._watch_memory(step)
        self._record.ranks(self._tally.over_ranks(step, last, self._under.batches.tell))
        left_out, self._left_out = self._left_out, Counter()
        for what, because in data_faults(self.source, self.world, layout.reads_first(self.world.rank), left_out):
            self._record.fault(what, because)

    def _stop_as_asked(self, step: int) -> None:
        """Save and end here: for good where a budget says so, else by Requeue. Every rank calls it.

        Where the machine of some nodes alone is about to end, their ranks end, and the others are called away.
        """
        notice, asked = self._notices.of_this_machine(), self._stop.because
        mine = departing(self.world, self.dir, notice, asked, stands_by=self._call is not None)
        departure = departure_of(self.world.gather(mine), self.spec.run.recovery)
        # A signal may reach the ranks in different steps: whoever was asked knows why.
        because = self.world.first_told(self._stop.because) or "a rank was asked to stop"
        self._is_spent = self.world.maximum([float(self._notices.is_over)])[0] > 0
        self._points.reached("save", step)
        self._hook("on_save", step)
        with self._stop.saving():
            path = self._keeper.save_or_keep(self._under.built, self.brief.plan, self.world, self.progress)
        if departure is not None:
            self._record.leaves(step, departure, path)
            if self.world.rank in departure.ranks:
                raise Requeue(because)
            self._done_step, self._called_away = step, True
            return
        self._record.stopped(step, because, path, "stopped" if self._is_spent else "requeue")
        if not self._is_spent:
            raise Requeue(because)
        self._done_step = step

    def _ease(self, step: int, growth: float) -> None:
        """Go on with a smaller micro-batch where a rank's memory gets short, or would with longer samples that come.

        Every rank calls it between two steps.
        """
        assert self._pressure is not None
        plan, decisions = self._pressure.decided(step, growth)
        if plan is not None:
            self._under.recut(plan)
            self._stragglers.rebase(plan)
        self._record.decided_now(decisions)

    def evaluate(self) -> float:
        """Return the mean loss per item on held-out samples, each counted once. Every rank calls it.

        Metrics and further sets are in the journal. Raises ConfigError where a rank does not call it.
        """
        with self._busy(), self._telling():
            self._roll.meet("run.evaluate", self.progress.step)
        return self._evaluate()

    def _evaluate(self) -> float:
        if self.held_out is None:
            raise ConfigError(
                "there is no held-out data",
                "the data set has no validation part",
                "give a pair of data sets (train, validation), or a task.data.validation_fraction above 0",
            )
        refuse_between(self.brief.plan.sync, {"an evaluation": self.progress.step})
        with self._busy(), self._telling():
            step, found = self.progress.step, self._measured("", self.held_out)
            sets = {name: self._measured(name, source) for name, source in self._sets.items()}
        value = self._judge.add(step, found)
        self._record.evaluation(step, found, sets)
        told = {"loss": found.loss, **found.metrics}
        told |= {f"{name}.{what}": number for name, each in sets.items()
                 for what, number in {"loss": each.loss, **each.metrics}.items()}  # fmt: skip
        self._hook("after_evaluation", step, evaluation=told)
        self._keeper.evaluated(step, found.loss, self._judge.spec.judged, self._judge.score(value))
        return found.loss

    def _measured(self, name: str, source: Source) -> EvaluationResult:
        """Return what the held-out samples of a set give. Every rank calls it."""
        samples, metrics = self.spec.run.evaluate_samples, self._metrics[name]
        held_out = for_device(source, self.world.device.type, self.spec.task.model)
        found = evaluate(self._stepper, held_out, samples, self._under.data_rank, metrics)
        reads_first = self.brief.plan.layout.reads_first(self.world.rank)
        for what, because in data_faults(source, self.world, reads_first, found.left_out, HELD_OUT_LEFT_OUT):
            self._record.fault(f"{what} ('{name}')" if name else what, because)
        return found

    def save(self) -> Path:
        """Write a checkpoint and return its folder. Every rank calls it; ConfigError says that one does not.

        A second SIGINT meanwhile raises KeyboardInterrupt when the checkpoint is there, a third one at once.
        """
        with self._busy(), self._telling():
            self._roll.meet("run.save", self.progress.step)
        with self._points.aside():  # after the loop as in it
            return self._save_and_heed()

    def _save_and_heed(self) -> Path:
        with self._busy(), self._telling():
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
        with self._points.in_users_code():
            found = self._callbacks.at(hook, moment)
        for name, numbers in found.logs:
            self._record.logged(step, name, numbers)
        if found.skip is not None:
            because = f"step {step}, {found.skip[0]}: {found.skip[1]}"
            self._under.decided.append(DecisionRecord("update", "made", "left out", because, None))
        if found.lr is not None:
            self._record.told_rate(step, more["lr"], *found.lr)
        if found.stop is not None and not self._stopped and step < steps:
            self._stopped = True
            self._record.ended_early(called_off(*found.stop, step, steps))
        return found

    def _mark(self) -> None:
        """Note what callbacks keep: where peers are lost from here on, their hooks are called again for this step."""
        if self._call is not None:
            self._callbacks.mark()

    def _busy(self) -> AbstractContextManager[None]:
        """Return a block in which the run is not idle. Raises where it was ended since nobody used it."""
        return self._idle.busy() if self._idle is not None else nullcontext()

    def _is_called(self) -> bool:
        """Return whether the supervisor has another world for this run, which is entered between two steps."""
        return self._call is not None and self._call.exists()

    def _are_called(self) -> bool:
        """Return whether a rank sees such a call. Every rank calls it, where one has asked to stop.

        The call may come as ranks stop for another reason, and each looks at a moment of its own.
        """
        return self.world.maximum([float(self._is_called())])[0] > 0

    def _watch_memory(self, step: int) -> None:
        """Tell of memory that grows from check to check. Every rank does its part."""
        spent = spent_now(self.model, self.optimizer, self._meter, self.world.maximum)
        growth = self._leaks.look(step, spent)
        if self._held is not None:  # what grew until the look before has gone on growing since
            since, held = self._held
            self._held = None
            if found := grown(held, tensors_held(self.model)):
                self._record.fault("memory grows", f"in the steps {since + 1} to {step}: {grown_text(found)}")
        if growth is not None:
            self._record.fault("memory grows", growth.because)
            self._held = step, tensors_held(self.model)

    def _measure_memory(self) -> None:
        components, peak = spent_on(self.model, self.optimizer, self._meter, self.world.maximum)
        self._record.memory(self.progress.step, components, peak)

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
        self._roll.ends(status == "complete")
        goes_on = self._notices.goes_on() if isinstance(error, Requeue) else None
        self._record.ended(status, self.progress.step, time.monotonic() - self._began, error, goes_on)
