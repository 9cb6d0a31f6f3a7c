"""A node whose machine is about to end leaves the run, and the others go on: no fault, and no step lost."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
from nodes import Nodes
from runs import records_of, steps_of, wait_for_step, wait_until, write_spec

from paceline.errors import PacelineError, Requeue, StorageError
from paceline.lock import RunLock
from paceline.run.survive.clouds.departing import Departing, Departure, departure_of
from paceline.session.nodes import coordinate
from paceline.spec.survive.nodes import NodesSpec
from paceline.spec.survive.recovery import RecoverySpec
from paceline.supervise.again.generations import Generations
from paceline.supervise.again.held_state import HeldState
from paceline.supervise.blame import Outcome, leave_error
from paceline.supervise.crew import Crew
from paceline.supervise.nodes.far import FarRank, FarStanding
from paceline.supervise.nodes.fleet import Fleet
from paceline.supervise.nodes.link import NodeLink
from paceline.supervise.nodes.meeting import NAME, announce, find_meeting, leave
from paceline.supervise.nodes.member import Member

HERE = "/proc/self/cwd/ends"  # another file for each process's directory


@pytest.mark.parametrize("is_first", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_node_leaves_at_its_notice_and_the_others_go_on(tmp_path: Path, is_first: bool) -> None:
    """Weights are in shards, so that what the node held is read from the checkpoint of the same step.

    Where it has the first rank and the coordinator, both are elsewhere then.
    """
    run_dir = tmp_path / "run"
    nodes = Nodes(
        write_spec(tmp_path, run_dir, 3, "dp_shard = 3", precision="fp64"), 3,
        "--set", "task.stop=100000 steps", "--set", "run.recovery.standby=false",
        "--set", f"run.recovery.notice_file={HERE}",
    )  # fmt: skip
    try:
        nodes.start()
        wait_for_step(run_dir, 6, nodes.processes[0])
        first = next(number for number in range(3) if nodes.coordinator() in nodes.running(number))
        assert first == 0, "which has the first rank too"
        leaves = first if is_first else 1
        others = [number for number in range(3) if number != leaves]
        (nodes.folder(leaves) / "ends").touch()
        code, said = nodes.ended(leaves)
        assert code == 75, said
        stays = nodes.processes[others[-1]]
        wait_until(lambda: bool(records_of(run_dir, "recovery")) or stays.poll() is not None)
        wait_for_step(run_dir, len(steps_of(run_dir)) + 3, stays)
        nodes.processes[others[0]].send_signal(signal.SIGTERM)
        assert [nodes.ended(number)[0] for number in others] == [75, 75]
    finally:
        nodes.close()
    (recovery,) = records_of(run_dir, "recovery")
    assert (recovery["from_world"], recovery["to_world"], recovery["rung"]) == (3, 2, "reform"), recovery
    assert recovery["steps_lost"] == 0 and f"node {leaves} left at a notice" in recovery["because"]
    assert not records_of(run_dir, "fault")
    assert len(records_of(run_dir, "run_started")) == 1 + is_first, "who goes on has records of its own"
    decided = {each["what"]: each for each in records_of(run_dir, "decision")}
    assert decided["nodes"]["to"] == f"without node {leaves}" and "has appeared" in decided["nodes"]["because"]
    plan = decided["plan" if is_first else "replan"]  # with its forecast: who coordinates anew plans for who is there
    assert plan["because"] and "dp_replicate=2" in str(plan["to"])
    steps = [step["step"] for step in steps_of(run_dir)]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_node_that_ends_before_it_is_let_go_is_named_and_one_that_takes_its_place_stays(begun_anew: bool) -> None:
    """Its machine is gone with the ranks' last word, and its number may be that of another one by then."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        fleet = Fleet(NodesSpec(), server, "secret", cast(RunLock, None), lambda line: None)
        heard = list[object]()
        link = SimpleNamespace(send=heard.append)
        if begun_anew:
            fleet.members[1] = Member(1, 1, "127.0.0.1", "", cast(NodeLink, link), lambda: None)
        fleet._ranks = {2: FarRank(1, 7, lambda message: None, lambda: None)}
        assert fleet.part_with([2]) == "node 1 left at a notice, with rank 2"
    assert list(fleet.members) == [1] * begun_anew and not heard


class TwoNodes:
    """A fleet of two nodes with two ranks each, in its fifth world; those of node 1 have saved and ended, to leave."""

    def __init__(self, server: socket.socket, folder: Path) -> None:
        self.fleet = Fleet(NodesSpec(), server, "secret", cast(RunLock, None), lambda line: None)
        self.heard: dict[int, list[object]] = {0: [], 1: []}
        for number in (0, 1):
            link = cast(NodeLink, SimpleNamespace(send=self.heard[number].append))
            self.fleet.members[number] = Member(number, 2, "127.0.0.1", "", link, lambda: None, generation=5)
        ranks = {rank: FarRank(rank // 2, rank + 1, lambda message: None, lambda: None) for rank in range(4)}
        self.fleet._ranks, self.fleet._in_world, self.fleet.node = ranks, [0, 1], 0
        for rank in (2, 3):
            ranks[rank].code = ranks[rank].returncode = Requeue.exit_code
            ranks[rank].is_collected = True
        self.fleet.members[0].standing = {rank: HeldState() for rank in (0, 1)}
        self.fleet.open(folder)
        self.generations = object.__new__(Generations)
        self.generations._machines, self.generations._policy = self.fleet, RecoverySpec()
        self.generations._crew, self.generations._is_stopped = Crew(list(ranks.values())), self.fleet.is_stopped


@pytest.mark.parametrize("asked", [(), (1,), (0,), (0, 1)])
def test_a_node_that_is_asked_to_stop_as_it_leaves_ends_alone(tmp_path: Path, asked: tuple[int, ...]) -> None:
    """Its ranks have saved and ended, and a machine that goes asks its programs to stop: that stopped the whole run."""
    (tmp_path / "generation-5").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        two = TwoNodes(server, tmp_path)
        for number in asked:
            two.fleet._hear(two.fleet.members[number], {"stopped": f"received SIGTERM on node {number}"})
        assert two.fleet.is_stopped() == bool(asked)
        fallen = two.generations._attended(5, tmp_path / "generation-5", None, None, is_new=True)
    assert fallen.outcome == Outcome(Requeue.exit_code) and set(fallen.standing) == {0, 1}
    if 0 in asked:
        assert not fallen.called and two.fleet.is_stopped(), "the others were asked too"
        return
    assert fallen.called == "node 1 left at a notice, with ranks 2, 3"
    assert two.heard[1][-1] == {"end": Requeue.exit_code, "error": None}
    assert list(two.fleet.members) == [0] and not two.fleet.is_stopped()


def test_a_node_whose_ranks_a_stop_has_ended_before_they_saved_does_not_leave(tmp_path: Path) -> None:
    """They import anew, as a signal meets them, and survivors wait for them: the run went on though it was to stop."""
    (tmp_path / "generation-5").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        two = TwoNodes(server, tmp_path)
        for rank in (2, 3):
            far = two.fleet._ranks[rank]
            far.code = far.returncode = -signal.SIGTERM
        two.generations._crew = Crew(list(two.fleet._ranks.values()), is_stopped=two.fleet.is_stopped)
        two.fleet._hear(two.fleet.members[1], {"stopped": "received SIGTERM on node 1"})
        fallen = two.generations._attended(5, tmp_path / "generation-5", None, None, is_new=True)
    assert fallen.outcome == Outcome(Requeue.exit_code) and not fallen.called
    assert two.fleet.is_stopped() and list(two.fleet.members) == [0, 1]


@pytest.mark.parametrize(("how", "coordinator"), [("killed", 0), ("failed", 0), ("killed", 1)])
def test_a_node_whose_rank_came_too_late_to_stand_by_stays_as_another_leaves(
    tmp_path: Path, how: str, coordinator: int
) -> None:
    """Its rank was ended after its grace, or failed for want of its peers: it was let go with the node that left."""
    world = tmp_path / "generation-5"
    world.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        two = TwoNodes(server, tmp_path)
        late = two.fleet._ranks[1]
        late.code = late.returncode = -signal.SIGKILL if how == "killed" else 1
        late.is_collected = True
        two.fleet.members[0].standing = {0: HeldState()}
        if how == "killed":
            two.generations._crew.killed.add(1)
        else:
            echo = PacelineError("a peer has gone", "its connection was closed", "look there").as_dict()
            leave_error(world, 1, echo, cause=False)
        handed = list[object]()
        two.fleet.node, two.fleet._wait_for_parted = coordinator, lambda: None  # type: ignore[method-assign]
        two.fleet._world, two.fleet.hands_over = world, lambda *given: handed.append(given)
        fallen = two.generations._attended(5, world, None, None, is_new=True)
    assert fallen.called == "node 1 left at a notice, with ranks 2, 3"
    assert list(two.fleet.members) == [0] and set(fallen.standing) == {0}
    # The next coordinator misses rank 1 too, and nothing has failed.
    assert handed == ([(5, {1, 2, 3}, fallen.called)] if coordinator == 1 else [])


def test_a_node_that_is_lost_as_all_stand_by_leaves_the_others_standing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost between the look that found all standing and the next: those of the other node were ended too."""
    world, looks = tmp_path / "generation-5", [0]
    world.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        two = TwoNodes(server, tmp_path)
        ranks, fleet = two.fleet._ranks, two.fleet
        for rank, far in ranks.items():
            far.code, far.is_collected = (-signal.SIGKILL, True) if rank == 1 else (None, False)
            far.returncode = far.code
        member = fleet.members[1]
        member.standing = {rank: HeldState() for rank in (2, 3)}
        member.processes = {each.pid: each for rank, each in ranks.items() if rank in (2, 3)}
        fleet.members[0].standing, fleet._in_world = {0: HeldState()}, [0, 1]
        standing = fleet.standing

        def looked(generation: int) -> Mapping[int, FarStanding]:
            looks[0] += 1
            if looks[0] == 2:
                del fleet.members[1]
                for far in member.processes.values():
                    far.code, far.returncode, far.is_collected = -signal.SIGKILL, -signal.SIGKILL, True
            return standing(generation)

        monkeypatch.setattr(fleet, "standing", looked)
        monkeypatch.setattr(fleet, "dismiss", lambda: pytest.fail("the rank that is left does not go on"))
        monkeypatch.setattr(two.generations, "_settled", lambda folder, standing, is_empty: lambda: bool(standing()))
        fallen = two.generations._attended(5, world, None, None, is_new=True)
    assert set(fallen.standing) == {0} and fallen.outcome.exit_code == 137


def test_a_run_ends_to_be_started_again_where_nobody_is_left_to_stand_by_as_a_node_leaves(tmp_path: Path) -> None:
    """Ranks that all were to save and end, of which some came too late, look the same: a limit may have ended them."""
    world = tmp_path / "generation-5"
    world.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        two = TwoNodes(server, tmp_path)
        for rank in (0, 1):
            two.fleet._ranks[rank].code = two.fleet._ranks[rank].returncode = -signal.SIGKILL
            two.fleet._ranks[rank].is_collected = True
        two.generations._crew.killed |= {0, 1}
        two.fleet.members[0].standing = {}
        fallen = two.generations._attended(5, world, None, None, is_new=True)
    assert (fallen.outcome, fallen.called, fallen.standing) == (Outcome(Requeue.exit_code), "", {})
    assert list(two.fleet.members) == [0, 1] and {"end": Requeue.exit_code, "error": None} not in two.heard[1]


def test_what_a_coordinator_had_begun_to_write_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the secret of a run, and stayed for ever where a coordinator ended while it wrote."""
    begun = tmp_path / f".{NAME}-4711"
    begun.write_text('{"host": "127.')
    begun.chmod(0o644)
    meeting = announce(tmp_path, "127.0.0.1", 1, 0)
    assert [path.name for path in tmp_path.iterdir()] == [NAME] and find_meeting(tmp_path) == meeting
    (tmp_path / f".{NAME}-{os.getpid()}").touch(0o644)  # of a process that had this one's number
    announce(tmp_path, "127.0.0.1", 1, 0)
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr("paceline.supervise.nodes.meeting.publish", failing)
    with pytest.raises(StorageError, match="where the coordinator is"):
        leave(tmp_path, meeting, 5, [0], "why")
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def failing(*given: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_coordinator_that_goes_says_so_only_while_it_is_the_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Over the address of the one that had taken the directory, whom nodes would not have found."""
    ended = list[str]()
    monkeypatch.setattr(coordinate, "_end_here", lambda lock, told, say: ended.append(told))
    mine = announce(tmp_path, "127.0.0.1", 1, 0)
    there = (
        announce(tmp_path, "127.0.0.1", 2, 1) if is_lost else replace(mine, left="why", left_world=5, left_ranks=(0,))
    )
    lock = cast(RunLock, SimpleNamespace(run_dir=tmp_path, is_lost=is_lost))
    coordinate._hand_over(lock, mine, lambda line: None, 5, [0], "why")
    assert find_meeting(tmp_path) == there and ended


def test_a_node_without_a_rank_of_the_world_leaves_it_when_it_is_asked_to_stop(tmp_path: Path) -> None:
    """It waits to join. It stayed, and the next fault ended the whole run as one that was asked to stop."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        fleet = TwoNodes(server, tmp_path).fleet
        heard = list[object]()
        for number in (2, 3):
            link = cast(NodeLink, SimpleNamespace(send=heard.append))
            fleet.members[number] = Member(number, 2, "127.0.0.1", "", link, lambda: None)
        fleet._hear(fleet.members[2], {"stopped": "received SIGTERM on node 2"})
        assert not fleet.is_stopped() and set(fleet.members) == {0, 1, 3}
        assert heard == [{"end": Requeue.exit_code, "error": None}]
        fleet.node = 3  # whose supervisor the coordinator ends with
        fleet._hear(fleet.members[3], {"stopped": "received SIGTERM on node 3"})
        assert fleet.is_stopped() and set(fleet.members) == {0, 1, 3}


def told(*nodes: int, **changes: object) -> list[Departing]:
    """Return what two ranks of each of three nodes tell, of which some have a notice; the coordinator is on node 0."""
    ranks = [Departing(rank // 2, "ends" if rank // 2 in nodes else "", False, True) for rank in range(6)]
    return [replace(ranks[0], coordinator=0), *ranks[1:5], replace(ranks[5], **changes)]  # type: ignore[arg-type]


def test_all_ranks_of_a_node_leave_with_it() -> None:
    assert departure_of(told(1), RecoverySpec()) == Departure((1,), (2, 3), "ends")
    one_heard = [replace(each, notice="") if rank == 2 else each for rank, each in enumerate(told(1))]
    assert departure_of(one_heard, RecoverySpec()) == Departure((1,), (2, 3), "ends"), "its first rank alone looks"
    both = departure_of(told(1, 2), RecoverySpec())
    assert both is not None and str(both) == "nodes 1, 2" and both.ranks == (2, 3, 4, 5)
    assert departure_of(told(0), RecoverySpec()) == Departure((0,), (0, 1), "ends"), "the first rank, with the records"
    elsewhere = [replace(told(1)[0], coordinator=1), *told(1)[1:]]
    assert departure_of(elsewhere, RecoverySpec()) == Departure((1,), (2, 3), "ends")


@pytest.mark.parametrize(
    ("ranks", "policy"),
    [
        ([replace(told(1)[0], coordinator=None), *told(1)[1:]], RecoverySpec()),
        (told(), RecoverySpec()),  # a signal, or a limit
        (told(1, other=True), RecoverySpec()),
        (told(1, stands_by=False), RecoverySpec()),
        (told(1), RecoverySpec(min_devices=5)),
        (told(0, 1, 2), RecoverySpec()),
        (told(1), RecoverySpec(on_notice="stop")),
        (told(1), RecoverySpec(reform=False)),
        ([replace(each, node=None) for each in told(1)], RecoverySpec()),  # of one machine
    ],
)
def test_the_whole_run_stops_where_the_others_could_not_go_on(ranks: list[Departing], policy: RecoverySpec) -> None:
    assert departure_of(ranks, policy) is None
