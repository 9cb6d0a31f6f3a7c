"""The fleet: the nodes of a run as the coordinator has them, each node with a supervisor at the other end of a link.

To the run's generations they are machines like one machine, but for what only several can do: come, go, and be lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import Requeue, WorkerDied
from paceline.lock import RunLock
from paceline.patience import Patience
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.timing.clock import passed_seconds
from paceline.spec.survive.health import HealthSpec
from paceline.spec.survive.nodes import NodesSpec
from paceline.supervise.again.fallen import TakenOver
from paceline.supervise.again.machines import seats_of
from paceline.supervise.blame import WELL_UNTIL, Outcome, leave_if_there_is_room, ranks_text
from paceline.supervise.control import CONTROL_VARIABLE
from paceline.supervise.nodes.agent import HERE
from paceline.supervise.nodes.far import FarRank, FarSight, FarStanding
from paceline.supervise.nodes.held_in_memory import HeldPieces, whole_of
from paceline.supervise.nodes.link import Knocking, NoPeer
from paceline.supervise.nodes.links import NodeLinks
from paceline.supervise.nodes.member import KILLED, Member, of_runs
from paceline.supervise.pulses.sight import ProcessOf
from paceline.supervise.pulses.silences import HangLimits
from paceline.supervise.pulses.watch import PulseWatch
from paceline.supervise.supervisor import ERROR_FOLDER
from paceline.supervise.told.brief import BRIEF_FILE, brief_from_json
from paceline.supervise.told.generation import FORKED, FROM_RANKS, GENERATION_FILE, RESTARTED, JudgedSoFar
from paceline.supervise.told.place import RENDEZVOUS, SERVED_STORE
from paceline.units import plural

LOOK_SECONDS = 0.01
SEEN_SECONDS = 1.0  # more than between two looks at a process
KNOCK_SECONDS = 1.0  # that who connects has to say who it is
PART_SECONDS = 2.0  # that nodes which leave have to hear of it
FILES = (GENERATION_FILE, BRIEF_FILE)
TOLD_OF_RANKS = {"overview", "seen", "stack"}

Say = Callable[[str], None]


class Fleet:
    """The nodes that have joined, by their number, and the ranks on them."""

    def __init__(self, spec: NodesSpec, server: socket.socket, secret: str, lock: RunLock, say: Say) -> None:
        """`server` is where nodes connect."""
        self.members: dict[int, Member] = {}
        self._stops: dict[int, str] = {}  # why nodes want the run to end, by their numbers
        self.node: int | None = None  # that of the coordinator
        self._spec, self._secret = spec, secret
        self._links = NodeLinks(server, spec.lost_after)
        self._knocking: list[Knocking] = []  # who has yet to say who it is
        self._lock, self._say = lock, say
        self._folder, self._world = Path(), Path()
        self._ranks: dict[int, FarRank] = {}  # of this world
        self._parted: list[Member] = []  # nodes that leave, whose links they will close
        self._in_world: list[int] = []  # nodes that the world was formed of
        self._blocks: dict[int, range] = {}  # and the ranks of each of them
        self._node_of: dict[int, int] = {}  # by rank
        self._promised: dict[int, range] = {}  # those of the next world, where files are meant for them
        self._given: set[int] = set()  # nodes that have the files of this world
        self._sight = FarSight(self._tell, self._ask)
        self._words: set[Path] = set()  # that ranks were left
        self._watched = 0  # the generation of the ranks that are looked at
        self._limits: HangLimits | None = None  # for those that tell nothing
        self._polled, self._endings = -math.inf, 0
        self.steps_down: Callable[[], None] = lambda: None  # where the greater part of the nodes is lost
        # Where the coordinator's node leaves: after which world, with which ranks, and what is told of it.
        self.hands_over: Callable[[int, Collection[int], str], None] = lambda world, ranks, because: None

    # ---- who is there ----------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Let nodes in, take what they tell, and note those that are lost. It waits for nothing."""
        self._knocking += [Knocking(end, self._secret, KNOCK_SECONDS) for end in self._links.knocking()]
        for each in [*self._knocking]:
            self._admit(each)
        for member in self._links.ready():
            for message in member.link.taken():
                self._hear(member, message)
            if member.link.is_lost:
                self._lose(member)
        self._polled = time.monotonic()

    def _poll_for_a_rank(self) -> None:
        """Do so, if it was not done a moment ago: the ranks of a world are asked one after the other."""
        if time.monotonic() - self._polled >= LOOK_SECONDS:
            self.poll()

    def changes(self) -> int:
        """Return how many processes are known to have ended: while it stays, nobody is to be asked."""
        self._links.look_after()
        self.poll()
        return self._endings

    def gather(
        self, expected: Callable[[], int], seconds: float, is_over: Callable[[], object] = lambda: False
    ) -> None:
        """Return when as many nodes are there as expected, or have been waited for, or it `is_over`."""
        patience = Patience(seconds)
        while len(self.members) < expected() and not (patience.is_over or self.stopped or is_over()):
            self.poll()
            time.sleep(LOOK_SECONDS)  # for nodes to come

    def _admit(self, each: Knocking) -> None:
        try:
            if (found := each.look()) is None:
                return
            member = Member.of(*found, self._spec.lost_after, self._poll_for_a_rank)
        except (NoPeer, KeyError, TypeError, ValueError, OSError) as error:  # the last of one that has gone just now
            self._knocking.remove(each)
            each.end.close()
            self._say(f"nodes    somebody was not let in: {error}")
            return
        self._knocking.remove(each)
        before = self.members.get(member.number)
        if before is not None:
            before.link.because = before.link.because or "its supervisor has been started again"
            self._lose(before)
        self.members[member.number] = member
        self._links.add(member)
        self._endings += len(member.processes)
        if self._in_world:  # what it has is of a world that others went on from
            member.forget()
        self._say(f"nodes    node {member.number} is there: {plural(member.devices or 0, 'device')} at {member.host}")

    def part_with(self, ranks: Collection[int], ended: Collection[int] = ()) -> str:
        """Have the nodes end whose ranks have left the world, and return which these are.

        Their links are closed by them: what is told last would be lost with a link that is closed here. `ended` are all
        ranks that have ended, which no coordinator that comes next is to take for lost.
        """
        numbers = sorted(self._nodes_of(ranks))
        for number in numbers:
            self._stops.pop(number, None)  # it ends, as it was asked to
            member = self.members.get(number)
            if member is None or not member.generation:  # its machine has ended by now, or another has its number
                continue
            self._let_go(member)
        self._in_world = [number for number in self._in_world if number not in numbers]
        names = f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        told = f"{names} left at a notice, with {ranks_text(ranks)}"
        if self.node in numbers:
            self._wait_for_parted()
            self.hands_over(_number_of(self._world), {*ranks, *ended}, told)
        return told

    def _wait_for_parted(self) -> None:
        """Return when the nodes that leave have heard of it and have closed their links, or after a while."""
        patience = Patience(PART_SECONDS)
        while not all(member.link.because for member in self._parted) and not patience.is_over:
            self.poll()
            time.sleep(LOOK_SECONDS)  # for what comes over the net

    def _let_go(self, member: Member) -> None:
        """Have a node's supervisor end."""
        del self.members[member.number]
        self._parted.append(member)
        member.standing = {}
        member.link.send({"end": Requeue.exit_code, "error": None})
        self._say(f"nodes    node {member.number} leaves the run")

    def _asked_to_stop(self, member: Member, because: str) -> None:
        """Note that a node was asked to stop, which all are with it; one without a rank of a world leaves alone.

        Not that of the coordinator, which ends with its node's supervisor.
        """
        if self._in_world and member.number not in (*self._in_world, self.node):
            self._let_go(member)
        else:
            self._stops[member.number] = because

    def _nodes_of(self, ranks: Collection[int]) -> set[int]:
        """Return the nodes that have these ranks of the world."""
        return {self._ranks[rank].node for rank in ranks if rank in self._ranks}

    def _lose(self, member: Member) -> None:
        """Note that a node is lost: its ranks count as ended."""
        if any(member is each for each in self._parted):
            self._links.drop(member)
            member.lost()
            return
        if self.members.get(member.number) is member:
            del self.members[member.number]
        its = {id(far) for far in member.processes.values()}
        lost = [rank for rank, far in self._ranks.items() if id(far) in its and far.code is None]
        self._say(f"nodes    node {member.number} is lost: {member.link.because}")
        if lost:
            died = WorkerDied(
                f"node {member.number} ({member.host}) is lost with {ranks_text(lost)}",
                member.link.because,
                "look after the node; started again there, the same command joins the run",
                exit_code=128 - KILLED,
            ).naming_ranks()
            # Its ranks are not seen to end: they were well when it was heard last, which was before any of them fails.
            heard_at = member.link.heard_at
            told = {**died.as_dict(), WELL_UNTIL: heard_at}
            leave_if_there_is_room(self._world, min(lost), told, heard_at - SEEN_SECONDS, say=self._say)
        for far in member.processes.values():
            far.lost_with = far.lost_with or f"node {member.number} ({member.host}) is lost"
        self._links.drop(member)
        member.lost()
        self._endings += 1
        left = [number for number in self._in_world if number in self.members]
        if self._in_world and 2 * len(left) < len(self._in_world):
            self.steps_down()

    def _hear(self, member: Member, message: Mapping[str, Any]) -> None:
        if any(member is each for each in self._parted):  # it may be asked to stop, which is not the run's
            return
        if "error" in message:
            error = message["error"]
            moment = passed_seconds() - error["time"]  # its age
            leave_if_there_is_room(self._world, error["rank"], error, moment, error["cause"], self._say)
        elif TOLD_OF_RANKS & message.keys():
            if message["generation"] == self._watched:  # a node may still tell of the world before
                self._sight.told(member.number, message, time.monotonic())
        elif "stopped" in message:
            self._asked_to_stop(member, message["stopped"])
        else:
            self._endings += bool({"ended", "collected"} & message.keys())
            member.hear(message)

    def _tell(self, message: Mapping[str, object]) -> None:
        """Tell the nodes of this world something."""
        for member in (self.members[number] for number in self._given if number in self.members):
            member.link.send(message)

    def _ask(self, ranks: Collection[int], by_signal: bool) -> None:
        """Have ranks write their stacks."""
        of_nodes: dict[int, list[int]] = {}
        for rank in ranks:
            far = self._ranks.get(rank)
            if far is not None and far.node in self.members:
                of_nodes.setdefault(far.node, []).append(rank)
        for number, its_ranks in of_nodes.items():
            self.members[number].link.send({"ask": its_ranks, "by_signal": by_signal})

    # ---- machines --------------------------------------------------------------------------------------------------

    def open(self, folder: Path) -> None:
        """Begin to serve a run, whose generations have folders below `folder`."""
        self._folder = self._world = folder

    def rest(self) -> None:
        """Note that nobody looks after ranks for as long as a plan takes."""
        self._links.rest()

    @property
    def stopped(self) -> str:
        """Why a node wants the run to end; "" where none does."""
        return next(iter(self._stops.values()), "")

    def is_stopped(self, leaving: Collection[int] = ()) -> bool:
        """Return whether a node was asked to stop, other than those of `leaving` ranks."""
        return bool(self._stops.keys() - self._nodes_of(leaving))

    def rung(self) -> str:
        """Return how the next ranks will be started."""
        return FORKED if all(member.rung == FORKED for member in self.members.values()) else RESTARTED

    def decisions(self) -> tuple[DecisionRecord, ...]:
        """Return what was decided on that the spec has not asked for: nothing here."""
        return ()

    @property
    def per_node(self) -> int:
        """The devices of each node that are used: as many as the least of them has."""
        return min((member.devices for member in self.members.values()), default=0)

    def devices_of_machine(self, told: int) -> int:
        """Return how many devices a machine has, of which `told` nodes are one machine, 0 where each is one.

        Where all nodes are there, no machine has more of them than have come from one address: a launcher may tell
        nothing of machines, and then all count as those of one.
        """
        if len(self.members) < self._spec.count:
            return self.per_node * max(1, told)
        most = max(Counter(member.host for member in self.members.values()).values(), default=1)
        return self.per_node * max(1, min(told, most))

    def devices(self) -> int | None:
        """Return how many devices are there now."""
        self.poll()
        return self.per_node * len(self.members)

    @property
    def unit(self) -> int:
        """The devices of a node."""
        return max(1, self.per_node)

    def wait_for(self, devices: int, is_over: Callable[[], object]) -> bool:
        """Return whether so many devices are there, or come before the run has waited for too long, or `is_over`."""
        patience = Patience(self._spec.wait)
        self._say(f"nodes    waiting up to {self._spec.wait:g} s for nodes with {plural(devices, 'device')} in all")
        while (self.devices() or 0) < devices:
            if patience.is_over or self.stopped or is_over():
                return False
            time.sleep(LOOK_SECONDS)  # for nodes to come
        return True

    def blocks(self, ranks: int) -> dict[int, range]:
        """Return the ranks of each node: neighbours stand on one node, as the planner has it.

        Nodes with survivors come first, in the order of their ranks: who records goes on recording.
        """
        each, found = self.per_node, {}
        first: dict[int, int] = {}
        for rank, far in self._ranks.items():
            if far.code is None:
                first[far.node] = min(rank, first.get(far.node, rank))
        for at, number in enumerate(sorted(self.members, key=lambda one: (first.get(one, math.inf), one))):
            block = range(at * each, min((at + 1) * each, ranks))
            if block:
                found[number] = block
        return found

    def places(self, folder: Path, ranks: int) -> list[dict[str, str]]:
        """Return what the environment of each rank of the next world has besides."""
        self.poll()
        self._world, self._given = folder, set()
        self._in_world = list(self._blocks)
        first = self.members.get(next(iter(self._blocks), -1))  # the node of rank 0, which serves the store
        meet = f"{first.host}:{first.free_port()}" if first is not None else "nobody:1"
        prefix = f"{self._lock.token}-{self._lock.generation}"
        shared = {
            "WORLD_SIZE": str(ranks),
            RENDEZVOUS: f"{SERVED_STORE}{meet}/{prefix}",
            ERROR_FOLDER: str(folder),
            **self._lock.for_far_ranks(),
        }
        found = {}
        for block in self._blocks.values():
            for rank in block:
                local = {"RANK": str(rank), "LOCAL_RANK": str(rank - block[0]), "LOCAL_WORLD_SIZE": str(len(block))}
                found[rank] = {**shared, **local}
        missing = {**shared, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # of a node that was lost just now
        return [found.get(rank, {**missing, "RANK": str(rank)}) for rank in range(ranks)]

    def seats(self, standing: Collection[int], ranks: int, needed: Collection[int] = ()) -> dict[int, int]:
        """Return which survivor takes which rank of the next world: one of its own node's."""
        self._blocks, self._promised = self._promised or self.blocks(ranks), {}
        found = self._seats_in(self._blocks, standing, needed)
        self._node_of = {rank: number for number, block in self._blocks.items() for rank in block}
        self._ranks = {new: self._ranks[old] for new, old in found.items()}
        return found

    def seated(self, standing: Collection[int], ranks: int, needed: Collection[int]) -> Collection[int]:
        """Return which survivors would take a rank of such a world."""
        return self._seats_in(self.blocks(ranks), standing, needed).values()

    def _seats_in(
        self, blocks: Mapping[int, range], standing: Collection[int], needed: Collection[int]
    ) -> dict[int, int]:
        """Return the seats of survivors where nodes have these ranks."""
        here: dict[int, list[int]] = {}
        for rank in standing:
            if rank in self._ranks:
                here.setdefault(self._ranks[rank].node, []).append(rank)
        found: dict[int, int] = {}
        for number, block in blocks.items():
            found |= seats_of(here.get(number, ()), block, needed)
        return found

    def start(self, place: Mapping[str, str]) -> FarRank:
        """Start a rank on its node with these additions to its environment."""
        rank = int(place["RANK"])
        member = self.members.get(self._node_of.get(rank, -1))
        if member is None:
            self._endings += 1
            return _gone(self.poll)
        self._give(member)
        far = member.start(self._there(place))
        self._ranks[rank] = far
        return far

    def for_survivors(self) -> dict[str, str]:
        """Return what the environment of ranks says that may stand by."""
        return {CONTROL_VARIABLE: str(self._folder / "control")}

    def standing(self, generation: int) -> Mapping[int, FarStanding]:
        """Return the ranks of a generation that stand by now."""
        self.poll()
        return {
            rank: FarStanding(rank, held)
            for member in self.members.values()
            if member.generation == generation
            for rank, held in member.standing.items()
        }

    def dismiss(self, ranks: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Answer all that stand by: each with its message, or that it does not go on."""
        for member in self.members.values():
            mine = {}
            for rank in member.standing:
                if ranks and rank in ranks:
                    self._give(member)
                    mine[rank] = {**ranks[rank], "place": self._there(ranks[rank]["place"])}
            member.link.send({"answers": mine})
            member.standing = {}

    def word(self, folder: Path, name: str) -> None:
        """Leave a word for the ranks of a generation, of which `folder` is the folder."""
        if folder / name not in self._words:
            self._words.add(folder / name)
            with contextlib.suppress(OSError):  # the coordinator's own disk is full: its node's ranks are told as well
                (folder / name).touch()
            self._tell({"word": str((folder / name).relative_to(self._folder))})

    def watch(
        self, health: HealthSpec | None, folder: Path, ranks: int, run_dir: Path, process_of: ProcessOf
    ) -> PulseWatch | None:
        """Return the watch over a world's ranks, None where hangs are not looked for. Nodes know their processes."""
        self._sight, self._limits, self._watched = FarSight(self._tell, self._ask), None, _number_of(folder)
        if health is None or not health.hangs:
            return None
        self._limits = HangLimits.of(health)
        return PulseWatch(folder, ranks, health, run_dir, self._sight.load, self._sight)

    def rescue(self, lock: RunLock, generation: int) -> str:
        """Return how ranks bring together what they hold: from rank to rank, since they share no memory."""
        return FROM_RANKS

    def take_over(self) -> TakenOver | None:
        """Return the world that another coordinator has left, as the nodes have it; None where there was none."""
        was = {number: member.was for number, member in self.members.items() if member.was.get("generation")}
        if not was:
            return None
        newest = max(told["generation"] for told in was.values())
        known = [number for number, told in was.items() if told["generation"] == newest]
        for number in was.keys() - set(known):
            self.members[number].forget()
        plan = brief_from_json(was[known[0]]["brief"]).plan
        standing: dict[int, FarStanding] = {}
        for number in known:
            member = self.members[number]
            self._ranks |= {rank: member.processes[process] for rank, process, _ in was[number]["ranks"]}
            standing |= {rank: FarStanding(rank, held) for rank, held in member.standing.items()}
        for rank in range(plan.layout.devices):
            self._ranks.setdefault(rank, _gone(self.poll))
        since = min(self.members[number].lost_at for number in known)
        away = {node for number in known for node in of_runs(was[number].get("members", ()))} - set(known)
        seconds, usd = max(was[number]["spent"] for number in known)
        judged = self.judged_before() or JudgedSoFar()
        ranks, gone = dict(self._ranks), tuple(sorted(away))
        return TakenOver(newest, plan, standing, ranks, since, gone, (seconds, usd), judged)

    def judged_before(self) -> JudgedSoFar | None:
        """Return what the coordinator before had counted of failures, as the nodes were told; None where none was."""
        told = [JudgedSoFar.of(member.was["judged"]) for member in self.members.values() if member.was.get("judged")]
        # Who came late was not told of the last.
        return max(told, key=lambda each: (each.furthest, each.fruitless, each.has_made_steps), default=None)

    def note_judged(self, judged: JudgedSoFar) -> None:
        """Have the nodes keep what is counted of failures: this coordinator may be lost before it forms a world."""
        for member in self.members.values():
            member.link.send({"judged": dataclasses.asdict(judged)})

    def held(self, ranks: int) -> HeldPieces | None:
        """Return what the nodes hold in memory between them, for the ranks of the next world."""
        listed = {number: member.pieces() for number, member in list(self.members.items())}
        self._promised = {}
        blocks = self.blocks(ranks)
        found = whole_of(listed, blocks)
        if found is not None:
            self._promised = blocks
        return found

    def close(self) -> None:
        """End what is left of the service to the run: the links stay until the end is told."""
        self.rest()

    def end(self, outcome: Outcome) -> None:
        """Tell all nodes how the run has ended."""
        for member in self.members.values():
            member.link.send({"end": outcome.exit_code, "error": outcome.error})
        for each in self._knocking:
            each.end.close()
        self._links.close()

    # ---- to the nodes ----------------------------------------------------------------------------------------------

    def _give(self, member: Member) -> None:
        """Have a node make room for this world, with the files that its ranks read."""
        if member.number in self._given:
            return
        self._given.add(member.number)
        files = {name: (self._world / name).read_text() for name in FILES if (self._world / name).exists()}
        member.enter(_number_of(self._world), self._in_world, self._there(files), self._limits)

    def _there(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return texts in which this process's folder is that of whoever reads them."""
        return {name: value.replace(os.fspath(self._folder), HERE) for name, value in values.items()}


def _number_of(folder: Path) -> int:
    """Return the number of a generation that has this folder."""
    return int(folder.name.rpartition("-")[2])


def _gone(poll: Callable[[], None]) -> FarRank:
    """Return a rank whose node is lost."""
    gone = FarRank(-1, -1, lambda message: None, poll)
    gone.code, gone.is_collected = KILLED, True
    return gone
