"""Runs that live through faults: started again until they are complete, by the real supervisor, in forked ranks.

`python storm.py FOLDER` makes the runs of FOLDER/stories.json, one after the other, and appends a line for each start
to FOLDER/starts.jsonl. Torch is imported once, and ranks are forks that start in milliseconds. A story that has ended
is not told again: where a fault kills the supervisor, which is this script, the script is started again.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
ONE_WORLD, SURVIVES = "one world", "survives"  # one start is one world, or goes on by itself as `paceline train` does


@dataclass(frozen=True)
class Story:
    """A run on some ranks with faults, as `[run]` and `[[run.faults.each]]` have them."""

    name: str
    layout: dict[str, int]
    faults: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    steps: int = 8
    seed: int = 0
    most_starts: int = 12
    only_once: bool = False  # start once, however that ends
    how: str = ONE_WORLD
    endless: bool = False  # ranks that are to end have no grace after which they are killed
    clock_moves: bool = False  # this machine's clock is set forward and back by days while the run goes on
    micro_batch: int = 4  # of seven rows or six, or of four or three
    task: str = ""  # one of `TASKS` (tasks_of_storms.py), in place of the decoder
    precision: str = "fp32"
    optimizer: dict[str, Any] = field(default_factory=dict)  # what of it is otherwise
    worlds: dict[str, dict[str, int]] = field(default_factory=dict)  # the layout of so many devices
    there: list[int] = field(default_factory=list)  # how many are there, from the first step on
    there_every: int = 1  # for so many steps each


@dataclass(frozen=True)
class Start:
    """How one start of a story ended, and how long it took."""

    story: str
    code: int
    what: str
    because: str
    seconds: float


def told(folder: Path, stories: list[Story], timeout: float = 120) -> dict[str, list[Start]]:
    """Make the runs of the stories in processes of their own; return how the starts of each ended."""
    from runs import environment, run_patiently

    (folder / "stories.json").write_text(json.dumps([asdict(story) for story in stories]))
    environ = {**environment(), "PYTHONPATH": os.pathsep.join(map(str, [TESTS, TESTS / "run", *sys.path]))}
    for _ in range(1 + sum(each.get("whom") == "supervisor" for story in stories for each in story.faults)):
        ran = run_patiently([sys.executable, __file__, folder], timeout, env=environ)
        if ran.returncode == 0:
            break
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    lines = [Start(**json.loads(line)) for line in (folder / "starts.jsonl").read_text().splitlines()]
    return {story.name: [line for line in lines if line.story == story.name] for story in stories}


class Told:
    """How the starts of each story ended, by its name; deep ones are told when one of them is first asked for."""

    def __init__(self, folder: Path, stories: list[Story], deep: list[Story], timeout: float) -> None:
        self._folder, self._deep, self._timeout = folder, deep, timeout
        self._found = told(folder, stories, timeout)

    def __getitem__(self, name: str) -> list[Start]:
        if name not in self._found:
            self._found |= told(self._folder, self._deep, self._timeout)
        return self._found[name]


def main(folder: Path) -> None:
    """Make the runs."""
    import warm  # noqa: F401 (what ranks share)
    from moving_clock import MovingClock

    clock = MovingClock()
    log = folder / "starts.jsonl"
    for values in json.loads((folder / "stories.json").read_text()):
        story = Story(**values)
        clock.is_set(story.clock_moves)
        for _ in range(story.most_starts):
            done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            mine = [line for line in done if line["story"] == story.name]
            if any(line["code"] == 0 for line in mine) or (mine and story.only_once):
                break
            began = time.monotonic()
            code, error = one_start(story, folder / story.name)
            start = Start(story.name, code, *error, time.monotonic() - began)
            with log.open("a") as file:
                file.write(json.dumps(asdict(start)) + "\n")


def one_start(story: Story, run_dir: Path) -> tuple[int, tuple[str, str]]:
    """Start a story once; return its exit code, and what ended it because of what."""
    from paceline.launch.worker import guarded
    from paceline.spec.layout import Layout
    from paceline.supervise import supervisor
    from paceline.supervise.again.mark_journal import mark_end
    from paceline.supervise.forked import fork
    from paceline.supervise.supervisor import supervise_started

    spec, layout = spec_of(story, run_dir), Layout(**story.layout)
    brief = _brief(spec, layout, story)
    if story.endless:
        supervisor.GRACE_SECONDS = 1e9
    if story.how == SURVIVES:
        outcome = _survive(spec, brief, run_dir, story)
        if outcome.error is not None:
            mark_end(run_dir, outcome.exit_code, outcome.error)
        return outcome.exit_code, _told(outcome)
    work = functools.partial(guarded, functools.partial(_train, spec, brief))
    outcome = supervise_started(
        functools.partial(fork, work), layout.devices, os.environ, health=spec.run.health, run_dir=run_dir
    )
    error = outcome.error
    if error is not None:
        mark_end(run_dir, outcome.exit_code, error)
    return outcome.exit_code, _told(outcome)


def _survive(spec: Any, brief: Any, run_dir: Path, story: Story) -> Any:
    """Return how a run ended that goes on by itself, in forks of this process."""
    import dataclasses

    from paceline.launch.worker import guarded
    from paceline.lock import LOCK_VARIABLE, take
    from paceline.spec.journal.kinds import DecisionRecord
    from paceline.spec.layout import Layout
    from paceline.supervise.again.elastic import Replanned
    from paceline.supervise.again.generations import Generations
    from paceline.supervise.again.machines import OneMachine
    from paceline.supervise.forked import fork
    from paceline.supervise.starting import Starter

    with take(run_dir) as lock:
        work = functools.partial(guarded, functools.partial(_train, spec, brief))
        held = os.dup(lock.descriptor)  # a fork gives up the lock's own

        def start(place: dict[str, str]) -> Any:
            token = lock.for_first_rank()[LOCK_VARIABLE].partition(":")[2]
            return fork(work, {**place, LOCK_VARIABLE: f"{held}:{token}"})

        def replan(devices: int, now: Any, gives_way: bool = False) -> Replanned:
            plan = _plan(Layout(**story.worlds[str(devices)]), spec, story)
            decision = DecisionRecord("replan", str(now.plan.layout), str(plan.layout), f"{devices} are there", None)
            return Replanned(dataclasses.replace(now, plan=plan), decision)

        starter, is_over = Starter(start, None, print), threading.Event()
        if story.there:
            threading.Thread(target=_come_and_go, args=(story, run_dir, spec, is_over), daemon=True).start()
        try:
            return Generations(
                OneMachine(starter, os.environ), brief, lock, spec.run.recovery, health=spec.run.health,
                replan=replan if story.worlds else None,
            ).run()  # fmt: skip
        finally:
            is_over.set()
            os.close(held)


def _come_and_go(story: Story, run_dir: Path, spec: Any, is_over: threading.Event) -> None:
    """Say in the run's file how many devices are there, as its steps go on."""
    from paceline.supervise.again.judge import reached_by

    path, told = Path(spec.run.recovery.devices_file), -1
    while not is_over.wait(0.05):
        at = min(reached_by(run_dir).step // story.there_every, len(story.there) - 1)
        if story.there[at] != told:  # in one moment: whoever read a file without words took all devices to be there
            told = story.there[at]
            fresh = path.with_name(f"{path.name}.fresh")
            fresh.write_text(str(told))
            fresh.replace(path)


def _told(outcome: Any) -> tuple[str, str]:
    return (str(outcome.error["what"]), str(outcome.error["because"])) if outcome.error else ("", "")


def spec_of(story: Story, run_dir: Path) -> Any:
    """Return the spec of a story: a tiny decoder on tokens of this repository's own making, or one of `TASKS`."""
    import dataclasses

    from tasks_of_storms import OF_ONE_TEST, TASKS
    from tests_shared import decoder_task

    from paceline.spec.arguments import make_spec
    from paceline.spec.cluster import ClusterSpec
    from paceline.units import Amount

    own = (TASKS | OF_ONE_TEST)[story.task] if story.task else None
    stop = Amount(story.steps, "steps")
    task = dataclasses.replace(own.make(run_dir.parent), stop=stop) if own else decoder_task(stop=stop)
    task = dataclasses.replace(task, optimizer=dataclasses.replace(task.optimizer, **story.optimizer))
    run = {"dir": str(run_dir), "checkpoint_every": "2 steps", "check_every": "1 steps", "evaluate_every": "none",
           "record_samples": True, "verify": False, "deterministic": True, **story.run}  # fmt: skip
    if story.there:
        run["recovery"] = {**run.get("recovery", {}), "devices_file": str(run_dir.with_suffix(".devices"))}
    faults = {"seed": story.seed, "each": story.faults}
    spec = make_spec(task, cluster=ClusterSpec(learn=False), run=run, faults=faults)
    return dataclasses.replace(spec, path=None)


def _train(spec: Any, brief: Any) -> None:
    from paceline.launch.here import place_here
    from paceline.launch.run import train_here
    from paceline.supervise.told.brief import take_brief

    train_here(spec, take_brief() or brief, place_here(os.environ))


def _plan(layout: Any, spec: Any, story: Story) -> Any:
    """Return the plan of a story's run on a layout."""
    from tasks_of_storms import OF_ONE_TEST, TASKS
    from tests_shared import plan_of

    own = (TASKS | OF_ONE_TEST)[story.task] if story.task else None
    changes = own.plan if own else {"micro_batch": story.micro_batch, "precision": story.precision}
    return plan_of(layout, int(spec.task.global_batch.value), **changes)


def _brief(spec: Any, layout: Any, story: Story) -> Any:
    from tasks_of_storms import OF_ONE_TEST, TASKS
    from tests_shared import SEQ_LEN

    from paceline.spec.journal.planned import PlannedRecord
    from paceline.supervise.told.brief import Brief

    own = (TASKS | OF_ONE_TEST)[story.task] if story.task else None
    items, unit = (own.items_per_sample, own.unit) if own else (SEQ_LEN, "tokens")
    plan = _plan(layout, spec, story)
    return Brief(plan, story.steps, items, unit, "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
