"""Resume: what a run keeps between starts, and what may change from one start to the next.

The machines may change, and so may the plan; the experiment may not. Checkpoints hold weights, optimizer state, the
loss scale and one number for the data: the position. Random numbers need nothing: they are a function of the seed
and the position.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.checkpoint import (
    CheckpointInfo,
    IndexReader,
    KeptPlan,
    load_latest,
    materialise_optimizer_state,
    read_manifest,
    save_checkpoint,
    training_state,
)
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.tiers.held_by_ranks import HeldByRanks
from paceline.checkpoint.tiers.newest import newest_whole
from paceline.checkpoint.tiers.remote import fetch_newer
from paceline.errors import ConfigError, VerificationFailed
from paceline.run.assemble import Assembled
from paceline.run.process.world import World
from paceline.run.survive.saving.memory_tier import memory_root
from paceline.run.survive.written_by import other_writer, written_by
from paceline.run.updates.several_rules import JoinedOptimizer
from paceline.spec.adapt.adapter import TURNED
from paceline.spec.layout import Layout
from paceline.spec.load import Spec, spec_to_dict
from paceline.spec.plan import Plan
from paceline.spec.run_files import checkpoints_folder
from paceline.spec.survive.contract import Change, check_contract
from paceline.spec.sync import refuse_resync
from paceline.task.adapt.trained import turned_layers
from paceline.task.data.described import what_changed
from paceline.task.optimizer.schedule import Course
from paceline.task.plain_names import named_parameters

RANKS_MEMORY = "the memory of the ranks"  # for the journal, where it names the checkpoint that a run goes on from
LOOK_AHEAD = 10_000  # steps in which another course must show
SavedBeside = Mapping[str, Any]  # what a checkpoint says beside its tensors, as `saved_state` has made it


@dataclass(frozen=True)
class Progress:
    """How far training is: updates made and samples consumed."""

    step: int
    position: int


class KeepsState(Protocol):
    """What keeps plain data from one start to the next."""

    def state(self) -> Any:
        """Return what a checkpoint holds of it."""

    def load(self, state: Any) -> None:
        """Take what a checkpoint held, None where it held nothing."""


@dataclass(frozen=True)
class RunIdentity:
    """What every start of a run has alike, and checkpoints are checked against."""

    dir: Path
    spec: Spec
    fingerprint: str  # of the data
    course: Course
    data: Mapping[str, Any] = field(default_factory=dict, compare=False)  # in plain numbers, for what changed
    kept: Mapping[str, KeepsState] = field(default_factory=dict, compare=False)  # what else has a state, by name
    # The spec as plain data, before a plan has changed the class of a model that was given as an object.
    stated: Mapping[str, Any] = field(init=False, compare=False, repr=False)
    writer: Mapping[str, Any] = field(init=False, compare=False, repr=False)  # versions and code, as checkpoints say

    def __post_init__(self) -> None:
        object.__setattr__(self, "stated", spec_to_dict(self.spec))
        object.__setattr__(self, "writer", written_by(self.stated["task"]))


@dataclass(frozen=True)
class Restored:
    """The checkpoint a run goes on from."""

    path: Path
    progress: Progress
    notes: list[str] = field(default_factory=list)
    data_changed: bool = False  # and were accepted


def save(
    run: RunIdentity,
    built: Assembled,
    plan: Plan,
    world: World,
    progress: Progress,
    fence: Callable[[], None] | None = None,
    kept: KeptPlan | None = None,
) -> CheckpointInfo:
    """Write a checkpoint of this moment. Every rank calls it; rank 0's `fence` raises where it may not be published.

    `kept` is the plan of the last save, for the next one.
    """
    tensors, extra = saved_state(run, built, plan, progress)
    return save_checkpoint(
        checkpoints_folder(run.dir),
        progress.step,
        tensors,
        extra,
        keep_last=run.spec.run.keep_last,
        fence=fence,
        kept=kept,
        alone=world.size == 1,
    )


def saved_state(
    run: RunIdentity, built: Assembled, plan: Plan, progress: Progress
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Return what a checkpoint of this moment holds on this rank: the live tensors by name, and what the run adds."""
    scaler = built.stepper.scaler
    tensors = state_tensors(built)
    extra = {
        "progress": dataclasses.asdict(progress),
        "scaler": scaler.state() if scaler else None,
        "guard": built.stepper.guard.state() if built.stepper.guard else None,
        "growth": built.stepper.growth.state() if built.stepper.growth else None,
        **{name: each.state() for name, each in run.kept.items()},
        "schedule": run.course.as_dict(),
        "data_fingerprint": run.fingerprint,
        "data": dict(run.data),
        "spec": dict(run.stated),
        "plan": dataclasses.asdict(plan),
        **run.writer,
    }
    if turned := turned_layers(built.stepper.model):
        extra[TURNED] = turned
    if built.stepper.slots is not None:
        extra["expert_slots"] = built.stepper.slots.state()
    return tensors, extra


def state_tensors(built: Assembled) -> dict[str, torch.Tensor]:
    """Return the live tensors that a checkpoint of this moment holds on this rank, by name."""
    materialise_optimizer_state(built.optimizer)
    return _state(built)


def restore(
    run: RunIdentity,
    built: Assembled,
    plan: Plan,
    world: World,
    root: Path | HeldByRanks | None = None,
    looks_far: bool = True,
) -> Restored | None:
    """Load the newest sound checkpoint of a run into what was built, or return None where there is none.

    `root` is the folder of checkpoints, the run's own if it is not given; or the state, where ranks hold it. Remote
    storage is asked for a newer one; without `looks_far` only where there is none here.

    Raises ConfigError where the task is not the one that the checkpoint belongs to, or copies were kept in step in
    another way, and VerificationFailed where the learning rate would take another course though nothing in the task
    says so.
    """
    if isinstance(root, HeldByRanks):
        notes = _changes(run, dict(root.extra), plan)
        _make_state(built, root.names)
        root.fill(_state(built))
        return _taken(run, built, plan, Path(RANKS_MEMORY), root.extra, notes)
    in_memory = None if root else world.share(memory_root(run.dir))
    roots = [root] if root else [each for each in (in_memory, checkpoints_folder(run.dir)) if each is not None]
    url, ranks = None if root else run.spec.run.checkpoints.remote, Ranks(alone=world.size == 1)
    hanging = run.spec.run.checkpoints.hanging_after

    newest, fetched = newest_whole(roots, ranks), list[str]()
    if url and (looks_far or newest is None):
        fetched = ranks.from_first(f"{url} was not read", partial(fetch_newer, url, roots, roots[-1], hanging))
        newest = newest_whole(roots, ranks)
    manifest = read_manifest(newest) if newest and world.is_first else None
    written = world.share(json.dumps(dict(manifest.extra)) if manifest else "")
    stored = json.loads(
        world.share(json.dumps(sorted(IndexReader(newest, manifest).kinds) if newest and manifest else []))
    )
    changes = _changes(run, json.loads(written), plan) if written else []
    _make_state(built, stored)
    found = load_latest(roots, _state(built), alone=world.size == 1)
    if found is None:
        return None
    path, extra, skipped, unchecked = found
    notes = [*fetched, *(f"skipped {reason}" for reason in skipped), *changes]
    if in_memory is not None and path.parent == in_memory:
        notes.append(f"the memory of this machine has the newest checkpoint, of step {extra['progress']['step']}")
    if unchecked:
        also = f" and {len(unchecked) - 1} more" if len(unchecked) > 1 else ""
        notes.append(f"the values of {unchecked[0]}{also} were not checked: the checkpoint has no fingerprint of them")
    return _taken(run, built, plan, path, extra, notes)


def _make_state(built: Assembled, stored: Collection[str]) -> None:
    """Give the optimizer the state that the tensors of these names are loaded into."""
    optimizer = built.optimizer
    materialise_optimizer_state(optimizer)
    if isinstance(optimizer, JoinedOptimizer):  # of others' rules the state is known by what was saved
        prefix = built.stepper.sync.optimizer_prefix
        reached = {name.rpartition(".")[0].removeprefix(prefix) for name in stored if name.startswith(prefix)}
        optimizer.begin([weight for name, weight in named_parameters(built.model) if name in reached])


def _taken(
    run: RunIdentity, built: Assembled, plan: Plan, path: Path, extra: SavedBeside, notes: list[str]
) -> Restored:
    """Put what belongs to the loaded tensors in its place, and return what was restored."""
    if built.stepper.guard is not None:
        built.stepper.guard.load(extra.get("guard"))
    if built.stepper.slots is not None:
        built.stepper.slots.load(extra.get("expert_slots"))
    for name, own in (("scaler", built.stepper.scaler), ("growth", built.stepper.growth)):
        if own is not None and extra.get(name):
            own.load(extra[name])
            _check_taken(path, name, extra[name], own.state())
    for name, each in run.kept.items():
        each.load(extra.get(name))
    if extra["plan"]["layout"] != dataclasses.asdict(plan.layout):
        notes.append(f"resharded from layout {Layout(**extra['plan']['layout'])} to {plan.layout}")
    changed = extra["data_fingerprint"] != run.fingerprint  # which was accepted, or nothing would be restored
    return Restored(path, Progress(**extra["progress"]), notes, changed)


def _check_taken(path: Path, name: str, written: object, state: object) -> None:
    """Raise VerificationFailed where plain data are not as a checkpoint has them; tensors have their fingerprints."""
    if json.dumps(written, sort_keys=True) != json.dumps(state, sort_keys=True):
        raise VerificationFailed(
            f"the state '{name}' loaded from {path} is not the one that was saved",
            f"it is {json.dumps(state)}, and {json.dumps(written)} before the save: it was written or read wrongly",
            "the version of paceline that wrote the checkpoint",
        )


def _state(built: Assembled) -> dict[str, torch.Tensor]:
    """Return all that training changes, live, under the names that it has in checkpoints."""
    return built.stepper.sync.named(training_state(built.model, built.optimizer))


def _changes(run: RunIdentity, extra: SavedBeside, plan: Plan) -> list[str]:
    """Return what is to be told of a resume under `plan`; raise ConfigError or VerificationFailed where none may be."""
    changes, data = _check_same_experiment(run, extra), _check_same_data(run, extra)
    refuse_resync(extra["plan"], plan.sync, plan.layout.dp_replicate)
    moves_rate = any(change.clause.moves_rate for change in changes)
    course = _check_same_course(run.course, extra, moves_rate)
    written = other_writer(extra, run.writer)
    return [*map(str, changes), *data, *_precision_changed(extra["plan"], plan), *course, *written]


def _check_same_experiment(run: RunIdentity, extra: SavedBeside) -> list[Change]:
    """Return the changes of the spec that a resume tells; raise ConfigError naming one that it does not allow."""
    return check_contract(extra["spec"], dict(run.stated), run.dir)


def _check_same_data(run: RunIdentity, extra: SavedBeside) -> list[str]:
    """Return what is to be told of data that changed and were accepted; raise ConfigError where they were not."""
    before, now = extra["data_fingerprint"], run.fingerprint
    if before == now:
        return []
    changed = what_changed(extra["data"], run.data) if extra.get("data") else ""
    what = f"their fingerprint was {before} and is now {now}" + (f": {changed}" if changed else "")
    if run.spec.run.accept_data == now:
        position = extra["progress"]["position"]
        return [
            f"the data changed: {what}; run.accept_data says to go on, with the new data's order from {position} on"
        ]
    raise ConfigError(
        f"{run.dir} was trained on other data",
        what,
        "restore the data, or start a new run in another run.dir; "
        f"--set run.accept_data={now} goes on with the new data, some samples of which come again or not at all",
    )


def _precision_changed(written: dict[str, object], plan: Plan) -> list[str]:
    """Return what is to be told where a plan rounds otherwise than the one before, chosen or not."""
    if written["precision"] == plan.precision:
        return []
    return [f"the plan's precision was {written['precision']} and is now {plan.precision}: numbers round otherwise"]


def _own_course_changed(before: Course, course: Course, next_step: int) -> list[str]:
    """Return what is to be told where a function or scheduler of the user's gives other rates than it did."""
    then = {int(step): rate for step, rate in before.rates}
    both = [(step, then[step], rate) for step, rate in course.rates if step in then and step >= next_step]
    changed = next(((step, old, new) for step, old, new in both if old != new), None)
    if changed is None:
        return []
    step, old, new = changed
    return [f"the learning rate of step {step} is {new:.6g}, where it was to be {old:.6g}: its function gives another"]


def _check_same_course(course: Course, extra: SavedBeside, moves_rate: bool) -> list[str]:
    """Return what a changed task does to the learning rate; raise VerificationFailed where no change explains it."""
    if "schedule" not in extra:  # an earlier release wrote it
        return []
    before, next_step = Course(**extra["schedule"]), extra["progress"]["step"] + 1
    if before.rates or course.rates:
        return _own_course_changed(before, course, next_step)
    last = min(max(before.steps, course.steps), next_step + LOOK_AHEAD)
    departs = (step for step in range(next_step, last + 1) if before.at(step) != course.at(step))
    step = next(departs, None) if before != course else None
    if step is None:
        return []
    now = f"the learning rate of step {step} is {course.at(step):.6g}, where it was to be {before.at(step):.6g}"
    if moves_rate:
        return [f"{now}: the task says so"]
    pairs = [(name, old, getattr(course, name)) for name, old in vars(before).items()]
    differing = [f"its {name} was {old} and is {new}" for name, old, new in pairs if old != new]
    raise VerificationFailed(
        f"the schedule is not the one of the run that is resumed: {now}",
        f"{', '.join(differing)}, though the task is the same: the plan or the number of devices must not change it",
        "report this; an earlier release or the former number of devices goes on with the right schedule",
    )
