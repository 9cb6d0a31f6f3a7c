"""Start: the story of a run, told for `paceline train` and `paceline.fit`. Plan, price, prove, train, report."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.cluster.grid.window import window_of
from paceline.cluster.here.collector import collector_at_rest
from paceline.cluster.probe.duration import probe_seconds
from paceline.cluster.probe.probe import probe_machine
from paceline.cluster.resolve import is_unprobed, resolve_cluster
from paceline.cluster.store import probe_command
from paceline.errors import PacelineError, Requeue, StorageError
from paceline.launch.here import place_here
from paceline.lock import RunLock, take
from paceline.plan.explain.hours import hours_lines
from paceline.plan.planned import Planned, plan_prepared, plan_task
from paceline.run.process.handover import hand_over
from paceline.said import say_line
from paceline.scratch import Scratch
from paceline.session.ahead import standby_ahead
from paceline.session.closing import close_run
from paceline.session.extras import check_extras
from paceline.session.ready.brief import confirm_and_price, proven_brief
from paceline.session.ready.budget import used_up
from paceline.session.watch.alerting import alerts_beside
from paceline.session.watch.exporting import exports_beside
from paceline.session.watch.hours import in_hours
from paceline.spec.arguments import run_directory
from paceline.spec.journal.redact import Redactor
from paceline.spec.load import Spec
from paceline.spec.task import ModelSpec
from paceline.spec.watch.when import WhenSpec
from paceline.supervise.blame import Outcome
from paceline.supervise.early import requeued_early
from paceline.supervise.logs.aside import printed_aside
from paceline.supervise.logs.tee import kept_here
from paceline.supervise.parent import end_with_step
from paceline.supervise.standby import Standby
from paceline.supervise.supervisor import explain
from paceline.supervise.told.brief import BRIEF_VARIABLE, Brief
from paceline.supervise.trace_signal import traced_by_signal
from paceline.task.data.listed_once import list_anew, listed_once
from paceline.task.models.sizes import is_named
from paceline.units import format_seconds

FULL = (errno.ENOSPC, errno.EDQUOT)  # the storage, or what of it is this user's
SHORT_RUN = 4.0  # times what a probe takes: a run that is shorter by forecast would wait long for a better one
MOST_PROBE_SECONDS = 90.0  # that a run waits for a probe, by the clock
Say = Callable[[str], None]


@printed_aside()
def train(spec: Spec, say: Say = say_line, standby: Standby | None = None) -> int:
    """Train the spec on this machine's devices, or as a part of a run that others have started; return the exit code.

    `standby` is one that has begun by now, where this process begins the run alone.
    Prints the plan and its price before, and the report after. Raises RunInUse at once where another run has the
    directory, and a PacelineError for what is wrong before training starts; what goes wrong later is explained on
    stderr and in the report.
    """
    outcome = trained(spec, say, standby)
    if not outcome.is_printed:
        explain(outcome)
    return outcome.exit_code


def trained(spec: Spec, say: Say = say_line, standby: Standby | None = None) -> Outcome:
    """Do what `train` does and return how the run has ended; its error is left to the caller to tell."""
    end_with_step(os.environ)
    check_extras(spec.run)
    run_dir = run_directory(spec)
    check_writable(run_dir)
    place = place_here(os.environ)
    if place is None and spec.run.nodes.count == 1:
        with requeued_early() as is_over:
            return _train_alone(spec, run_dir, say, is_over, standby)
    from paceline.session.nodes.among import train_among_others

    return train_among_others(spec, place, say)


def _train_alone(spec: Spec, run_dir: Path, say: Say, is_over: Callable[[], None], first: Standby | None) -> Outcome:
    """Tell the story of a run that nobody else takes part in, and return how it has ended."""
    with take(run_dir) as lock, standby_ahead(spec, lock, first) as standby, listed_once():
        with collector_at_rest():
            if traces_here(spec):
                import torch  # noqa: F401
            planned = plan_here(spec, say, standby)
            planned, decisions = confirm_and_price(planned, say)
        window = window_of(spec.run.when)
        if spec.run.when != WhenSpec():
            list_anew()  # it may wait for hours, in which files change
        for line in hours_lines(planned, window):
            say(line)

        def run() -> Outcome:
            if used := used_up(spec.run, run_dir):  # by those that it is shared with, while it has waited
                because, budget = used
                say(f"stop     {because}")
                return Outcome(0 if budget.at_end == "stop" else Requeue.exit_code)
            return run_brief(spec, proven_brief(planned, decisions, say, standby), lock, say, standby)

        outcome = in_hours(window, run, say)
        is_over()
        close_run(outcome, lock, Redactor(spec.run.redact), say)
    return outcome


def traces_here(spec: Spec) -> bool:
    """Return whether a model that must be traced is traced in this process, which trains it: torch is wanted here soon.

    Otherwise planning has it traced by a process of its own, which costs an import of torch that is not used again.
    """
    model = spec.task.model
    named = isinstance(model, ModelSpec) and is_named(model.name)
    return not named and not spec.cluster.groups and resolve_cluster(spec.cluster)[0].devices == 1


def plan_here(spec: Spec, say: Say, standby: Standby | None = None) -> Planned:
    """Plan, on a machine that has been measured, or is now where the run takes much longer than measuring it.

    A probe begins once `standby` has imported what it needs, or it would measure that too.
    """
    planned = plan_task(spec, say=say)
    if not (spec.cluster.probe and is_unprobed(planned.cluster)):
        return planned
    kind = planned.cluster.device.kind
    takes_seconds = probe_seconds(kind, devices=planned.cluster.devices)
    takes, command = f"{takes_seconds:.0f} s", probe_command(kind, planned.cluster.devices)
    if (about := planned.forecast.run_seconds.value) < SHORT_RUN * takes_seconds:
        say(f"probe    not for a run of about {format_seconds(about)}: to measure this machine takes "
            f"{takes}, and `{command}` does")  # fmt: skip
        return planned
    say(f"probe    measuring this machine once, about {takes}; `{command}` does it again")
    if standby is not None:
        standby.is_ready()
    try:
        probe_machine(planned.cluster.devices, kind, say=lambda line: None, most_seconds=MOST_PROBE_SECONDS)
    except PacelineError as error:  # whatever it is, it costs a better forecast, not the run
        say(f"probe    {error.what}: {error.because}; going on with assumed figures")
        return planned
    if spec.cluster.groups:
        return plan_task(spec, say=say)
    cluster, remarks = resolve_cluster(spec.cluster)
    return plan_prepared(planned.prepared, cluster, tuple(remarks))  # data and model are what they were


def check_writable(run_dir: Path) -> None:
    """Raise StorageError where the run's directory cannot be written, before anything is computed."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir) as probe:
            probe.write(b"0" * 4096)
    except OSError as error:
        what = f"cannot write to the run's directory {run_dir}"
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise StorageError(what, f"{error.filename} is a file, and no folder", "another run.dir") from error
        because = f"{error.strerror} ({error.filename or run_dir})"
        fix = "free space or choose another run.dir" if error.errno in FULL else "a run.dir where you may write"
        raise StorageError(what, because, fix) from error


def run_brief(spec: Spec, brief: Brief, lock: RunLock, say: Say, standby: Standby | None = None) -> Outcome:
    """Train in this process on one device, in processes of their own on several."""
    with traced_by_signal(run_directory(spec)), exports_beside(spec, say):
        if brief.plan.layout.devices > 1:
            list_anew()  # what is planned while they train sees what is there then
            return _in_processes(spec, brief, lock, say, standby)
        with alerts_beside(spec, say, supervises=False) as alerts:
            alerts.outcome = _in_this_process(spec, brief, lock)
        return alerts.outcome


def _in_processes(spec: Spec, brief: Brief, lock: RunLock, say: Say, standby: Standby | None) -> Outcome:
    from paceline.session.survive import WORKER, survive

    with (
        Scratch("spec") as folder,
        brief.file() as path,
    ):
        words = ["-m", WORKER, str(hand_over(spec, Path(folder)))]
        return survive(words, spec, brief, {**os.environ, BRIEF_VARIABLE: path}, lock, say, standby)


def _in_this_process(spec: Spec, brief: Brief, lock: RunLock) -> Outcome:
    with collector_at_rest():
        from paceline.launch.run import train_here

    try:
        with kept_here(lock.run_dir, spec.run):
            train_here(spec, brief, lock=lock)
    except Requeue as stop:
        return Outcome(stop.exit_code)
    except PacelineError as error:
        return Outcome(error.exit_code, error.as_dict())
    return Outcome(0)
