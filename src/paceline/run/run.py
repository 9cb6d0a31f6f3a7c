"""Run: a task trained under a plan, from a plain script, under torchrun, or in a notebook.

    run = paceline.Run(task, plan="auto")
    for batch in run:
        stats = run.step(batch)

The loop is the user's, and no line of it changes with the layout.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from paceline.cluster.cluster import ClusterSpec
from paceline.errors import ConfigError
from paceline.plan.explain import headline_lines
from paceline.plan.plan import Plan, PlanSpec
from paceline.plan.session import plan_task
from paceline.run.arguments import make_spec, run_directory
from paceline.run.brief import BRIEF_VARIABLE, Brief, brief_from_json, given_brief, make_brief
from paceline.run.extras import check_extras
from paceline.run.place import ranks_from_environment, ranks_per_node
from paceline.run.recovery.supervisor import explain, supervise
from paceline.run.spec import RunSpec
from paceline.run.training import Training
from paceline.run.world import join_world, leave_world
from paceline.spec import Spec
from paceline.task.task import Task


class Run(Training):
    """A task, planned and ready to train on this process's share of the cluster.

    Started as a plain script with a plan of several devices, the script is started again once per device and this
    process only supervises; under torchrun or srun it joins the processes that are there.
    """

    def __init__(
        self,
        task: Task,
        plan: str | dict[str, Any] | PlanSpec | Plan = "auto",
        *,
        cluster: str | int | dict[str, Any] | ClusterSpec = "auto",
        run: dict[str, Any] | RunSpec | None = None,
    ) -> None:
        spec = make_spec(task, plan, cluster, run)
        check_extras(spec.run)
        brief = given_brief()
        if brief is None and ranks_from_environment(os.environ) is None:
            brief = _planned(spec)
            if brief.plan.layout.devices > 1:
                start_script_again(brief)
        self._open(spec, brief)

    def _open(self, spec: Spec, brief: Brief | None) -> None:
        world = join_world(*_device_of(spec, brief))
        if brief is None:
            brief = brief_from_json(world.share(_plan_for(spec, world.size) if world.is_first else ""))
        Training.__init__(self, spec, brief, world, run_directory(spec))

    def close(self) -> None:
        """Leave the process group. Called for you when the interpreter ends."""
        leave_world()


def train_here(spec: Spec, brief: Brief | None = None) -> None:
    """Train a spec in this process, as one rank of the world that the environment describes."""
    run = Run.__new__(Run)
    run._open(spec, brief or given_brief())
    for batch in run:
        run.step(batch)
    run.world.wait()
    run.close()


def _device_of(spec: Spec, brief: Brief | None) -> tuple[str, int]:
    """Return (device kind, threads per rank) for this process."""
    if brief is not None:
        return brief.device, brief.threads
    import torch

    if spec.cluster.device == "cpu" or not torch.cuda.is_available():
        place = ranks_from_environment(os.environ)
        here = ranks_per_node(os.environ, place[1]) if place else 1
        return "cpu", max(1, len(os.sched_getaffinity(0)) // here)
    return "cuda", 0


def _plan_for(spec: Spec, devices: int) -> str:
    """Plan for the processes that are there and return the brief as JSON."""
    if spec.cluster.devices not in (0, devices):
        raise ConfigError(
            f"cluster.devices = {spec.cluster.devices}",
            f"{devices} processes were started",
            f"start {spec.cluster.devices} processes, or leave cluster.devices unset",
        )
    there = dataclasses.replace(spec.cluster, devices=devices, devices_per_node=ranks_per_node(os.environ, devices))
    return _planned(dataclasses.replace(spec, cluster=there)).to_json()


def _planned(spec: Spec) -> Brief:
    """Plan, say so, and return the brief."""
    planned = plan_task(spec, say=print)
    print("\n".join(headline_lines(planned)), flush=True)
    return make_brief(planned)


def start_script_again(brief: Brief) -> None:
    """Start the running script once per device, wait for the processes and exit as they did. Does not return."""
    import __main__

    if not Path(getattr(__main__, "__file__", "")).is_file() or sys.flags.interactive:
        raise ConfigError(
            f"a Run over {brief.plan.layout.devices} devices cannot start from a notebook or a prompt",
            "its loop would have to run in every process, and only a script can be started again",
            "paceline.fit(task, ...), which starts processes of its own, or cluster=1",
        )
    with brief.file() as path:
        outcome = supervise(
            [sys.executable, *sys.orig_argv[1:]], brief.plan.layout.devices, {**os.environ, BRIEF_VARIABLE: path}
        )
    explain(outcome)
    sys.exit(outcome.exit_code)
