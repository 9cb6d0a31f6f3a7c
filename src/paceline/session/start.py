"""Start: plan, price, prove, train and report a spec. What `paceline train` and `paceline.fit` have in common."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.cluster.grid.window import window_of
from paceline.cluster.probe.probe import probe_machine
from paceline.cluster.resolve import is_unprobed
from paceline.errors import ConfigError, PacelineError, Requeue, StorageError
from paceline.launch.here import place_here
from paceline.lock import RunLock, take
from paceline.plan.explain.explain import headline_lines
from paceline.plan.explain.hours import hours_lines
from paceline.plan.planned import Planned, plan_task
from paceline.report.build import build_report, report_lines, write_report
from paceline.run.process.brief import BRIEF_VARIABLE, Brief, make_brief
from paceline.run.process.handover import hand_over
from paceline.run.process.place import Place
from paceline.run.record.journal import mark_end
from paceline.said import say_line
from paceline.scratch import Scratch
from paceline.session.budget import check_budget
from paceline.session.confirm.micro_batch import confirm_micro_batch
from paceline.session.extras import check_extras
from paceline.session.prove import Proven, prove
from paceline.session.survive import WORKER, survive
from paceline.session.watch.alerting import alerts_beside
from paceline.session.watch.exporting import exports_beside
from paceline.session.watch.hours import in_hours
from paceline.spec.arguments import run_directory
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.redact import Redactor
from paceline.spec.load import Spec
from paceline.supervise.blame import Outcome
from paceline.supervise.early import requeued_early
from paceline.supervise.logs.tee import kept_here
from paceline.supervise.supervisor import explain
from paceline.supervise.trace_signal import traced_by_signal

MOST_PROBE_SECONDS = 90.0  # that a run waits for a probe, by the clock
Say = Callable[[str], None]


def train(spec: Spec, say: Say = say_line) -> int:
    """Train the spec on this machine's devices, or as one rank of torchrun's or srun's; return the exit code.

    Prints the plan and its price before, and the report after. Raises RunInUse at once where another run has the
    directory, and a PacelineError for what is wrong before
    training starts; what goes wrong later is explained on stderr and in the report.
    """
    check_extras(spec.run)
    run_dir = run_directory(spec)
    check_writable(run_dir)
    place = place_here(os.environ)
    if place is not None or spec.run.nodes.count > 1:
        return _among_others(spec, place, run_dir, say)
    with requeued_early() as is_over:
        return _train_here(spec, run_dir, say, is_over)


def _train_here(spec: Spec, run_dir: Path, say: Say, is_over: Callable[[], None]) -> int:
    with take(run_dir) as lock:
        planned, decisions = confirm_micro_batch(plan_here(spec, say), say)
        for line in headline_lines(planned):
            say(line)
        check_budget(planned, say)
        window = window_of(spec.run.when)
        for line in hours_lines(planned, window):
            say(line)
        outcome = in_hours(window, lambda: _run(planned, prove(planned, say), decisions, lock, say), say)
        is_over()
        if not lock.is_lost:
            if outcome.error is not None:
                mark_ended(run_dir, outcome, Redactor(spec.run.redact), say)
            tell_report(run_dir, say)
    explain(outcome)
    return outcome.exit_code


def plan_here(spec: Spec, say: Say) -> Planned:
    """Plan, on a machine that has been measured."""
    planned = plan_task(spec, say=say)
    if not (spec.cluster.probe and is_unprobed(planned.cluster)):
        return planned
    say("probe    measuring this machine once, about 15 s; `paceline probe` does it again")
    try:
        kind = planned.cluster.device.kind
        probe_machine(planned.cluster.devices, kind, say=lambda line: None, most_seconds=MOST_PROBE_SECONDS)
    except PacelineError as error:  # whatever it is, it costs a better forecast, not the run
        say(f"probe    {error.what}: {error.because}; going on with assumed figures")
        return planned
    return plan_task(spec, say=say)


def check_writable(run_dir: Path) -> None:
    """Raise StorageError where the run's directory cannot be written, before anything is computed."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir) as probe:
            probe.write(b"0" * 4096)
    except OSError as error:
        raise StorageError(
            f"cannot write to the run's directory {run_dir}", str(error), "free space or choose another run.dir"
        ) from error


def _run(planned: Planned, proven: Proven, decisions: tuple[DecisionRecord, ...], lock: RunLock, say: Say) -> Outcome:
    brief = make_brief(planned, proven.record, (*decisions, *proven.decisions))
    return run_brief(planned.spec, brief, lock, say)


def run_brief(spec: Spec, brief: Brief, lock: RunLock, say: Say) -> Outcome:
    """Train in this process on one device, in processes of their own on several."""
    with traced_by_signal(run_directory(spec)), exports_beside(spec, say):
        return _run_brief(spec, brief, lock, say)


def _run_brief(spec: Spec, brief: Brief, lock: RunLock, say: Say) -> Outcome:
    if brief.plan.layout.devices == 1:
        with alerts_beside(spec, say, supervises=False) as alerts:
            alerts.outcome = _here(spec, brief, lock)
        return alerts.outcome
    with (
        Scratch("spec") as folder,
        brief.file() as path,
    ):
        words = ["-m", WORKER, str(hand_over(spec, Path(folder)))]
        return survive(words, spec, brief, {**os.environ, BRIEF_VARIABLE: path}, lock, say)


def _here(spec: Spec, brief: Brief, lock: RunLock) -> Outcome:
    from paceline.launch.run import train_here

    try:
        with kept_here(lock.run_dir, spec.run):
            train_here(spec, brief, lock=lock)
    except Requeue as stop:
        return Outcome(stop.exit_code)
    except PacelineError as error:
        return Outcome(error.exit_code, error.as_dict())
    return Outcome(0)


def _among_others(spec: Spec, place: Place | None, run_dir: Path, say: Say) -> int:
    """Train as a node of a run, or as one rank of it, with the processes that others have started."""
    from paceline.session.nodes.attendance import attend_run
    from paceline.session.nodes.launched import as_node, is_attended

    if place is None:
        return attend_run(spec, say).exit_code
    if is_attended(spec, place):
        own, seat = as_node(spec, place, os.environ)
        return attend_run(own, say, seat).exit_code
    if spec.run.nodes.count > 1:
        raise ConfigError(
            f"run.nodes.count = {spec.run.nodes.count} in a process that is one of {place.world_size} ranks",
            "what a launcher has started is a node only where it supervises: run.recovery.supervise, and retries",
            "leave out --nodes, or start `paceline train` once on each node without the launcher",
        )
    return _as_one_rank(spec, place, run_dir, say)


def _as_one_rank(spec: Spec, place: Place, run_dir: Path, say: Say) -> int:
    from paceline.launch.run import train_here
    from paceline.session.begin import join_peers
    from paceline.supervise.parent import name_process

    name_process(f"rank {place.rank} paceline")
    world, brief, lock = join_peers(spec, place)
    try:
        with kept_here(run_dir, spec.run, place.rank):
            if world.is_first:
                with alerts_beside(spec, say, supervises=False), exports_beside(spec, say):
                    train_here(spec, brief, place, lock, world)
            else:
                train_here(spec, brief, place, lock, world)
    finally:
        if lock is not None and not lock.is_lost:
            tell_report(run_dir, say)
    return 0


def mark_ended(run_dir: Path, outcome: Outcome, redactor: Redactor, say: Say) -> None:
    """Add to the journal how a run has ended that its ranks could not."""
    assert outcome.error is not None
    try:
        mark_end(run_dir, outcome.exit_code, outcome.error, redactor)
    except OSError as error:  # the disk may be full: what ended the run is told all the same
        say(f"journal  how the run ended could not be added: {error}")


def tell_report(run_dir: Path, say: Say) -> None:
    """Write the report and say what is in it."""
    # A run that failed before its first record has nothing to report.
    with contextlib.suppress(StorageError, ConfigError):
        write_report(run_dir)
        for line in report_lines(build_report(run_dir)):
            say(line)
