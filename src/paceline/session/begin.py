"""The beginning of a `Run`, and of ranks that a launcher has started: plan, say so, prove, and hand on the brief."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from paceline.cluster.machine import visible_gpus
from paceline.errors import ConfigError
from paceline.launch.here import ranks_on_node_told
from paceline.lock import RunLock, take
from paceline.plan.planned import Planned, plan_task
from paceline.run.process.world import World, join_world
from paceline.said import say_line
from paceline.session.ready.brief import confirm_and_price, proven_brief
from paceline.session.together import from_first
from paceline.session.watch.hours import refuse_outside
from paceline.spec.arguments import run_directory
from paceline.spec.load import Spec
from paceline.supervise.parent import end_with_launcher
from paceline.supervise.told.brief import Brief, brief_from_json
from paceline.supervise.told.place import Place
from paceline.system.this_machine import machine_here

Say = Callable[[str], None]


def planned_brief(spec: Spec, say: Say = say_line, first_only: bool = False, is_script: bool = True) -> Brief:
    """Plan, say so, prove, and return the brief.

    With `first_only`, raise ConfigError for a plan of several devices: another run was made in this process, which
    would be made again in each of the new ones. So it is where the process is no script (`is_script`), which cannot be
    started again. Both are said before the proof, which may take a minute.
    """
    planned = plan_task(spec, say=say)
    devices = planned.plan.layout.devices
    if first_only and devices > 1:
        raise ConfigError(
            f"a Run over {devices} devices cannot follow one on a single device in the same script",
            "the script is started again once per device, and would begin with the first Run again",
            "paceline.fit(task, ...), which starts processes of its own, or a script for each",
        )
    if devices > 1 and not is_script:
        raise ConfigError(
            f"a Run over {devices} devices cannot start from a notebook, a prompt, a thread or another's child",
            "its loop would have to run in every process, and only a script can be started again",
            "paceline.fit(task, ...), which starts processes of its own, or cluster=1",
        )
    return _brief(planned, say)


def join_peers(spec: Spec, place: Place, say: Say = say_line) -> tuple[World, Brief, RunLock | None]:
    """Join the processes that torchrun, srun or an earlier run started; rank 0 plans for them and proves.

    Before that it takes the run's directory: it alone returns the lock. All raise RunInUse where another run has it.
    """
    from paceline.session.nodes.launched import for_peers  # with what a process on its own never needs

    end_with_launcher(os.environ)
    kind, threads = _device_here(spec, place)
    world = join_world(kind, threads, place, spec.run)
    locks, there = list[RunLock](), on_machines(world, place)
    if left := devices_left(kind, place):
        say(left)

    def begin() -> str:
        locks.append(take(run_directory(spec)))
        return _brief(plan_task(for_peers(spec, there), say=say), say).to_json()

    text = from_first(world, begin)
    return world, brief_from_json(text), locks[0] if locks else None


def on_machines(world: World, place: Place) -> Place:
    """Return a place with the ranks that each machine has, where its launcher tells nothing of that. All ranks call it.

    They would all count as those of one machine. Of machines that differ each rank counts as alone on one.
    """
    if world.size == 1 or ranks_on_node_told(os.environ) is not None:
        return place
    machine = machine_here()
    here = float(len(world.told_at(machine, {})[machine]))
    most, least = world.maximum([here, -here])
    return replace(place, ranks_on_node=int(here) if most == -least else 1)


def devices_left(kind: str, place: Place) -> str:
    """Return what is said where a launcher has started one process on a machine of several devices; "" elsewhere."""
    if place.world_size > 1 or kind != "cuda" or (gpus := len(visible_gpus())) < 2:
        return ""
    return (
        f"launch   WORLD_SIZE = 1: one process was started, which trains on one of {gpus} GPUs; "
        f"for all of them unset RANK and WORLD_SIZE, or start {gpus} processes"
    )


def _brief(planned: Planned, say: Say) -> Brief:
    planned, decisions = confirm_and_price(planned, say)
    refuse_outside(planned.spec.run.when)
    return proven_brief(planned, decisions, say)


def _device_here(spec: Spec, place: Place) -> tuple[str, int]:
    """Return (device kind, threads per rank) for this process, before there is a plan."""
    import torch

    if spec.cluster.device == "cpu" or not torch.cuda.is_available():
        return "cpu", max(1, len(os.sched_getaffinity(0)) // place.ranks_on_node)
    return "cuda", 0
