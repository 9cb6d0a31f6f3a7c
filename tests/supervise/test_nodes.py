"""Runs on several nodes: what is lost of them, what comes back, and that it is one experiment throughout."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from networks import networks
from nodes import Nodes
from rounding import assert_curves_close
from runs import paceline, records_of, steps_of, wait_for_step, wait_until, write_spec
from thread_worlds import on_threads

from paceline.errors import PacelineError
from paceline.lock import RunLock
from paceline.run.loop.resume import RANKS_MEMORY
from paceline.run.process.world import World
from paceline.run.survive.saving.peers import Peers, met_on
from paceline.spec.survive.nodes import NodesSpec
from paceline.supervise import blame as blame_module
from paceline.supervise.blame import errors_told, leave_error
from paceline.supervise.lines import Lines
from paceline.supervise.nodes import agent as agent_module
from paceline.supervise.nodes import fleet as fleet_module
from paceline.supervise.nodes import held_in_memory
from paceline.supervise.nodes.agent import Agent
from paceline.supervise.nodes.fleet import Fleet
from paceline.supervise.nodes.held_in_memory import PREFIX, PiecesFolder, whole_of
from paceline.supervise.nodes.link import Knocking, NodeLink, NoPeer, knock
from paceline.supervise.nodes.member import Member
from paceline.supervise.starting import Starter

STEPS = 16
OPTIONS = [
    word
    for option in ("run.recovery.worth=none", "task.stop=100000 steps", "run.recovery.standby=false")
    for word in ("--set", option)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def one_device(folder: Path) -> Path:
    run_dir = folder / "one"
    ended = paceline("train", write_spec(folder, run_dir, 1, steps=STEPS, precision="fp64"))
    assert ended.returncode == 0, ended.stderr
    return run_dir


@pytest.fixture
def three(folder: Path, one_device: Path) -> Iterator[tuple[Nodes, Path]]:
    run_dir = folder / "three"
    nodes = Nodes(write_spec(folder, run_dir, 3, "dp_replicate = 3", precision="fp64"), 3, *OPTIONS)
    try:
        yield nodes, run_dir
    finally:
        nodes.close()


def test_nodes_and_coordinators_come_and_go_and_the_experiment_stays(
    three: tuple[Nodes, Path], one_device: Path
) -> None:
    nodes, run_dir = three
    nodes.start()

    def recovered(count: int) -> None:
        staying = [nodes.processes[1]]
        wait_until(
            lambda: len(records_of(run_dir, "recovery")) == count or any(one.poll() is not None for one in staying)
        )

    wait_for_step(run_dir, 3, nodes.processes[0])
    nodes.processes[2].kill()  # the supervisor alone: its rank must not outlive it
    recovered(1)
    wait_until(lambda: not nodes.running(2))
    nodes.ended(2)
    nodes.start(2)
    recovered(2)
    os.kill(nodes.coordinator(), signal.SIGKILL)
    recovered(3)
    nodes.lose(0)  # the coordinator with its node
    recovered(4)
    wait_for_step(run_dir, STEPS, nodes.processes[1])
    nodes.processes[1].send_signal(signal.SIGTERM)
    told = [nodes.ended(number) for number in (1, 2)]
    assert [code for code, _ in told] == [75, 75], told
    assert not nodes.running()

    smaller, larger, taken, without = records_of(run_dir, "recovery")
    assert (without["from_world"], without["to_world"], without["steps_lost"]) == (3, 2, 0)
    faults = [each["what"] for each in records_of(run_dir, "fault")]
    assert without["because"] in faults, "whether or not its coordinator was there still"
    assert [each["resumed_from"] for each in (smaller, larger, taken, without)] == [RANKS_MEMORY] * 4, "and no disk"
    assert (smaller["from_world"], smaller["to_world"], smaller["rung"]) == (3, 2, "reform")
    assert "node 2 (127.0.0.1) is lost with rank 2" in smaller["because"]
    assert (larger["from_world"], larger["to_world"], larger["steps_lost"]) == (2, 3, 0)
    assert (taken["from_world"], taken["to_world"], taken["rung"]) == (3, 3, "reform")
    assert taken["because"] == "the coordinator was lost" and taken["steps_lost"] == 0
    found, expected = steps_of(run_dir), steps_of(one_device)
    assert [step["step"] for step in found] == list(range(1, len(found) + 1))
    assert [step["sample_ids"] for step in found[:STEPS]] == [step["sample_ids"] for step in expected]
    assert_curves_close([step["loss"] for step in found[:STEPS]], [step["loss"] for step in expected])


CUT = """
[[each]]
kind = "cut"
rank = 0
step = 5
"""


@pytest.mark.deep
def test_the_part_of_a_cut_network_that_has_fewer_nodes_neither_trains_nor_publishes(
    folder: Path, one_device: Path, tmp_path: Path
) -> None:
    """Node 0 is cut off with the coordinator. Both parts live; the other two nodes go on, and it joins them later."""
    run_dir, faults = folder / "cut", tmp_path / "faults.toml"
    faults.write_text(CUT)
    spec = write_spec(folder, run_dir, 3, "dp_replicate = 3", precision="fp64")
    with networks(3) as net:
        nodes = Nodes(spec, 3, *OPTIONS, "--faults", str(faults), "--set", "run.nodes.lost_after=1.5 s",
                      within=net.within)  # fmt: skip
        nodes.host = net.addresses[0]
        try:
            nodes.start()
            others = [nodes.processes[1], nodes.processes[2]]

            def recovered(count: int) -> None:
                wait_until(
                    lambda: (
                        len(records_of(run_dir, "recovery")) >= count or any(one.poll() is not None for one in others)
                    )
                )

            recovered(1)
            net.mend(0)
            recovered(2)
            wait_until(lambda: records_of(run_dir, "recovery")[-1]["to_world"] == 3)
            nodes.processes[1].send_signal(signal.SIGTERM)
            told = [nodes.ended(number) for number in range(3)]
        finally:
            nodes.close()
    assert [code for code, _ in told] == [75, 75, 75], told
    assert "this coordinator steps down" in told[0][1]
    smaller, *_ = records_of(run_dir, "recovery")
    assert smaller["because"].startswith("the coordinator was lost with rank")
    # On a busy machine a node may be late, so that the others go on in two steps.
    worlds = [(each["from_world"], each["to_world"]) for each in records_of(run_dir, "recovery")]
    assert worlds in ([(3, 2), (2, 3)], [(3, 1), (1, 2), (2, 3)], [(3, 1), (1, 3)]), worlds
    found, expected = steps_of(run_dir), steps_of(one_device)
    assert [step["step"] for step in found] == list(range(1, len(found) + 1))
    compared = min(len(found), STEPS)
    assert [step["sample_ids"] for step in found[:compared]] == [step["sample_ids"] for step in expected[:compared]]
    assert_curves_close([step["loss"] for step in found[:compared]], [step["loss"] for step in expected[:compared]])


def test_a_node_that_is_lost_with_its_memory_is_restored_from_its_peers(folder: Path, one_device: Path) -> None:
    """Shards on three nodes, and no checkpoint on disk: what the lost node held is in the memory of another."""
    run_dir = folder / "pieces"
    spec = write_spec(folder, run_dir, 3, "dp_shard = 3", precision="fp64")
    nodes = Nodes(spec, 3, *OPTIONS, "--set", "run.checkpoint_every=none", "--set",
                  "run.checkpoints.memory_every=2 steps")  # fmt: skip
    try:
        nodes.start()
        wait_for_step(run_dir, 7, nodes.processes[0])
        nodes.lose(2)
        wait_until(lambda: bool(records_of(run_dir, "recovery")) or nodes.processes[0].poll() is not None)
        wait_for_step(run_dir, STEPS, nodes.processes[0])
        assert not list((run_dir / "checkpoints").glob("step-*")), "no disk was needed"
        nodes.processes[0].send_signal(signal.SIGTERM)
        code, told = nodes.ended(0)
    finally:
        nodes.close()
    assert code == 75, told
    (recovery,) = records_of(run_dir, "recovery")
    assert (recovery["from_world"], recovery["to_world"], recovery["resumed_from"]) == (3, 2, RANKS_MEMORY)
    assert recovery["step"] >= 4 and recovery["step"] % 2 == 0 and recovery["steps_lost"] <= 4
    assert [record["to"] for record in records_of(run_dir, "decision") if record["what"] == "restore"]
    found, expected = steps_of(run_dir), steps_of(one_device)
    assert [step["step"] for step in found] == list(range(1, len(found) + 1))
    assert [step["sample_ids"] for step in found[:STEPS]] == [step["sample_ids"] for step in expected]
    assert_curves_close([step["loss"] for step in found[:STEPS]], [step["loss"] for step in expected])


def test_a_folder_in_memory_has_its_name_once_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that starts at the same moment removes folders of this name that nobody has locked."""
    seen: list[list[Path]] = []
    lock = held_in_memory.try_lock

    def looked(descriptor: int) -> bool | None:
        seen.append(list(tmp_path.glob(f"{PREFIX}*")))
        return lock(descriptor)

    monkeypatch.setattr(held_in_memory, "RAM_DISK", tmp_path)
    monkeypatch.setattr(held_in_memory, "try_lock", looked)
    first = PiecesFolder(0)
    assert first.path is not None and seen == [[]]
    second = PiecesFolder(1)
    assert first.path.is_dir() and seen[1] == [first.path], "looked at, and left alone"
    for folder in (first, second):
        folder.close()
    assert not list(tmp_path.iterdir())


def copies_go_to(node_of: list[int], nodes_per_rack: int = 0) -> list[int]:
    """Return which rank keeps a copy of each rank's part, where all have asked in a world of threads."""

    def told(world: World) -> Peers | None:
        return met_on(world, node_of[world.rank], nodes_per_rack)

    peers = [each for each in on_threads(len(node_of), told) if each is not None]
    assert len(peers) == len(node_of)
    assert [each.of for each in peers] == [
        tuple(other.rank for other in peers if other.to == each.rank) for each in peers
    ], "who is sent a copy knows it"
    return [each.to for each in peers]


def test_copies_go_to_another_node_and_what_is_left_is_read_where_it_is() -> None:
    assert copies_go_to([0, 0, 1, 1]) == [2, 3, 0, 1]
    assert copies_go_to([0, 0, 1]) == [2, 2, 0], "nodes of different sizes"
    assert copies_go_to([0, 2, 2]) == [1, 0, 0], "a node that is lost"
    assert copies_go_to([0, 1, 2, 3], nodes_per_rack=2) == [2, 3, 0, 1], "another rack"
    assert copies_go_to([0, 1, 2, 3, 4], nodes_per_rack=2) == [2, 3, 4, 0, 1], "racks of different sizes"
    names = {rank: f"/dev/shm/x/step-00000004.rank-{rank}.of-2" for rank in (0, 1)}
    held = {0: [names[0], names[1], "/dev/shm/x/step-00000006.rank-0.of-2"]}
    found = whole_of(held, {0: range(1)})
    assert found is not None and found.step == 4 and sorted(found.files[0]) == [names[0], names[1]]
    assert whole_of({0: [names[0]], 1: [names[1]]}, {0: range(1)}) is None, (
        "what a node without ranks holds is not read"
    )


@pytest.mark.parametrize("proof", [7, None, ["a"], "no proof", "umlaut \u00fc"])
def test_whatever_a_stranger_answers_is_told_as_such(proof: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def stranger() -> None:
            lines = Lines(server.accept()[0])
            lines.send({"challenge": "of a stranger"})
            lines.take(60.0)
            lines.send({"proof": proof})

        thread = threading.Thread(target=stranger)
        thread.start()
        with pytest.raises(NoPeer):
            knock(server.getsockname(), "right", {"node": 3}, 60.0)
        thread.join()


@pytest.mark.deep
def test_a_rank_that_hangs_is_found_on_whichever_node_it_is(folder: Path) -> None:
    """Each node's supervisor judges its own ranks; the stacks of all are brought together, and the run goes on."""
    run_dir = folder / "hangs-far"
    spec = write_spec(folder, run_dir, 2, "dp_replicate = 2", precision="fp64")
    nodes = Nodes(spec, 2, *OPTIONS, "--set", "run.health.hang_minimum=1 s", "--set",
                  'run.faults.each=[{ kind = "delay", rank = 1, step = 9, seconds = "1000 s" }]')  # fmt: skip
    try:
        nodes.start()
        wait_until(lambda: bool(records_of(run_dir, "recovery")) or nodes.processes[0].poll() is not None)
        (fault,) = records_of(run_dir, "fault")
        (recovery,) = records_of(run_dir, "recovery")
        nodes.processes[0].send_signal(signal.SIGTERM)
        assert [nodes.ended(number)[0] for number in (0, 1)] == [75, 75]
    finally:
        nodes.close()
    assert fault["rank"] == 1 and "rank 1 of 2 hung" in fault["what"] and recovery["from_world"] == 2
    seen = {each["rank"]: each for each in fault["evidence"]["ranks"]}
    assert set(seen) == {0, 1} and fault["evidence"]["silent_seconds"] > 1.0
    (stacks,) = (run_dir / "hangs").iterdir()
    assert all("File" in (stacks / f"rank-{rank}.txt").read_text() for rank in (0, 1)), "of both nodes"


@pytest.mark.deep
def test_a_node_whose_supervisor_is_stopped_is_lost_and_joins_again_when_it_goes_on(folder: Path) -> None:
    """Its rank lives, so that no connection of the world ends by itself: the others leave it at the word."""
    run_dir = folder / "stopped"
    nodes = Nodes(write_spec(folder, run_dir, 2, "dp_replicate = 2", precision="fp64"), 2, *OPTIONS)
    try:
        nodes.start()
        wait_for_step(run_dir, 12, nodes.processes[0])
        (far,) = [number for number in (0, 1) if nodes.coordinator() not in nodes.running(number)]
        nodes.processes[far].send_signal(signal.SIGSTOP)
        wait_until(lambda: bool(records_of(run_dir, "recovery")) or nodes.processes[1 - far].poll() is not None)
        (lost,) = records_of(run_dir, "recovery")
        assert lost["rung"] == "reform" and lost["to_world"] == 1 and f"node {far}" in lost["because"]
        nodes.processes[far].send_signal(signal.SIGCONT)
        wait_until(lambda: len(records_of(run_dir, "recovery")) > 1 or nodes.processes[1 - far].poll() is not None)
        assert [each["to_world"] for each in records_of(run_dir, "recovery")] == [1, 2]
        assert not records_of(run_dir, "run_ended")
        faults = records_of(run_dir, "fault")  # a save that was under way is one too
        (fault,) = (each for each in faults if "a process of the run has ended" not in each["because"])
        assert "is lost" in fault["what"]
        steps = [step["step"] for step in steps_of(run_dir)]  # once: the run goes on
        assert steps == list(range(1, len(steps) + 1))
        nodes.processes[1 - far].send_signal(signal.SIGTERM)
        assert [nodes.ended(number)[0] for number in (0, 1)] == [75, 75]
    finally:
        nodes.close()


def test_who_failed_first_does_not_depend_on_the_clocks_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes whose clocks are an hour apart: rank 1 fails, and rank 0's error a moment later is its echo."""
    here = 1e6
    clock = {"now": here}  # neither counts the seconds since the other was booted
    for module in (agent_module, fleet_module, blame_module):
        monkeypatch.setattr(module, "passed_seconds", lambda: clock["now"])
    sent: list[dict[str, Any]] = []
    link = cast(NodeLink, SimpleNamespace(send=sent.append, address="127.0.0.1"))
    for rank, apart, age in ((0, -3600.0, 0.5), (1, 3600.0, 0.9)):
        clock["now"] = here + apart
        folder = tmp_path / f"node-{rank}"
        folder.mkdir()
        agent = Agent(folder, cast(Starter, SimpleNamespace(close=lambda: None)), rank, 1, {})
        agent._generation, agent._ranks = 1, {rank: 1}
        agent._world_folder.mkdir()
        told = PacelineError(f"rank {rank} failed", "of something", "nothing").as_dict()
        leave_error(agent._world_folder, rank, told, cause=True, moment=here + apart - age)
        agent._tell(link)
        agent.close()
    clock["now"] = here
    with socket.create_server(("127.0.0.1", 0)) as server:
        fleet = Fleet(NodesSpec(), server, "secret", cast(RunLock, None), lambda line: None)
        fleet.open(tmp_path)
        for message in sent:
            if "error" in message:
                fleet._hear(cast(Member, None), message)
    assert [error.rank for error in errors_told(tmp_path)] == [1, 0]
    assert [round(here - error.time, 3) for error in errors_told(tmp_path)] == [0.9, 0.5]


def test_who_does_not_know_the_secret_is_not_let_in_and_a_silent_end_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        made: list[object] = []

        def admit(secret: str) -> None:
            each, found = Knocking(server.accept()[0], secret, 60.0), list[object]()
            try:
                wait_until(lambda: found.append(each.look()) or found[-1] is not None)
                made.append(found[-1])
            except NoPeer as error:
                made.append(error)

        for secret in ("right", "wrong"):
            thread = threading.Thread(target=admit, args=("right",))
            thread.start()
            if secret == "right":
                lines = knock(address, secret, {"node": 3}, 60.0)
            else:
                with pytest.raises(NoPeer):
                    knock(address, secret, {"node": 3}, 60.0)
            thread.join()
        assert isinstance(made[1], NoPeer)
        known, hello = made[0]  # type: ignore[misc]
        assert hello == {"node": 3}
        near, far = NodeLink(known, 0.5), NodeLink(lines, 0.5)
        wait_until(lambda: not list(near.taken()) and not near.is_lost and near.heard_at > 0)
        far._closed.set()  # it beats no more, and its connection stays
        wait_until(lambda: not list(near.taken()) and near.is_lost)
        assert "nothing was heard" in near.because
        near.close()
        far.close()
