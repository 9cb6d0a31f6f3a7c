"""What a coordinator and the nodes of a run take that are many: what has changed counts, not what is there."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import math
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from observe.alerts.alert_journals import started, step
from runs import wait_until
from tests_shared import SEQ_LEN, plan_of

from paceline.errors import WorkerDied
from paceline.lock import RunLock, take
from paceline.session.nodes import coordinate
from paceline.session.nodes.coordinate import _counted
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.line import line_of
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.survive.health import HealthSpec
from paceline.spec.survive.nodes import NodesSpec
from paceline.spec.survive.phases import PHASES
from paceline.spec.survive.recovery import RecoverySpec
from paceline.spec.task import Task
from paceline.supervise.again.elastic import Elastic
from paceline.supervise.again.fallen import Fallen, TakenOver, moments_of
from paceline.supervise.again.generations import Generations
from paceline.supervise.again.judge import FRUITLESS, Judge, Reached
from paceline.supervise.again.spent_by_worlds import SpentSoFar
from paceline.supervise.blame import Outcome, errors_told
from paceline.supervise.control import CONTROL_VARIABLE
from paceline.supervise.crew import Crew
from paceline.supervise.lines import Lines
from paceline.supervise.nodes import link
from paceline.supervise.nodes.agent import Agent
from paceline.supervise.nodes.fleet import Fleet
from paceline.supervise.nodes.link import NodeLink
from paceline.supervise.nodes.member import Member
from paceline.supervise.pulses.pulse import BEAT, HEAD, SIZE, STEP, pulse_path
from paceline.supervise.pulses.sight import nobody_knows
from paceline.supervise.starting import Starter
from paceline.supervise.told.brief import Brief
from paceline.supervise.told.generation import RESTARTED, Generation, JudgedSoFar

NODES, EACH = 16, 8
BRIEF = Brief(plan_of(Layout()), 8, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
FAILED = Outcome(1, {"error": "KeyError", "what": "w", "because": "b", "try": "t"})


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    """Return a fleet whose nodes have eight ranks each, the nodes' ends of their links, and the world's processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        fleet = Fleet(NodesSpec(), server, "secret", cast(RunLock, None), lambda line: None)
        fleet.open(tmp_path)
        ends: dict[int, Lines] = {}

        def join(node: int) -> None:
            ranks = [[node * EACH + at, at + 1, None] for at in range(EACH)]
            hello = {"node": node, "devices": EACH, "rung": "restart", "generation": 0, "ranks": ranks, "standing": [],
                     "members": [], "lost_for": 0.0, "brief": ""}  # fmt: skip
            ends[node] = link.knock(server.getsockname(), "secret", hello, 20.0)

        threads = [threading.Thread(target=join, args=(node,)) for node in range(NODES)]
        for thread in threads:
            thread.start()
        fleet.gather(lambda: NODES, 20.0)
        for thread in threads:
            thread.join()
        processes = [fleet.members[node].processes[at + 1] for node in range(NODES) for at in range(EACH)]
        fleet._ranks = dict(enumerate(processes))
        yield fleet, ends, processes
        for end in ends.values():
            end.end.close()


def test_a_look_at_a_world_costs_what_its_nodes_have_told(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, ends, processes = fleet
    crew = Crew(processes, changes=fleet.changes)
    crew.look()
    taken, take = [0], Lines.take

    def counted(self: Lines, timeout_seconds: float | None = None) -> dict[str, Any] | None:
        taken[0] += 1
        return take(self, timeout_seconds)

    monkeypatch.setattr(Lines, "take", counted)
    looks = 20
    for _ in range(looks):
        crew.look()
    assert taken[0] <= 2 * NODES * looks, "not each node once for each rank"
    assert not crew.endings and sum(thread.name == "paceline-beat" for thread in threading.enumerate()) < NODES

    ends[3].send({"ended": 2, "code": 7})
    wait_until(lambda: crew.look() or bool(crew.endings))
    assert {rank: each.code for rank, each in crew.endings.items()} == {3 * EACH + 1: 7}
    heard_at = fleet.members[5].link.heard_at
    ends[5].end.close()
    wait_until(lambda: crew.look() or len(crew.endings) == 1 + EACH)
    assert set(crew.endings) == {3 * EACH + 1, *range(5 * EACH, 6 * EACH)}, "a node that is gone is lost with its ranks"
    (told,) = errors_told(fleet._world)
    its = [each for each in crew.ended() if each.rank >= 5 * EACH]
    assert told.time < heard_at == moments_of(its, Outcome(1, dict(told.words)))["fault"], (
        "though it is the first error"
    )


def test_nodes_from_different_addresses_are_on_different_machines(fleet: Any) -> None:
    """A launcher that tells nothing of machines has all on one: links between them counted as those of one."""
    fleet, _, _ = fleet
    fleet._spec = NodesSpec(count=NODES)
    assert fleet.devices_of_machine(4) == 4 * EACH, "as it was told"
    assert fleet.devices_of_machine(0) == EACH
    for number, member in fleet.members.items():
        member.host = f"10.0.0.{number // 8}"
    assert fleet.devices_of_machine(NODES) == 8 * EACH
    assert fleet.devices_of_machine(1) == EACH
    fleet._spec = NodesSpec(count=3 * NODES)
    assert fleet.devices_of_machine(NODES) == NODES * EACH, "those that are not there yet may be on these machines"


@pytest.mark.parametrize(("per_node", "planned"), [(4, 1), (3, 1), (11, 11), (1, 1)])
def test_machines_that_differ_count_as_smaller_ones(
    per_node: int, planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks of `srun` on 4, 4 and 3 devices were refused in words of cluster.devices, which nobody had set."""
    monkeypatch.setattr(coordinate, "plan_task", lambda spec, say: spec.cluster)
    spec = Spec(Task(), cluster=ClusterSpec(), run=RunSpec(nodes=NodesSpec(count=11)))
    there = cast(Fleet, SimpleNamespace(members=dict.fromkeys(range(11)), devices=lambda: 11))
    said: list[str] = []
    cluster: Any = coordinate._planned(spec, there, None, per_node, said.append)
    assert (cluster.devices, cluster.devices_per_node) == (11, planned)
    assert bool(said) is (planned < per_node)


def test_what_a_node_tells_of_the_world_before_is_not_taken_for_this_one(fleet: Any, tmp_path: Path) -> None:
    """A node may have no rank of this world: its old ranks would hide one that has no pulse yet, or be blamed."""
    fleet, ends, _ = fleet
    watch = fleet.watch(HealthSpec(), tmp_path / "generation-2", EACH, tmp_path, nobody_knows)
    told = {"ranks": EACH, "have_met": True, "last": None, "last_is_late": False, "stopped_is_late": False}
    for node, generation in ((0, 1), (1, 2)):
        ends[node].send({"overview": {**told, "have_met": generation == 2}, "load": 1.0, "generation": generation})
        ends[node].send({"stopped": "said"})  # is heard after it
        wait_until(lambda: fleet.poll() or fleet.stopped == "said")
        fleet._stops.clear()
        watch.look(time.monotonic() + node)
        assert watch.have_met == (generation == 2)


def test_nodes_hear_the_beat_of_a_coordinator_that_is_busy(fleet: Any) -> None:
    _, ends, _ = fleet
    for node in (0, NODES - 1):
        assert ends[node].take(20.0) == {}, "though nobody calls the fleet"
    (server, their) = socket.socketpair()
    lines = Lines(server)
    server.setblocking(False)
    while True:  # until whoever reads nothing has no room left
        try:
            server.send(bytes(1 << 16))
        except BlockingIOError:
            break
    lines.beat()  # does not wait
    server.close()
    their.close()


def test_a_supervisor_that_stands_still_is_lost_though_its_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a process which the system cannot end."""
    monkeypatch.setattr(link, "STUCK_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    here = link.NodeLink(Lines(ends[0]), 0.5, beats=False)
    there = link.NodeLink(Lines(ends[1]), 0.5)
    wait_until(lambda: not list(here.taken()) and here.is_lost)
    assert "nothing was heard" in here.because and not there.because
    here.close()
    there.close()


@pytest.mark.parametrize("interrupted", ["send", "beat"])
def test_a_signal_handler_sends_in_the_midst_of_a_message_and_cuts_none(
    monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    """It waited for the lock that its own thread had, for ever: a coordinator that was asked to stop while it sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    lines, there = Lines(ends[0]), Lines(ends[1])
    here = link.NodeLink(lines, 20.0, beats=False)

    def too_long(number: int, frame: object) -> None:
        raise TimeoutError("the handler waits for its own thread")

    before = [signal.signal(signal.SIGUSR1, lambda number, frame: here.send({"signal": number})),
              signal.signal(signal.SIGALRM, too_long)]  # fmt: skip
    real, raised = getattr(lines, interrupted), list[int]()

    def send(*message: Any) -> None:
        if not raised:
            raised.append(1)
            signal.raise_signal(signal.SIGUSR1)
        real(*message)

    monkeypatch.setattr(lines, interrupted, send)
    signal.setitimer(signal.ITIMER_REAL, 20.0)
    try:
        here.beat() if interrupted == "beat" else here.send({"first": 1})
        assert there.take(20.0) == ({} if interrupted == "beat" else {"first": 1})
        assert there.take(20.0) == {"signal": signal.SIGUSR1} and not here.because
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGALRM, before[1])
        here.close()
        there.end.close()


def test_a_supervisor_may_have_more_than_a_thousand_descriptors() -> None:
    """`select.select` takes none from 1,024 on."""
    one, other = socket.socketpair()
    with other, socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 1100)) as high:
        one.close()
        Lines(other).send({"a": 1})
        assert Lines(high).take(20.0) == {"a": 1}
        Lines(high).beat()
        assert Lines(other).take(20.0) == {}


def test_a_node_whose_ranks_do_well_tells_nothing_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks make 50 steps, one in each look."""
    now = time.monotonic()
    clock = {"now": now}
    monkeypatch.setattr(time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    sent: list[dict[str, Any]] = []
    wire: Any = SimpleNamespace(send=sent.append, address="127.0.0.1")
    agent = Agent(tmp_path, cast(Starter, SimpleNamespace(close=lambda: None)), 0, EACH, {})
    limits = {"factor": 8.0, "minimum": 10.0, "elsewhere": 600.0, "still": 2.0}
    agent._do({"world": 1, "members": [[0, 1]], "files": {}, "limits": limits}, wire)
    agent._ranks.update({rank: rank for rank in range(EACH)})

    def beat(rank: int, phase: str, step: int) -> None:
        content = bytearray(SIZE)
        HEAD.pack_into(content, 0, os.getpid(), 0)
        BEAT.pack_into(content, HEAD.size, step, step, PHASES.index(phase), int(clock["now"] * 1e9))
        STEP.pack_into(content, HEAD.size + BEAT.size, step, 10**8)
        pulse_path(agent._world_folder, rank).write_bytes(content)

    for number in range(1, 51):
        for rank in range(EACH):
            beat(rank, "forward", number)
        clock["now"] += 0.25
        agent._tell(wire)
    assert sum(len(json.dumps(message)) for message in sent) < 500, sent[:2]
    before = len(sent)
    for rank in range(EACH):
        beat(rank, "reduce" if rank else "data", 51)
    for _ in range(50):
        clock["now"] += 0.25
        agent._tell(wire)
    assert any("true" in json.dumps(message) for message in sent[before:]), "a rank that says nothing is told of"
    agent.close()


def agent_in_a_world(folder: Path, generation: Generation | None) -> Agent:
    """Return a node's supervisor that has been told of a world, if of any, and costs half a dollar a second."""
    starter = cast(Starter, SimpleNamespace(close=lambda: None, rung=lambda: "restart"))
    agent, told = Agent(folder, starter, 0, 1, {}), folder / "told"
    assert agent.hello()["spent"] == (0.0, 0.0)
    if generation is None:
        return agent
    told.mkdir()
    generation.write(told)
    files = {
        "brief.json": dataclasses.replace(BRIEF, usd_per_second=0.5).to_json(),
        "generation.json": (told / "generation.json").read_text(),
    }
    wire: Any = SimpleNamespace(send=lambda message: None, address="127.0.0.1")
    agent._do({"world": generation.number, "members": [[0, 1]], "files": files, "limits": None}, wire)
    return agent


def test_the_end_of_a_rank_is_told_though_one_before_had_its_number(tmp_path: Path) -> None:
    """Of a world of which no process was left a coordinator counted from the first again: it heard of no end of theirs,
    and waited for ever."""
    ended = SimpleNamespace(pid=1 << 30, returncode=-9, poll=lambda: -9, wait=lambda: -9)
    agent, heard = agent_in_a_world(tmp_path, Generation(number=1)), list[dict[str, Any]]()
    agent._starter = Starter(lambda place: cast(Any, ended), None, lambda line: None)
    wire: Any = SimpleNamespace(send=heard.append, address="127.0.0.1")
    far = cast(NodeLink, SimpleNamespace(send=lambda message: agent._do(message, wire)))
    for _ in range(2):
        heard.clear()
        member = Member(0, 1, "127.0.0.1", "", far, lambda: None)
        rank = member.start({"RANK": "0"})
        agent._tell(wire)
        for message in heard:
            member.hear(message)
        assert rank.code == -9, heard
        rank.end()
        assert agent.hello()["ranks"] == [], "of which the next coordinator hears"
    agent.close()


def test_a_full_disk_ends_neither_a_coordinator_nor_a_node(tmp_path: Path) -> None:
    """What they leave for ranks in a folder of temporary files is a word, or an error, which nobody has to find."""
    agent, said = agent_in_a_world(tmp_path, Generation(number=1)), list[str]()
    world, away = tmp_path / "generation-1", tmp_path / "away"
    wire: Any = SimpleNamespace(send=lambda message: None, address="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        fleet = Fleet(NodesSpec(), server, "secret", cast(RunLock, None), said.append)
        fleet.open(tmp_path)
        told = list[dict[str, Any]]()
        member = Member(0, 1, "127.0.0.1", "", cast(NodeLink, SimpleNamespace(send=told.append)), lambda: None)
        fleet.members[0], fleet._given, fleet._world = member, {0}, world
        world.rename(away)
        error = {**(FAILED.error or {}), "rank": 0, "cause": True, "time": 0.0}
        fleet._hear(member, {"error": error})
        assert "w: b" in said[-1]
        for _ in range(3):
            fleet.word(world, "abort")
    assert told == [{"word": "generation-1/abort"}]
    agent._do(told[0], wire)
    agent._tell(wire)
    away.rename(world)
    agent._tell(wire)
    assert (world / "abort").exists()
    agent.close()


def test_a_node_whose_folder_of_temporary_files_is_full_enters_a_world_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost with its ranks; with one machine alone the run's directory took the folder in its place."""
    here, spare, started = tmp_path / "here", tmp_path / "run" / "worlds" / "node-0", list[dict[str, str]]()
    here.mkdir()
    full, write_bytes = [True], Path.write_bytes

    def writes(path: Path, content: bytes) -> int:
        if full[0] and path.is_relative_to(here):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", writes)
    process = SimpleNamespace(pid=1 << 30, returncode=0, poll=lambda: 0, wait=lambda: 0)
    starter: Any = lambda place: started.append(place) or process  # noqa: E731
    starter_of_ranks: Any = SimpleNamespace(close=lambda: None)
    wire: Any = SimpleNamespace(send=lambda message: None, address="127.0.0.1")
    agent = Agent(here, starter_of_ranks, 0, 1, {}, spare=spare)
    agent._starter = starter
    world: dict[str, Any] = {"members": [[0, 1]], "files": {"brief.json": "@folder@/x"}, "limits": None}
    place = {"RANK": "0", "PACELINE_ERRORS": "@folder@/generation-1", CONTROL_VARIABLE: "@folder@/control"}
    for number, base in ((1, spare), (2, here)):
        full[0] = base == spare
        agent._do({"world": number, **world}, wire)
        assert (base / f"generation-{number}" / "brief.json").read_text() == f"{base}/x"
        agent._do({"start": number, "environ": place, "changed": False}, wire)
        assert started[-1]["PACELINE_ERRORS"] == f"{base}/generation-1"
        assert started[-1][CONTROL_VARIABLE] in (f"{here}/control", f"{base}/control"), "the latter of a long path"
        agent._do({"word": f"generation-{number}/abort"}, wire)
        agent._tell(wire)
        assert (base / f"generation-{number}" / "abort").exists()
    agent._starter = starter_of_ranks
    agent.close()


def test_what_a_run_has_spent_outlives_its_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of time and money began anew for the ranks that the next coordinator started, and budgets of failures."""
    now = [1000.0]
    monkeypatch.setattr("paceline.supervise.nodes.agent.passed_seconds", lambda: now[0])
    judge = Judge(RecoverySpec(retries=1), Reached())
    assert judge.judge(FAILED, Reached(1, 5, made=True)).goes_on
    begun = Generation(number=3, begun_after=100.0, usd_before=30.0, judged=judge.so_far)
    agent = agent_in_a_world(tmp_path, begun)
    now[0] += 20.0
    left = json.loads(json.dumps(agent.hello()))
    agent.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        fleet = Fleet(NodesSpec(), server, "secret", cast(RunLock, None), lambda line: None)
        fleet.open(tmp_path)
        fleet.members[0] = cast(Member, SimpleNamespace(was=left, standing={}, processes={}, lost_at=now[0]))
        taken = fleet.take_over()
    assert taken is not None and taken.spent == (120.0, 40.0)
    assert taken.judged == judge.so_far
    assert SpentSoFar(*taken.spent).begin(0.5) == (pytest.approx(120.0, abs=1.0), 40.0)
    again = Judge(RecoverySpec(retries=1), Reached(1, 5, made=True), taken.judged).judge(FAILED, Reached(1, 5, True))
    assert not again.goes_on and "failed twice in the step after 5" in again.because
    other = Judge(RecoverySpec(retries=1), Reached(1, 5, made=True), taken.judged).judge(FAILED, Reached(1, 6, True))
    assert not other.goes_on and "run.recovery.retries = 1 is used up" in other.because


@pytest.mark.parametrize("world", [Generation(number=3), None], ids=["after a world", "before any"])
def test_coordinators_that_are_lost_one_after_the_other_end_the_run(tmp_path: Path, world: Generation | None) -> None:
    """Each node in turn took over, for ever: as where planning has no memory, so that no world is formed."""
    agent, wire = agent_in_a_world(tmp_path, world), cast(NodeLink, None)
    reached = Reached(1, 5, made=True)
    taken: TakenOver | None = None
    for at in range(FRUITLESS + 1):
        with socket.create_server(("127.0.0.1", 0)) as server:
            fleet = Fleet(NodesSpec(), server, "secret", cast(RunLock, None), lambda line: None)
            fleet.open(tmp_path)
            far = SimpleNamespace(send=lambda message: agent._do(json.loads(json.dumps(message)), wire))
            was = json.loads(json.dumps(agent.hello()))
            fleet.members[0] = cast(Member, SimpleNamespace(was=was, standing={}, processes={}, lost_at=0.0, link=far))
            taken, before = fleet.take_over(), fleet.judged_before()
            assert (taken.judged if taken is not None else before) == before
            assert (before.fruitless if before is not None else 0) == max(0, at - 1)
            if at < FRUITLESS:
                _counted(fleet, RecoverySpec(), reached, taken)
    with pytest.raises(WorkerDied, match="the coordinator was lost, as those before it were") as raised:
        _counted(fleet, RecoverySpec(), reached, taken)
    assert f"{FRUITLESS} generations in a row have not come beyond step 5" in raised.value.because
    assert _counted(fleet, RecoverySpec(), Reached(1, 6, made=True), taken).fruitless == 0
    assert (taken is not None) == (world is not None)
    if taken is not None:
        left = dataclasses.replace(taken, left="node 0 left")
        assert _counted(fleet, RecoverySpec(), reached, left) == taken.judged
    agent.close()


def test_a_failure_counts_though_the_coordinator_is_lost_as_soon_as_it_has_judged_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes heard of it with the next world alone: coordinators that each met it for the first time had no end."""
    so_far = JudgedSoFar(furthest=5, has_made_steps=True)
    agent, run_dir = agent_in_a_world(tmp_path, Generation(number=1, judged=so_far)), tmp_path / "run"
    (run_dir / "journal").mkdir(parents=True)
    (run_dir / "journal" / "0001.jsonl").write_bytes(line_of(started()) + line_of(step(5, 1.0)))
    far = SimpleNamespace(send=lambda message: agent._do(json.loads(json.dumps(message)), cast(NodeLink, None)))
    monkeypatch.setattr(Generations, "_one", lambda *given: Fallen(FAILED, {}, False))
    monkeypatch.setattr(Elastic, "next_plan", lambda one: pytest.fail("the coordinator is lost"))

    def ended() -> Outcome:
        with take(run_dir) as lock, socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            fleet = Fleet(NodesSpec(), server, "secret", lock, lambda line: None)
            was = json.loads(json.dumps(agent.hello()))
            node = SimpleNamespace(was=was, standing={}, processes={}, devices=1, rung=RESTARTED, link=far)
            fleet.members[0] = cast(Member, node)
            one = Generations(fleet, BRIEF, lock, RecoverySpec(), lambda line: None)
            one._judge = Judge(RecoverySpec(), Reached(1, 5, made=True), fleet.judged_before())
            return one.run()

    with pytest.raises(pytest.fail.Exception, match="the coordinator is lost"):
        ended()
    outcome = ended()
    assert "failed twice in the step after 5" in str((outcome.error or {})["because"])
    agent.close()


@pytest.mark.parametrize("left", ["", "node 0 left at a notice"])
def test_steps_of_a_call_count_though_its_first_rank_went_with_the_coordinator(left: str) -> None:
    """Who takes its place begins a journal of its own, which has no step yet: an error there ended the run."""
    began, lost, anew = Reached(3, 40, made=True), Reached(4, 5040, made=True), Reached(5, 5040)
    before = Judge(RecoverySpec(), began).so_far
    taken = TakenOver(1, plan_of(Layout()), {}, {}, 0.0, judged=before, left=left)
    fleet = cast(Fleet, SimpleNamespace(judged_before=lambda: before, note_judged=lambda judged: None))
    counted = _counted(fleet, RecoverySpec(), lost, taken)
    assert Judge(RecoverySpec(), anew, counted).judge(FAILED, anew).goes_on
    assert not Judge(RecoverySpec(), anew, before).judge(FAILED, anew).goes_on
