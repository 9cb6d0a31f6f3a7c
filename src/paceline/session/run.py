"""Run: a task trained under a plan, from a plain script, under torchrun, or in a notebook.

    run = paceline.Run(task, plan="auto")
    for batch in run:
        stats = run.step(batch)

The loop is the user's, and no line of it changes with the layout.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from paceline.cluster.here.collector import collector_at_rest
from paceline.config.called import OVERRIDES, checked_call
from paceline.config.values import kind_of, literal
from paceline.errors import ConfigError, HandedBack, Requeue
from paceline.launch.here import place_here
from paceline.lock import RunLock, take
from paceline.observe.exports.tensorboard import asked_sinks
from paceline.run.loop.loader import StepBatch
from paceline.run.loop.step import StepStats
from paceline.run.loop.training import Training
from paceline.run.process.handover import hand_over, holds_objects
from paceline.run.process.world import World, join_world, leave_world
from paceline.run.survive.idle import IdleWatch
from paceline.run.survive.points import points_of
from paceline.said import say_line
from paceline.scratch import Scratch
from paceline.session.begin import join_peers, planned_brief
from paceline.session.extras import check_extras
from paceline.session.together import as_error
from paceline.session.uncaught import end_with_own_code
from paceline.session.verbs.spec_given import spec_of
from paceline.session.watch.alerting import begin_alerts
from paceline.session.watch.exporting import begin_exports
from paceline.spec.arguments import run_directory
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.redact import Redactor
from paceline.spec.load import Spec
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.run import RunSpec
from paceline.spec.survive.faults import FaultPlan
from paceline.spec.task import Task
from paceline.supervise.again.mark_journal import mark_end
from paceline.supervise.early import requeued_early
from paceline.supervise.logs.rank import into_log
from paceline.supervise.parent import end_with_parent
from paceline.supervise.supervisor import explain, is_supervised
from paceline.supervise.told.brief import BRIEF_VARIABLE, Brief, take_brief
from paceline.supervise.told.place import Place
from paceline.task.data.listed_once import list_anew, listed_once
from paceline.uncaught import is_prompt


class Run(Training):
    """A task, planned, proven and ready to train on this process's share of the cluster.

    `task` may be the path of a spec file, whose other tables hold too: `overrides` change options of it
    ("task.stop=5 steps"), and `plan`, `cluster` and `run` that are given stand in the place of its tables.

    Started as a plain script with a plan of several devices, the script is started again once per device and this
    process only supervises; under torchrun or srun each process supervises one that it starts, or joins the others as
    a rank where `run.recovery.supervise` is off. A layout of more than one
    device is proven equal to one device first, as `paceline train` does; `verify=False` leaves that out, on record.
    `faults` are made on purpose, to rehearse them: a TOML file, or its tables.
    An error that nobody catches ends a script with the exit code of the command line.
    """

    @checked_call(overrides=OVERRIDES)
    def __init__(
        self,
        task: Task | Spec | Mapping[str, object] | str | Path,
        plan: str | Mapping[str, object] | PlanSpec | Plan = "auto",
        *,
        cluster: str | int | Mapping[str, object] | ClusterSpec = "auto",
        run: Mapping[str, object] | RunSpec | None = None,
        verify: bool | None = None,
        faults: str | Path | Sequence[Mapping[str, object]] | FaultPlan | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        end_with_parent()
        into_log()
        first = end_with_own_code()
        spec, place = spec_of(task, plan, cluster, overrides, run, verify, faults), place_here(os.environ)
        check_extras(spec.run)
        # Ranks end by the signal itself: whoever has started them knows why, and a peer is never waited for.
        with contextlib.ExitStack() as stack:
            if place is None:
                stack.enter_context(requeued_early())
                stack.enter_context(listed_once())
            self._join(spec, place, first)

    def _join(self, spec: Spec, place: Place | None, first: bool) -> None:
        """Plan, prove and build what this process trains, or end with the processes that it starts for that.

        While it supervises those, for as long as the run takes, garbage is collected as ever.
        """
        run_dir, brief, lock = run_directory(spec), take_brief(), None
        if brief is None and place is None:
            lock = take(run_dir)
            with collector_at_rest():
                brief = planned_brief(spec, first_only=not first, is_script=is_script())
            if brief.plan.layout.devices > 1:
                list_anew()  # it supervises for as long as they train
                start_script_again(brief, spec, lock)
        elif brief is None and place is not None:
            attend_script(spec, place)
        if brief is None:
            assert place is not None, "else there is a brief"
            with collector_at_rest():
                world, brief, lock = join_peers(spec, place)
        else:
            if place is not None:
                points_of(spec.run, run_dir, place.rank, place.world_size).starting("rendezvous", run_dir)
            world = join_world(brief.device, brief.threads, place, spec.run)
            lock = lock or (take(run_dir) if world.is_first else None)
        self._lock = lock
        watched = world.is_first and not is_supervised()
        self._exports = begin_exports(spec, say_line) if world.is_first else None
        self._alerts = begin_alerts(spec, say_line, supervises=False) if watched else None
        with collector_at_rest():
            Training.__init__(self, spec, brief, world, run_dir, asked_sinks(spec.run), lock)
        self._watch_idle()

    def _watch_idle(self) -> None:
        """Have the run end where its loop stands still for too long, if the spec says so and one process is all."""
        limit = self.spec.run.idle_limit
        if limit is not None and self.world.size == 1:
            self._idle = IdleWatch(limit, self._end_idle, is_prompt(), self._stop).begin()
        elif limit is not None:
            self._record.remark(
                f"run.idle_limit is not counted on {self.world.size} ranks: run.health.hang_elsewhere is what ends them"
            )

    def step(self, batch: StepBatch) -> StepStats:
        """Make one optimizer update with the batch and return what it did, over all ranks: see `Training.step`.

        A run that is stopped early raises Requeue, which ends a script with exit code 75. A prompt or a notebook is not
        ended: there it raises HandedBack, a KeyboardInterrupt. What is no batch of the run's own is a ConfigError.
        """
        if not isinstance(batch, StepBatch):
            _refuse_batch(batch)
        try:
            return super().step(batch)
        except Requeue as stop:
            if is_prompt():
                raise HandedBack(stop.because) from None
            raise

    @checked_call()
    def evaluate(self) -> float:
        """Return the mean loss per item on held-out samples, each counted once: see `Training.evaluate`."""
        return super().evaluate()

    @checked_call()
    def save(self) -> Path:
        """Write a checkpoint and return its folder: see `Training.save`."""
        return super().save()

    @checked_call()
    def replan(self, plan: Plan, world: World | None = None) -> None:
        """Go on under another plan from this moment: see `Training.replan`. Raises ConfigError for what is no Plan."""
        if not isinstance(plan, Plan):
            raise ConfigError(f"plan = {literal(plan)} is no Plan", f"it is {kind_of(plan)}",
                              'paceline.plan(task, "dp_shard=2", cluster=2).plan')  # fmt: skip
        super().replan(plan, world)

    @property
    def model(self) -> nn.Module:
        """The model on this rank, laid out as the plan says."""
        self._refuse_ended()
        return super().model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What updates the model."""
        self._refuse_ended()
        return super().optimizer

    def _refuse_ended(self) -> None:
        if self._idle is not None:
            self._idle.refuse()

    def _end_idle(self, because: str) -> None:
        super()._end_idle(because)
        if is_prompt():  # which goes on, and is to find the device's memory free
            self.take_down()

    def _ended(self, status: str, error: BaseException | None = None) -> None:
        if self._idle is not None:
            self._idle.close()
        try:
            super()._ended(status, error)
        finally:
            if self._alerts is not None:
                self._alerts.close()
            if self._exports is not None:
                self._exports.close()
            if self._lock is not None:
                self._lock.release()

    @checked_call()
    def close(self) -> None:
        """Leave the process group. Called for you when the interpreter ends."""
        leave_world()


@checked_call()
def _refuse_batch(batch: object) -> None:
    because = f"it is {kind_of(batch)}, and a run knows its own batches by their place"
    raise ConfigError("run.step was given something else than a batch of the run", because,
                      "for batch in run: run.step(batch)")  # fmt: skip


def is_script() -> bool:
    """Return whether this process runs a script, which can be started again. A child of multiprocessing does not.

    Nor does another thread than the main one: the end of the run would end that thread and not the process, and the
    program may be a worker of somebody's, as Ray's, which has its task from elsewhere.
    """
    import __main__

    is_another = multiprocessing.parent_process() is not None or threading.current_thread() != threading.main_thread()
    return Path(getattr(__main__, "__file__", "")).is_file() and not sys.flags.interactive and not is_another


def attend_script(spec: Spec, place: Place, say: Callable[[str], None] = print) -> None:
    """Start the running script as a rank that this process supervises, with the launcher's others, and exit as it did.

    Returns where this process is the rank itself: where no other can have the task, or nothing is to be supervised.
    Raises the error of a run that has ended before its ranks began, as it is raised where this process is the rank.
    """
    from paceline.session.nodes.attendance import attend_run  # forty files, which a process on its own never needs
    from paceline.session.nodes.launched import as_node, is_attended

    if not is_attended(spec, place) or not is_script():
        return
    if holds_objects(spec):
        try:
            with Scratch("spec") as folder:
                hand_over(spec, Path(folder))
        except ConfigError as error:
            say(f"recover  off: {error.what}: {error.because}; this process is a rank, and a fault ends the run")
            return
    own, seat = as_node(spec, place, os.environ)
    ended = attend_run(own, say, seat, sys.orig_argv[1:])
    if ended.error is not None:
        raise as_error(ended.error)
    sys.exit(ended.exit_code)


def start_script_again(brief: Brief, spec: Spec, lock: RunLock) -> None:
    """Start the running script once per device, wait for the processes and exit as they did. Does not return."""
    from paceline.session.survive import survive

    with brief.file() as path:
        outcome = survive(sys.orig_argv[1:], spec, brief, {**os.environ, BRIEF_VARIABLE: path}, lock)
    if outcome.error is not None and not lock.is_lost:
        with contextlib.suppress(OSError):  # the disk may be full: what ended the run is told all the same
            mark_end(run_directory(spec), outcome.exit_code, outcome.error, Redactor(spec.run.redact))
    explain(outcome)
    sys.exit(outcome.exit_code)
