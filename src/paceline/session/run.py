"""Run: a task trained under a plan, from a plain script, under torchrun, or in a notebook.

    run = paceline.Run(task, plan="auto")
    for batch in run:
        stats = run.step(batch)

The loop is the user's, and no line of it changes with the layout.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.launch.here import place_here
from paceline.lock import RunLock, take
from paceline.run.loop.training import Training
from paceline.run.process.brief import BRIEF_VARIABLE, Brief, take_brief
from paceline.run.process.world import join_world, leave_world
from paceline.run.record.journal import mark_end
from paceline.run.record.tensorboard import asked_sinks
from paceline.run.survive.points import points_of
from paceline.session.begin import join_peers, planned_brief
from paceline.session.extras import check_extras
from paceline.session.survive import survive
from paceline.session.uncaught import end_with_own_code
from paceline.spec.arguments import make_spec, run_directory
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.redact import Redactor
from paceline.spec.load import Spec
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.run import RunSpec
from paceline.spec.survive.faults import FaultPlan
from paceline.spec.task import Task
from paceline.supervise.parent import end_with_parent
from paceline.supervise.supervisor import explain


class Run(Training):
    """A task, planned, proven and ready to train on this process's share of the cluster.

    Started as a plain script with a plan of several devices, the script is started again once per device and this
    process only supervises; under torchrun or srun it joins the processes that are there. A layout of more than one
    device is proven equal to one device first, as `paceline train` does; `verify=False` leaves that out, on record.
    `faults` are made on purpose, to rehearse them: a TOML file, or its tables.
    An error that nobody catches ends a script with the exit code of the command line.
    """

    def __init__(
        self,
        task: Task,
        plan: str | dict[str, Any] | PlanSpec | Plan = "auto",
        *,
        cluster: str | int | dict[str, Any] | ClusterSpec = "auto",
        run: dict[str, Any] | RunSpec | None = None,
        verify: bool | None = None,
        faults: str | Path | list[dict[str, Any]] | FaultPlan | None = None,
    ) -> None:
        end_with_parent()
        first = end_with_own_code()
        spec = make_spec(task, plan, cluster, run, verify, faults)
        check_extras(spec.run)
        run_dir, brief = run_directory(spec), take_brief()
        lock, place = None, place_here(os.environ)
        if brief is None and place is None:
            lock = take(run_dir)
            brief = planned_brief(spec, first_only=not first)
            if brief.plan.layout.devices > 1:
                start_script_again(brief, spec, lock)
        if brief is None:
            assert place is not None, "else there is a brief"
            world, brief, lock = join_peers(spec, place)
        else:
            if place is not None:
                points_of(spec.run, run_dir, place.rank, place.world_size).starting("rendezvous", run_dir)
            world = join_world(brief.device, brief.threads, place, spec.run)
            lock = lock or (take(run_dir) if world.is_first else None)
        self._lock = lock
        Training.__init__(self, spec, brief, world, run_dir, asked_sinks(spec.run), lock)

    def _ended(self, status: str, error: BaseException | None = None) -> None:
        try:
            super()._ended(status, error)
        finally:
            if self._lock is not None:
                self._lock.release()

    def close(self) -> None:
        """Leave the process group. Called for you when the interpreter ends."""
        leave_world()


def start_script_again(brief: Brief, spec: Spec, lock: RunLock) -> None:
    """Start the running script once per device, wait for the processes and exit as they did. Does not return."""
    import __main__

    if not Path(getattr(__main__, "__file__", "")).is_file() or sys.flags.interactive:
        raise ConfigError(
            f"a Run over {brief.plan.layout.devices} devices cannot start from a notebook or a prompt",
            "its loop would have to run in every process, and only a script can be started again",
            "paceline.fit(task, ...), which starts processes of its own, or cluster=1",
        )
    with brief.file() as path:
        outcome = survive(sys.orig_argv[1:], spec, brief, {**os.environ, BRIEF_VARIABLE: path}, lock)
    if outcome.error is not None and not lock.is_lost:
        with contextlib.suppress(OSError):  # the disk may be full: what ended the run is told all the same
            mark_end(run_directory(spec), outcome.exit_code, outcome.error, Redactor(spec.run.redact))
    explain(outcome)
    sys.exit(outcome.exit_code)
