"""The process of one rank of a proof: `python -m paceline.verify.worker REQUEST RESULT`.

REQUEST is a JSON file of {jobs: [{spec: file of the twin's spec, plan, check, masked, steps}]}, plans of the most ranks
first; rank 0 adds a line of JSON to RESULT for each job when it is done.

The process imports all that a proof needs, once, and forks a child for every few jobs. What the child leaves behind
ends with it: torch's caches hold on to process groups that were destroyed, and threads of gloo look for messages a
hundred times a second as long as their group lives. After a few dozen layouts they would take up the whole machine.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.plan.plan import Plan, plan_from_dict
from paceline.run.handover import take_over
from paceline.run.worker import end_with_parent, guarded

JOBS_PER_CHILD = 6


@dataclass(frozen=True)
class Row:
    """A job, by its place in the request and the file of its spec."""

    index: int
    spec: Path
    plan: Plan
    check: str
    masked: bool
    steps: int


def main() -> int:
    """Compare the plans of the request that this rank takes part in and return the exit code."""
    end_with_parent()
    request_path, result_path = Path(sys.argv[1]), Path(sys.argv[2])
    request = json.loads(request_path.read_text())
    rows = [
        Row(index, Path(job["spec"]), plan_from_dict(job["plan"]), job["check"], job["masked"], job["steps"])
        for index, job in enumerate(request["jobs"])
    ]
    code = guarded(lambda: _prepare([row.spec for row in rows[:1]]))
    for ranks, group in itertools.groupby(rows, key=lambda row: row.plan.layout.devices):
        if code or int(os.environ["RANK"]) >= ranks:
            break
        os.environ["WORLD_SIZE"] = str(ranks)  # what torchrun would have put there
        left = list(group)
        while left and not code:
            part, left = left[:JOBS_PER_CHILD], left[JOBS_PER_CHILD:]
            code = _in_a_child(functools.partial(_compare_all, part, request_path.parent, result_path))
    return code


def _prepare(specs: Sequence[Path]) -> None:
    """Import what the comparisons need, modules of the user's included, without starting a thread."""
    import torch
    import torch._dynamo  # of which DTensor's first use would import it

    import paceline.verify.checks  # noqa: F401
    from paceline.task.imports import is_import_path, load_object

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for task in (take_over(path).task for path in specs):
        named = {
            "task.model.name": getattr(task.model, "name", None),
            "task.data.source": getattr(task.data, "source", None),
            "task.objective": task.objective,
        }
        for option, name in named.items():
            if isinstance(name, str) and is_import_path(name):
                load_object(name, option)


def _in_a_child(work: Any) -> int:
    """Call `work()` in a forked process and return its exit code; where a signal ended it, end by the same."""
    os.environ["PACELINE_PARENT"] = str(os.getpid())
    child = os.fork()
    if not child:
        end_with_parent()
        code = guarded(work)
        _leave(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)  # the supervisor sees how this rank ended
        signal.pause()
    return code


def _compare_all(rows: Sequence[Row], folder: Path, result_path: Path) -> None:
    """Compare plans of one number of ranks, in one world."""
    from paceline.run.world import join_world
    from paceline.task.data.source import open_sources
    from paceline.verify.checks import CHECKS
    from paceline.verify.fold import for_twin

    world = join_world("cpu", threads=1, rendezvous=f"file://{folder}/rendezvous-{rows[0].index}")
    for (path, masked), group in itertools.groupby(rows, key=lambda row: (row.spec, row.masked)):
        task = take_over(path).task
        kept: dict[Any, Any] = {}
        source = for_twin(open_sources(task.data, task.seed)[0], task, masked)
        for row in group:
            result = CHECKS[row.check](task, row.plan, world, source, source.items_per_sample, row.steps, kept)
            if world.is_first:
                with result_path.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    world.wait()


def _leave(code: int) -> None:
    """End this process without waiting for collectives that will never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
