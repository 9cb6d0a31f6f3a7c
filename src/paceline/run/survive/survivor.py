"""A rank that outlives a peer: the rank keeps its state, leaves the broken world, and joins the next in its process.

What survivors hold between them goes from rank to rank, and each gets what it needs under its plan: no disk is needed.
What a rank holds itself does not travel. Ranks on devices of one machine bring it together as a checkpoint in the
machine's memory instead, which the next world restores as it would any other: it takes no memory of the devices.
"""

from __future__ import annotations

import os
import shutil
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.checkpoint import Snapshot, publish, take_snapshot, write
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.tiers.held_by_ranks import HeldByRanks
from paceline.errors import ConfigError, ExhaustedTogether, StorageError
from paceline.lock import adopt_generation
from paceline.run.assemble import Assembled
from paceline.run.loop.resume import Progress, RunIdentity, saved_state
from paceline.run.loop.step import StepStats
from paceline.run.loop.under_plan import refuse_replan
from paceline.run.process.groups import abort_groups
from paceline.run.process.world import World
from paceline.run.record.recorder import is_echo
from paceline.run.survive.agreed import Agreed
from paceline.run.survive.health.less_work import OwnPace
from paceline.run.survive.listener import holds_update, stop_listening
from paceline.run.survive.saving.peers import read_pieces
from paceline.run.survive.unrecorded import Unrecorded, of_all
from paceline.spec.plan import Plan
from paceline.spec.task import Task
from paceline.supervise.again.held_state import HeldState
from paceline.supervise.control import CALL_NAME, CONTROL_VARIABLE, Waits
from paceline.supervise.logs.rank import into_log
from paceline.supervise.parent import name_process
from paceline.supervise.supervisor import ERROR_FOLDER
from paceline.supervise.told.generation import FROM_RANKS, Generation, take_generation
from paceline.supervise.told.place import RENDEZVOUS, Place
from paceline.task.models.held import is_sharded_unit


@dataclass(frozen=True)
class Brought:
    """What a survivor brings: its state after a step, if that is sound, what the step did, and if its duties are done.

    Duties are what follows a step: its record, an evaluation, a checkpoint.
    """

    snapshot: Snapshot | None
    stats: StepStats | None
    is_done: bool
    state: HeldState = field(default_factory=HeldState)  # what the supervisor is told of it
    unrecorded: Unrecorded = field(default_factory=Unrecorded)
    learnt: OwnPace | None = None  # of how fast this rank is


@dataclass(frozen=True)
class Together:
    """What the ranks of a new world have brought together, what the last step did, and whether its duties are done."""

    root: Path | HeldByRanks
    stats: StepStats | None
    is_done: bool
    unrecorded: Unrecorded = field(default_factory=Unrecorded)  # of what the step has decided


def is_lost_peer(error: BaseException | None) -> bool:
    """Return whether an error only says that a peer has gone, by itself or as the cause of what it says."""
    while error is not None:
        if is_echo(error):
            return True
        error = error.__cause__ if isinstance(error, StorageError) else None
    return False


def without_frames(error: BaseException) -> BaseException:
    """Return an error that holds on to nothing: its frames know the groups of a world that is to be given up."""
    known: BaseException | None = error
    while known is not None:
        traceback.clear_frames(known.__traceback__)
        known.__traceback__ = None
        known = known.__cause__ or known.__context__
    return error


def why_not_reformed(task: Task, plan: Plan) -> str:
    """Return why this process cannot go on in another world, or ""."""
    if CONTROL_VARIABLE not in os.environ:
        return "no supervisor of ours has started it"
    try:
        refuse_replan(task, plan, plan)
    except ConfigError as error:
        return f"{error.what}: {error.because}"
    return ""


def call_of_supervisor() -> Path | None:
    """Return the file by which the supervisor calls ranks to another world; None where there is no supervisor."""
    folder = os.environ.get(ERROR_FOLDER)
    return Path(folder) / CALL_NAME if folder and CONTROL_VARIABLE in os.environ else None


def hold(run: RunIdentity, built: Assembled, plan: Plan, progress: Progress, stats: StepStats | None, is_done: bool,
         agreed: Agreed, is_due: bool) -> Brought:  # fmt: skip
    """Leave the broken world and return what this rank holds. Nobody is waited for.

    `agreed` knows the last state that the ranks have compared; `is_due` says whether this one is to be.
    """
    is_whole = built.stepper.is_whole and holds_update(built.stepper.last_update)
    stop_listening()
    abort_groups()
    if not is_whole:
        return Brought(None, None, False)
    for module in built.model.modules():
        if is_sharded_unit(module):  # weights may lie gathered, in the middle of a pass
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()
    built.stepper.buffers.put_back()
    tensors, extra = saved_state(run, built, plan, progress)
    taken = take_snapshot(progress.step, tensors, extra)
    state = agreed.held(taken, is_due)
    return Brought(None, None, False, state) if state.changed else Brought(taken, stats, is_done, state)


def next_place(world: World, waits: Waits) -> tuple[Place, Generation] | None:
    """Wait until the supervisor has a next world, and return this rank's place in it, which it is to join.

    Returns None where this rank does not go on.
    """
    answer = waits.answer()
    if not answer:
        return None
    os.environ.update(answer["place"])
    adopt_generation(answer["generation"])
    following = take_generation()
    into_log()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name_process(f"rank-{rank}-paceline")
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return Place(rank, size, world.local_rank, on_node, os.environ[RENDEZVOUS]), following


def bring_together(world: World, generation: Generation, held: Brought | None) -> Together | None:
    """Bring together what survivors hold, for the new world to restore it. Every rank calls it.

    A rank that is new holds nothing. Returns None where the generation restores an older checkpoint instead.
    """
    if not generation.rescue:
        return None
    step = generation.rescue_step
    is_meant = held and (not generation.rescue_world or held.state.generation == generation.rescue_world)
    mine = held if held and is_meant and held.snapshot and held.snapshot.step == step else None
    if generation.pieces:  # what living ranks hold is not whole, or older
        files = generation.pieces.get(str(world.rank))
        what = f"the state after step {step} was not read from the nodes' memory"
        read = Ranks(alone=world.size == 1).attempt(what, lambda: read_pieces(files) if files else None)
        mine = Brought(read, None, True) if read else None
    brings = mine if mine and mine.snapshot else None
    # Alike on all that bring anything, but for what is unrecorded: one rank's is sent, whatever the number of ranks.
    extra, stats = world.first_told((brings.snapshot.extra, brings.stats) if brings and brings.snapshot else None)
    undone = world.first_told((brings.unrecorded,) if brings and not brings.is_done else None) or ()
    of_first = world.share((brings.unrecorded,) if brings else None)
    left = of_all(of_first[0] if of_first else None, undone)
    taken = mine.snapshot if mine and mine.snapshot else Snapshot(step, {}, extra)
    taken, alone = replace(taken, extra=extra), world.size == 1
    if generation.rescue == FROM_RANKS or _travels(world):
        return Together(HeldByRanks(taken, Ranks(alone=alone)), stats, not undone, left)
    root = Path(generation.rescue)
    try:
        publish(write(root, taken, alone=alone), keep_last=1)
    except (StorageError, ExhaustedTogether) as error:  # on all ranks: the machine's memory has no room for files
        if is_lost_peer(error):
            raise
        let_go(Together(root, None, True), world)
        return Together(HeldByRanks(taken, Ranks(alone=alone)), stats, not undone, left)
    return Together(root, stats, not undone, left)


def _travels(world: World) -> bool:
    """Return whether state goes from rank to rank in any case: on devices it would take memory of theirs."""
    return world.device.type == "cpu"


def let_go(together: Together | None, world: World) -> None:
    """Remove what was brought together, when every rank has restored it."""
    if together is not None and isinstance(together.root, Path):
        world.wait()
        if world.is_first:
            shutil.rmtree(together.root, ignore_errors=True)
