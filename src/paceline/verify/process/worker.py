"""The process of proofs: `python -m paceline.verify.process.worker REQUEST RESULT`, one for any number of ranks.

REQUEST is a JSON file of {jobs: [{spec: file of the twin's spec, plan, check, masked, steps, number: which part of the
proof}], until_failed: whether parts after one that fails or is not equal are left out}, plans of the most ranks first.
RESULT gets a line of JSON for each job, as soon as it is done: {job: its place, result: the comparison's record}, or
{job: its place, failed: how its ranks ended}; for a part that is left out, that of the part which it is left out for.

The process imports all that a proof needs, once, and forks the ranks for every few jobs: imports are seconds of
computing per process, and nearly all that a small proof takes. What forked ranks leave behind ends with them: torch's
caches hold on to process groups that were destroyed, and threads of gloo look for messages a hundred times a second as
long as their group lives. After a few dozen layouts they would take up the whole machine.

Where there are cores for it, two groups of ranks are at work at a time, each forked by a process of its own: while the
first rank of the one computes the reference that its others wait for, those of the other go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cluster.here.collector import keep_for_good
from paceline.errors import DataError, NeedsWholeWeights, NothingToLearn, Requeue
from paceline.launch.here import place_here
from paceline.launch.worker import guarded
from paceline.scratch import Scratch
from paceline.spec.plan import Plan, plan_from_dict
from paceline.spec.proof.records import CheckName
from paceline.spec.task import Task
from paceline.supervise.forked import fork, leave
from paceline.supervise.parent import end_with_parent
from paceline.supervise.pulses.standstill import answering_with_stacks
from paceline.supervise.supervisor import ERROR_FOLDER, Outcome, supervise_started
from paceline.verify.process.lanes import handed_out, in_groups, lanes_here
from paceline.verify.process.own_modules import OwnModules
from paceline.verify.process.read_once import ReadOnce

if TYPE_CHECKING:
    from paceline.task.data.protocol import Source
    from paceline.verify.compare.in_a_group import FirstNumbers

# Ended by SIGHUP, SIGINT or SIGTERM, or as its supervisor was asked to: somebody wants the whole proof to end.
STOPPED = (129, 130, 143, Requeue.exit_code)


@dataclass(frozen=True)
class Row:
    """A job: the file of its spec, its plan, its check, whether labels are masked, and how many steps are compared."""

    spec: Path
    plan: Plan
    check: CheckName
    masked: bool
    steps: int
    number: int = 0  # which part of the proof it is


def main() -> int:
    """Make the proofs of the request and return the exit code: not 0 only where no further one can be made."""
    end_with_parent(number=signal.SIGKILL)  # there is nothing to save
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as any stop signal: who sent it knows why
    request_path, result_path = Path(sys.argv[1]), Path(sys.argv[2])
    request = json.loads(request_path.read_text())
    rows = [
        Row(Path(job["spec"]), plan_from_dict(job["plan"]), job["check"], job["masked"], job["steps"], job["number"])
        for job in request["jobs"]
    ]
    result_path.touch()
    read = ReadOnce()
    code = guarded(lambda: _prepare(rows, read))
    if code:
        return code
    lanes = lanes_here(len(rows))
    groups = in_groups([row.plan.layout.devices for row in rows], lanes)
    with handed_out(len(groups)) as next_group:
        work = functools.partial(_in_turn, rows, groups, next_group, read, result_path, request["until_failed"])
        if min(lanes, len(groups)) == 1:
            return work()
        return supervise_started(functools.partial(fork, work), lanes, os.environ).exit_code


def _in_turn(
    rows: Sequence[Row],
    groups: Sequence[Sequence[int]],
    next_group: Callable[[], int | None],
    read: ReadOnce,
    result_path: Path,
    until_failed: bool,
) -> int:
    """Do the jobs of groups, one group after the other, and return the exit code: not 0 only where asked to stop."""
    while (number := next_group()) is not None:
        left = list(groups[number])
        while left := _still_asked(rows, left, result_path) if until_failed else left:
            outcome = _in_forks({place: rows[place] for place in left}, read, result_path, until_failed)
            if outcome.exit_code in STOPPED:
                return outcome.exit_code
            told = _told(result_path)
            left = [place for place in left if place not in told]
            if left and outcome.exit_code and not _chooses_samples(rows[left[0]], outcome, read):
                # The next one of them is the one that failed.
                _tell(result_path, left.pop(0), failed=dataclasses.asdict(outcome))
    return 0


def _chooses_samples(row: Row, outcome: Outcome, read: ReadOnce) -> bool:
    """Return whether parts can be asked again on other samples, which `read` gives from now on.

    So it is where the first ones have no item to learn from and others have. They are looked for once, in a process of
    its own: what runs here is the user's.
    """
    if (outcome.error or {}).get("error") != NothingToLearn.__name__ or _data_of(row) in read.chosen:
        return False
    with Scratch("samples") as folder:
        path = Path(folder) / "chosen.json"

        def choose() -> None:
            from paceline.verify.twin.chosen import samples_with_items

            task = read.task(row.spec)
            _load_named(task)
            path.write_text(json.dumps(samples_with_items(task, row.plan, read.source(task, row.masked))))

        supervise_started(functools.partial(fork, functools.partial(guarded, choose)), 1, os.environ)
        read.chosen[_data_of(row)] = tuple(json.loads(path.read_text())) if path.exists() else ()
    return bool(read.chosen[_data_of(row)])


def _still_asked(rows: Sequence[Row], places: Sequence[int], result_path: Path) -> list[int]:
    """Return the places of the jobs before the first part that has failed or is not equal; those after it end as it.

    Who reads the proof goes through its parts in their order, and ends at that one.
    """
    wrong = [
        (rows[told["job"]].number, {name: told[name] for name in ("failed", "result") if name in told})
        for told in _lines(result_path)
        if not _is_passed(told)
    ]
    if not wrong:
        return list(places)
    first, how = min(wrong, key=lambda each: each[0])
    for place in places:
        if rows[place].number > first:
            _tell(result_path, place, **how)
    return [place for place in places if rows[place].number < first]


def _is_passed(told: dict[str, Any]) -> bool:
    """Return whether the parts after one go on to be asked; a story that is told again otherwise has not failed."""
    if "failed" in told:
        return (told["failed"]["error"] or {}).get("error") == NeedsWholeWeights.__name__
    return bool(told["result"]["equal"])


def _prepare(rows: Sequence[Row], read: ReadOnce) -> None:
    """Import and read what the comparisons need, modules of the user's included, without starting a thread."""
    gc.disable()  # until all is imported, of which nothing is garbage: it takes a sixth of the time
    import torch
    import torch._dynamo  # of which DTensor's first use would import it
    import torch.distributed.checkpoint  # and this, which cuts tensors
    import torch.distributed.pipelining  # and this, which runs stages

    import paceline.verify.compare.in_a_group
    import paceline.verify.process.checks  # noqa: F401

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    read.own_modules = OwnModules(functools.partial(_load_tasks, read, rows))
    read.begin(row.spec for row in rows)
    gc.enable()
    gc.collect()
    keep_for_good()  # or every rank's collections would go through, and so copy, all that this process holds


def _load_tasks(read: ReadOnce, rows: Sequence[Row]) -> None:
    """Import what the tasks of all rows name; of a schedule of the user's own one row alone knows."""
    for path in dict.fromkeys(row.spec for row in rows):
        _load_named(read.task(path))


def _load_named(task: Task) -> None:
    """Import what the task names of the user's modules: what fails there fails here, before any rank waits."""
    from paceline.spec.import_paths import is_import_path, load_object
    from paceline.spec.optimizers import RULES, names_of
    from paceline.spec.steps.turns import objectives_named

    named = {
        "task.model.name": getattr(task.model, "name", None),
        **_named_sources(task.data),
        "task.data.collate": getattr(task.data, "collate", None),
        "task.schedule.kind": task.schedule.kind,
        **objectives_named(task),
        **{f"task.optimizer.name ({name})": name for name in names_of(task.optimizer)},
    }
    for option, name in named.items():
        rule = RULES.get(name) if isinstance(name, str) and option.startswith("task.optimizer") else None
        name = rule.path if rule and rule.extra else name
        if isinstance(name, str) and is_import_path(name):
            load_object(name, option)


def _named_sources(data: object) -> dict[str, str]:
    """Return the sources that are a module's objects, by what names them; `table:people` is a folder of tables."""
    from paceline.spec.import_paths import names_object
    from paceline.spec.task import DataSpec

    parts = data.parts() if isinstance(data, DataSpec) else ()
    return {f"task.data.source ({number})" if number else "task.data.source": part.source
            for number, part in enumerate(parts) if names_object(part.source)}  # fmt: skip


def _in_forks(rows: Mapping[int, Row], read: ReadOnce, result_path: Path, until_failed: bool) -> Outcome:
    """Compare the jobs' plans, by the places of the jobs, in forked ranks and return how these ended."""

    def compare() -> None:
        with answering_with_stacks(Path(os.environ[ERROR_FOLDER]), int(os.environ["RANK"])):
            _compare_all(rows, read, result_path, until_failed)

    work = functools.partial(guarded, compare)
    ranks = next(iter(rows.values())).plan.layout.devices
    return supervise_started(functools.partial(fork, work), ranks, os.environ, answer=True)


def _compare_all(rows: Mapping[int, Row], read: ReadOnce, result_path: Path, until_failed: bool) -> None:
    """Compare plans of one number of ranks, in one world; `until_failed`, none after the first part that is unequal."""
    from paceline.run.process.world import join_world
    from paceline.verify.compare.in_a_group import differs_in_a_group
    from paceline.verify.process.checks import CHECKS
    from paceline.verify.process.process_hooks import naming_hooks

    place = place_here(os.environ)
    is_asked = place is not None and place.rank == 0 and place.world_size > 1
    alone = numbers_of_one(list(rows.values()), read) if is_asked else {}
    _import_again(list(rows.values()), read)
    world = join_world("cpu", threads=1, place=place)
    unequal: Row | None = None
    for (path, masked), group in itertools.groupby(rows.items(), key=lambda item: _data_of(item[1])):
        task = read.task(path)
        _load_named(task)
        kept: dict[Any, Any] = {}
        source = read.source(task, masked, path)
        for job, row in group:
            if unequal is not None and row.number > unequal.number:
                continue  # `_still_asked` tells of it
            own = read.task(path)  # a module that the task holds as an object is laid out and trained in place
            given = (row.plan, source, source.items_per_sample)
            known = alone.pop((path, masked), None)
            result = differs_in_a_group(known, own, *given) if world.is_first else None
            if result is not None and not _is_one_at_every_import(row, read):
                result = None  # the comparison with the layout has to tell
            with _naming_damage(source):
                result = world.share(result) or CHECKS[row.check](own, row.plan, world, *given[1:], row.steps, kept)
            if world.is_first:
                _tell(result_path, job, result=dataclasses.asdict(naming_hooks(result)))
            # The first rank's word: what each computes by itself, as the whole batch, may differ between ranks.
            if until_failed and not world.share(result.equal) and (unequal is None or row.number < unequal.number):
                unequal = row
    world.wait()


@contextlib.contextmanager
def _naming_damage(source: Source) -> Iterator[None]:
    """Return a block whose samples may have nothing to learn from: damage is named, where the proof has met any."""
    try:
        yield
    except NothingToLearn as error:
        from paceline.verify.twin.fold import damage_met  # it imports torch

        if not (damaged := damage_met(source)):
            raise
        what = f"{error.what}: of all that it has read, {len(damaged):,} are damaged and left out"
        raise DataError(what, f"the first: {damaged[0]}", "mend what is damaged") from error


def _data_of(row: Row) -> tuple[Path, bool]:
    return row.spec, row.masked


def _import_again(rows: Sequence[Row], read: ReadOnce) -> None:
    if read.own_modules is not None:
        read.own_modules.import_again(functools.partial(_load_tasks, read, rows))


def _is_one_at_every_import(row: Row, read: ReadOnce) -> bool:
    """Return whether a program's first numbers, in this group, are the same when its modules are imported once more."""
    from paceline.verify.compare.in_a_group import are_alike, first_numbers
    from paceline.verify.reference.peers import NoPeers

    def numbers() -> FirstNumbers | None:
        _import_again([row], read)
        task = read.task(row.spec)
        _load_named(task)
        source = read.source(task, row.masked, row.spec)
        with NoPeers():
            return first_numbers(task, row.plan, source, source.items_per_sample)

    return are_alike(numbers(), numbers(), row.plan.precision)


def numbers_of_one(rows: Sequence[Row], read: ReadOnce) -> dict[tuple[Path, bool], FirstNumbers | None]:
    """Return what the program of each job computes first in a process on its own, by spec and masks.

    The user's modules are imported for that: they may read how many processes there are as they are. Who calls it
    imports them once more.
    """
    from paceline.verify.compare.in_a_group import numbers_alone, without_peers

    found = {}
    with without_peers():
        _import_again(rows, read)
        for row in {_data_of(row): row for row in reversed(rows)}.values():
            task = read.task(row.spec)
            _load_named(task)
            source = read.source(task, row.masked, row.spec)
            with _naming_damage(source):
                found[_data_of(row)] = numbers_alone(task, row.plan, source, source.items_per_sample)
    return found


def _tell(path: Path, job: int, **told: object) -> None:
    """Add a line to the results. It is written at once: other processes add theirs."""
    line = f"{json.dumps({'job': job, **told})}\n".encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def _told(path: Path) -> set[int]:
    """Return the places of the jobs whose results are there."""
    return {int(told["job"]) for told in _lines(path)}


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the results that are there; what another process is about to write may be there in part."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


if __name__ == "__main__":
    leave(main())
