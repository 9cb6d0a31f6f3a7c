"""Nodes that are waited for, and the limits of the run, which nobody else looks at meanwhile."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
from observe.alerts.alert_journals import started, step
from tests_shared import plan_of

from paceline.errors import PacelineError, Requeue
from paceline.lock import RunLock, take
from paceline.patience import Patience
from paceline.session.closing import close_run
from paceline.session.nodes import attendance, coordinate
from paceline.session.nodes.attendance import Attendance
from paceline.session.nodes.coordinate import _gather
from paceline.session.nodes.while_waiting import looked_for
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.line import line_of
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.journal.redact import Redactor
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.survive.budget import BudgetSpec
from paceline.spec.survive.nodes import NodesSpec
from paceline.spec.survive.recovery import RecoverySpec
from paceline.spec.task import Task
from paceline.spec.watch.when import WhenSpec
from paceline.supervise.again.fallen import Fallen
from paceline.supervise.again.generations import Generations
from paceline.supervise.blame import Outcome
from paceline.supervise.nodes.agent import Agent
from paceline.supervise.nodes.fleet import Fleet
from paceline.supervise.nodes.link import NodeLink
from paceline.supervise.nodes.member import Member
from paceline.supervise.told.brief import Brief
from paceline.supervise.told.generation import RESTARTED
from paceline.supervise.told.typed import typed_command

NODES = NodesSpec(count=2, wait="10 min")
BRIEF = Brief(
    plan_of(Layout(dp_shard=2), batch=6), 100, 1, "tokens", "cpu", 1, 1.0, 3.0, 1.0, math.nan, PlannedRecord()
)
LOST = {"error": "WorkerDied", "what": "node 1 is lost with rank 1", "because": "it says nothing", "try": "look"}
LIMITS = [({"time_limit": "0.3 s"}, "the time limit of 300 ms"), ({"usd_limit": 0.9}, "the money limit of $0.9")]


def fleet_of(lock: RunLock, server: socket.socket) -> Fleet:
    """Return a fleet of which one node of two is there."""
    server.setblocking(False)
    fleet = Fleet(NODES, server, "secret", lock, lambda text: None)
    link = SimpleNamespace(send=lambda message: None)
    node = SimpleNamespace(devices=1, rung=RESTARTED, standing={}, was={}, link=link, processes={})
    fleet.members[0] = cast(Member, node)
    return fleet


def no_plan(devices: int, *given: object, **more: object) -> NoReturn:
    pytest.fail(f"{devices} devices have none")


@pytest.mark.parametrize(("limit", "said"), LIMITS)
@pytest.mark.parametrize("error", [LOST, None])
def test_a_limit_ends_the_wait_for_nodes_that_were_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: dict[str, float], said: str, error: dict[str, object] | None
) -> None:
    """The coordinator waited `run.nodes.wait` for them, whatever the limit, and the job ended without a word."""
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "0001.jsonl").write_bytes(line_of(started()) + line_of(step(7, 1.0)))
    fallen = Fallen(Outcome(137, error), {}, False, called="" if error else "the number of devices has changed")
    with take(tmp_path) as lock, socket.create_server(("127.0.0.1", 0)) as server:
        policy, run = RecoverySpec(min_devices=2), RunSpec(**limit)
        one = Generations(fleet_of(lock, server), BRIEF, lock, policy, lambda text: None, replan=no_plan, limits=run)
        monkeypatch.setattr(one, "_one", lambda *given: (one._spent.begin(3.0), fallen)[1])
        outcome = one.run()
        close_run(outcome, lock, Redactor(()), lambda text: None)
    assert outcome.exit_code == 75
    fault, ended = list(read_journal(tmp_path))[-2:]
    assert fault["what"] == (error["what"] if error else fallen.called)
    assert f"1 device left, and run.recovery.min_devices is 2, and {said} is reached" in fault["because"]
    assert (ended["status"], ended["exit_code"], ended["step"], ended["error"]) == ("requeue", 75, 7, None)


ENDS = {
    "a notice": "the notice {folder}/ends has appeared",
    "the hours": "the hours of run.when",
    "the budget": "the budget of 1 device-hours is used up",
}


def ending(what: str, folder: Path) -> RunSpec:
    """Return the options of a run that one thing ends which a rank would look for, were any there."""
    if what == "a notice":
        (folder / "ends").touch()
        return RunSpec(nodes=NODES, recovery=RecoverySpec(min_devices=2, notice_file=str(folder / "ends")))
    if what == "the hours":
        hour = (time.localtime().tm_hour + 6) % 24
        return RunSpec(nodes=NODES, when=WhenSpec(window=f"{hour:02}:00-{(hour + 1) % 24:02}:00"))
    return RunSpec(nodes=NODES, budget=BudgetSpec(device_hours=1.0))


@pytest.mark.parametrize("what", ENDS)
def test_what_ends_a_run_ends_the_wait_for_nodes_that_were_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run = ending(what, tmp_path)
    (tmp_path / "journal").mkdir()
    now = time.time()
    begun = dataclasses.replace(started(), time=now - 7200, world_size=2)  # of two hours, on two devices
    (tmp_path / "journal" / "0001.jsonl").write_bytes(
        line_of(begun) + line_of(dataclasses.replace(step(7, 1.0), time=now))
    )
    with take(tmp_path) as lock, socket.create_server(("127.0.0.1", 0)) as server:
        notices = functools.partial(looked_for, run, tmp_path)
        one = Generations(
            fleet_of(lock, server), BRIEF, lock, RecoverySpec(min_devices=2), lambda text: None, replan=no_plan,
            limits=run, notices=notices,
        )  # fmt: skip
        monkeypatch.setattr(one, "_one", lambda *given: Fallen(Outcome(137, LOST), {}, False))
        outcome = one.run()
    assert outcome.exit_code == 75 and outcome.error is not None
    assert ENDS[what].format(folder=tmp_path) in str(outcome.error["because"])


@pytest.mark.parametrize("what", ["a notice", "the hours"])
def test_what_ends_a_run_ends_the_wait_for_nodes_at_the_start(tmp_path: Path, what: str) -> None:
    spec = Spec(task=Task(), cluster=ClusterSpec(), run=ending(what, tmp_path))
    begun = take(tmp_path), socket.create_server(("127.0.0.1", 0)), pytest.raises(Requeue)
    with begun[0] as lock, begun[1] as server, begun[2] as stopped:
        _gather(spec, fleet_of(lock, server), None)
    assert ENDS[what].format(folder=tmp_path) in stopped.value.because


def test_a_time_limit_ends_the_wait_for_nodes_at_the_start(tmp_path: Path) -> None:
    spec = Spec(task=Task(), cluster=ClusterSpec(), run=RunSpec(nodes=NODES, time_limit="0.3 s"))
    with take(tmp_path) as lock, socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(Requeue) as stopped:
            _gather(spec, fleet_of(lock, server), None)
        assert stopped.value.because == "the time limit of 300 ms is reached while waiting for 1 node"


@pytest.mark.parametrize(
    ("typed", "told"),
    [((), ()), (("paceline", "train", "a.toml"),) * 2, (("python", "-m", "paceline", "train", "a.toml"),) * 2],
)
def test_a_coordinator_has_the_command_that_was_typed(
    typed: tuple[str, ...], told: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt there is none, and `sys.argv` was empty: libraries look at its first word."""
    found = list[tuple[tuple[str, ...], int]]()
    monkeypatch.setattr("sys.argv", ["coordinate", "spec", "127.0.0.1", "1", "0", "2", *typed])
    for name in ("end_with_parent", "name_process", "take_over"):
        monkeypatch.setattr(coordinate, name, lambda *given, **more: None)
    monkeypatch.setattr(coordinate, "coordinate", lambda *given: found.append((typed_command(), len(sys.argv))) or 0)
    assert inspect.unwrap(coordinate.main)() == 0
    assert found == [(told, max(1, len(typed)))]


@pytest.mark.parametrize(("had_one", "waits"), [(False, 610.0), (True, 600.0 + 1024 * 10.0)])
def test_who_never_had_a_coordinator_waits_for_no_turn_of_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had_one: bool, waits: float
) -> None:
    """Under srun 1,024 ranks waited for three hours where rank 0 was refused; only who has lost one has a turn."""
    limits = list[float]()

    def patience(seconds: float) -> Patience:
        limits.append(seconds)
        return Patience(0.0)

    monkeypatch.setattr(attendance, "Patience", patience)
    nodes = NodesSpec(count=1024, node=7, wait="10 min")
    spec = Spec(Task(), cluster=ClusterSpec(), run=RunSpec(dir=str(tmp_path), nodes=nodes))
    agent = SimpleNamespace(stopped="", hello=lambda: pytest.fail("nobody is there"))
    one = Attendance(spec, cast(Agent, agent), tmp_path, lambda text: None)
    monkeypatch.setattr(one, "_start", lambda: pytest.fail("it is not this node's turn"))
    monkeypatch.setattr(one, "_delay", lambda: 1e9)
    one._link = cast(NodeLink, object()) if had_one else None
    with pytest.raises(PacelineError, match="node 7 finds no coordinator of the run"):
        one._join()
    assert limits[0] == waits
