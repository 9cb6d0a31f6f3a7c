"""Links of nodes and a coordinator: who was asleep hears first, and who looks at nobody is no longer said to live."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
from runs import wait_until

from paceline import patience
from paceline.lock import RunLock
from paceline.spec.survive.nodes import NodesSpec
from paceline.supervise.lines import Lines
from paceline.supervise.nodes import link as linking
from paceline.supervise.nodes import links as many
from paceline.supervise.nodes.fleet import Fleet
from paceline.supervise.nodes.link import Knocking, NodeLink, knock
from paceline.supervise.nodes.links import NodeLinks
from paceline.supervise.nodes.member import Member

LOST_AFTER = 2.0


@pytest.fixture
def ends() -> Iterator[tuple[Lines, Lines]]:
    """Return both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    with near, far:
        yield Lines(near), Lines(far)


def test_who_was_stopped_has_heard_nothing_and_waits_before_it_gives_up(
    ends: tuple[Lines, Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is frozen with its coordinator, as a suspended job, and wakes first ended one that lived."""
    clock = SimpleNamespace(now=100.0)
    for module in (patience, linking):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now), raising=False)
    monkeypatch.setattr(patience, "programs_per_core", lambda: 1.0)
    near = NodeLink(ends[0], LOST_AFTER, beats=False)
    assert not near.is_lost
    clock.now += 3600.0
    assert not near.is_lost
    ends[1].beat()
    wait_until(lambda: near._lines.end.recv(1, socket.MSG_PEEK) == b"\n")
    list(near.taken())
    for _ in range(2):
        clock.now += 0.4 * LOST_AFTER
        assert not near.is_lost
    clock.now += 0.4 * LOST_AFTER
    assert near.is_lost and near.is_silent


@pytest.mark.parametrize("failure", [errno.EMFILE, errno.ECONNABORTED, errno.ENETDOWN])
def test_a_connection_that_cannot_be_taken_is_no_end_of_the_run(failure: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left for a moment, or the network has failed as somebody came: that ended the coordinator."""

    def failing(*given: object) -> NoReturn:
        raise OSError(failure, os.strerror(failure))

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        said = list[str]()
        fleet = Fleet(NodesSpec(), server, "secret", cast(RunLock, None), said.append)
        links = fleet._links
        links._server = cast(socket.socket, SimpleNamespace(accept=failing))
        fleet.poll()
        links._server = server
        monkeypatch.setattr(Knocking, "look", lambda each: (each._lines, {}))
        monkeypatch.setattr(Member, "of", failing)  # the last of a node that goes after its first words
        with socket.create_connection(server.getsockname()):
            wait_until(lambda: fleet.poll() or bool(said))
        assert not fleet.members and os.strerror(failure) in said[0]
        links.close()


def test_who_connects_and_says_nothing_keeps_no_node_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each such connection, as of a port scanner, held the coordinator for a second, and with it all nodes."""
    monkeypatch.setattr("paceline.supervise.nodes.fleet.KNOCK_SECONDS", 30.0)
    hello = {"node": 3, "devices": 1, "rung": "restart", "generation": 0, "ranks": [], "standing": [], "members": [],
             "lost_for": 0.0, "brief": ""}  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        said = list[str]()
        fleet = Fleet(NodesSpec(), server, "secret", cast(RunLock, None), said.append)
        with socket.create_connection(server.getsockname()) as silent, socket.create_connection(server.getsockname()):
            wait_until(lambda: fleet.poll() or len(fleet._knocking) == 2)
            ends = list[Lines]()
            node = threading.Thread(target=lambda: ends.append(knock(server.getsockname(), "secret", hello, 60.0)))
            node.start()
            wait_until(lambda: fleet.poll() or bool(fleet.members))
            node.join()
            assert list(fleet.members) == [3] and len(fleet._knocking) == 2 and "node 3 is there" in said[0]
            silent.sendall(b'{"proof": "none"}\n')
            wait_until(lambda: fleet.poll() or len(said) == 2)
            fleet._knocking[0]._patience = patience.Patience(0.0)
            wait_until(lambda: fleet.poll() or len(said) == 3)
        assert "does not know the run's secret" in said[1] and "it says nothing" in said[2] and not fleet._knocking
        fleet._links.close()


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NodeLinks, Lines]]:
    """Return a coordinator's links, of which one thread beats, and the end of its one node."""
    monkeypatch.setattr(many, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(patience, "programs_per_core", lambda: 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        link = NodeLink(Lines(server.accept()[0]), LOST_AFTER, beats=False)
        links = NodeLinks(server, 0.05)
        links.add(cast(Member, SimpleNamespace(link=link)))
    with near:
        yield links, Lines(near)
    links.close()


def beats(node: Lines, seconds: float = 60.0) -> bool:
    """Return whether a beat comes within some seconds, once those that have come already are taken."""
    while node.take(0.0) is not None:
        pass
    return node.take(seconds) is not None


def test_a_coordinator_that_hangs_while_it_looks_after_ranks_is_no_longer_said_to_live(
    coordinator: tuple[NodeLinks, Lines],
) -> None:
    """Its main thread is here; the beats are another thread's, and told of one that would never look again."""
    links, node = coordinator
    assert beats(node), "before any rank is there it plans, for however long"
    links.look_after()
    wait_until(lambda: not beats(node, 0.5))
    links.look_after()
    links.rest()
    assert beats(node) and beats(node), "a plan for another number of devices, or the report"


def test_a_coordinator_that_waits_for_storage_lives(
    coordinator: tuple[NodeLinks, Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the lock for as long as that takes, so that nobody could take its place."""
    links, node = coordinator
    main = threading.get_native_id()
    monkeypatch.setattr(many, "state_of_thread", lambda thread: "D" if thread == main else "S")
    links.look_after()
    for _ in range(20):
        assert beats(node)
