"""The process of proofs: `python -m paceline.verify.process.worker REQUEST RESULT`, one for any number of ranks.

REQUEST is a JSON file of {jobs: [{spec: file of the twin's spec, plan, check, masked, steps}]}, plans of the most ranks
first. RESULT gets a line of JSON for each job, in their order, as soon as it is done: the comparison's record, or
{failed: how its ranks ended}.

The process imports all that a proof needs, once, and forks the ranks for every few jobs: imports are seconds of
computing per process, and nearly all that a small proof takes. What forked ranks leave behind ends with them: torch's
caches hold on to process groups that were destroyed, and threads of gloo look for messages a hundred times a second as
long as their group lives. After a few dozen layouts they would take up the whole machine.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import Requeue
from paceline.launch.here import place_here
from paceline.launch.worker import guarded
from paceline.run.process.handover import take_over
from paceline.spec.plan import Plan, plan_from_dict
from paceline.spec.task import Task
from paceline.supervise.forked import fork, leave
from paceline.supervise.parent import end_with_parent
from paceline.supervise.supervisor import Outcome, supervise_started

if TYPE_CHECKING:
    from paceline.verify.compare.in_a_group import FirstNumbers

JOBS_PER_FORK = 6
# Ended by SIGHUP, SIGINT or SIGTERM, or as its supervisor was asked to: somebody wants the whole proof to end.
STOPPED = (129, 130, 143, Requeue.exit_code)


@dataclass(frozen=True)
class Row:
    """A job: the file of its spec, its plan, its check, whether labels are masked, and how many steps are compared."""

    spec: Path
    plan: Plan
    check: str
    masked: bool
    steps: int


def main() -> int:
    """Make the proofs of the request and return the exit code: not 0 only where no further one can be made."""
    end_with_parent(number=signal.SIGKILL)  # there is nothing to save
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as any stop signal: who sent it knows why
    request_path, result_path = Path(sys.argv[1]), Path(sys.argv[2])
    request = json.loads(request_path.read_text())
    rows = [
        Row(Path(job["spec"]), plan_from_dict(job["plan"]), job["check"], job["masked"], job["steps"])
        for job in request["jobs"]
    ]
    result_path.touch()
    code = guarded(lambda: _prepare([rows[0].spec]))
    done = 0
    while done < len(rows) and not code:
        group = _next_group(rows[done:])
        outcome = _in_forks(group, result_path)
        if outcome.exit_code in STOPPED:
            return outcome.exit_code
        told = _lines(result_path)
        if told < done + len(group):  # the next one of them is the one that failed
            with result_path.open("a") as file:
                file.write(json.dumps({"failed": dataclasses.asdict(outcome)}) + "\n")
            told += 1
        done = told
    return code


def _prepare(specs: Sequence[Path]) -> None:
    """Import what the comparisons need, modules of the user's included, without starting a thread."""
    import torch
    import torch._dynamo  # of which DTensor's first use would import it

    import paceline.verify.process.checks  # noqa: F401

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for path in specs:
        _load_named(take_over(path).task)
    gc.collect()
    gc.freeze()  # or every rank's collections would go through, and so copy, all that this process holds


def _load_named(task: Task) -> None:
    """Import what the task names of the user's modules: what fails there fails here, before any rank waits."""
    from paceline.spec.import_paths import is_import_path, load_object
    from paceline.spec.optimizers import RULES, names_of
    from paceline.spec.steps.turns import objectives_named

    named = {
        "task.model.name": getattr(task.model, "name", None),
        **_named_sources(task.data),
        "task.data.collate": getattr(task.data, "collate", None),
        **objectives_named(task),
        **{f"task.optimizer.name ({name})": name for name in names_of(task.optimizer)},
    }
    for option, name in named.items():
        rule = RULES.get(name) if isinstance(name, str) and option.startswith("task.optimizer") else None
        name = rule.path if rule and rule.extra else name
        if isinstance(name, str) and is_import_path(name):
            load_object(name, option)


def _named_sources(data: object) -> dict[str, str]:
    from paceline.spec.task import DataSpec

    parts = data.parts() if isinstance(data, DataSpec) else ()
    return {f"task.data.source ({number})" if number else "task.data.source": part.source
            for number, part in enumerate(parts)}  # fmt: skip


def _next_group(rows: Sequence[Row]) -> list[Row]:
    """Return the jobs that the next forked ranks do: a few, of one number of ranks."""
    ranks = rows[0].plan.layout.devices
    return list(itertools.takewhile(lambda row: row.plan.layout.devices == ranks, rows[:JOBS_PER_FORK]))


def _in_forks(rows: Sequence[Row], result_path: Path) -> Outcome:
    """Compare the jobs' plans in forked ranks and return how these ended."""
    work = functools.partial(guarded, functools.partial(_compare_all, rows, result_path))
    return supervise_started(functools.partial(fork, work), rows[0].plan.layout.devices, os.environ)


def _compare_all(rows: Sequence[Row], result_path: Path) -> None:
    """Compare plans of one number of ranks, in one world."""
    from paceline.run.process.world import join_world
    from paceline.task.data.source import open_sources
    from paceline.verify.compare.in_a_group import differs_in_a_group
    from paceline.verify.process.checks import CHECKS
    from paceline.verify.twin.fold import for_twin

    place = place_here(os.environ)
    alone = _alone(rows) if place and place.rank == 0 and place.world_size > 1 else {}
    world = join_world("cpu", threads=1, place=place)
    for (path, masked), group in itertools.groupby(rows, key=_data_of):
        task = take_over(path).task
        _load_named(task)
        kept: dict[Any, Any] = {}
        source = for_twin(open_sources(task.data, task.seed)[0], task, masked)
        for row in group:
            own = take_over(path).task  # a module that the task holds as an object is laid out and trained in place
            given = (row.plan, source, source.items_per_sample)
            result = differs_in_a_group(alone.pop((path, masked), None), own, *given) if world.is_first else None
            result = world.share(result) or CHECKS[row.check](own, row.plan, world, *given[1:], row.steps, kept)
            if world.is_first:
                with result_path.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(result)) + "\n")
    world.wait()


def _data_of(row: Row) -> tuple[Path, bool]:
    return row.spec, row.masked


def _alone(rows: Sequence[Row]) -> dict[tuple[Path, bool], FirstNumbers | None]:
    """Return what the program of each job computes first before there is a process group, by spec and masks."""
    from paceline.task.data.source import open_sources
    from paceline.verify.compare.in_a_group import first_numbers, without_peers
    from paceline.verify.twin.fold import for_twin

    found = {}
    with without_peers():
        for row in {_data_of(row): row for row in reversed(rows)}.values():
            task = take_over(row.spec).task
            _load_named(task)
            source = for_twin(open_sources(task.data, task.seed)[0], task, row.masked)
            found[_data_of(row)] = first_numbers(task, row.plan, source, source.items_per_sample)
    return found


def _lines(path: Path) -> int:
    """Return how many results there are."""
    return path.read_bytes().count(b"\n")


if __name__ == "__main__":
    leave(main())
