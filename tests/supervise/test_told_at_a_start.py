"""What a coordinator hears and says as a world begins: so much for each node, however many ranks there are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.lock import RunLock
from paceline.spec.survive.nodes import NodesSpec
from paceline.spec.survive.phases import PHASES
from paceline.supervise.nodes import lookout
from paceline.supervise.nodes.agent import Agent
from paceline.supervise.nodes.fleet import Fleet
from paceline.supervise.nodes.lookout import Lookout
from paceline.supervise.nodes.member import Member, in_runs, of_runs
from paceline.supervise.pulses.pulse import BEAT, HEAD, SIZE, STEP, pulse_path
from paceline.supervise.pulses.sight import NearSight
from paceline.supervise.pulses.silences import HangLimits, Overview
from paceline.supervise.starting import Starter

EACH = 8  # ranks of a node
HEARD_BYTES = 120  # of a node, in all, of ranks that come and meet
LIMITS = HangLimits(8.0, 10.0, 600.0, 2.0)


def told_of_ranks_that_come(folder: Path, ranks: int) -> list[str]:
    """Return what a node tells of ranks whose pulses come one after the other, which then meet and make steps."""
    folder.mkdir()
    node, now = Lookout(NearSight(folder, range(ranks), LIMITS), range(ranks)), 100.0
    found: list[str] = []

    def beat(rank: int, phase: str, step: int) -> None:
        content = bytearray(SIZE)
        HEAD.pack_into(content, 0, os.getpid(), 0)
        BEAT.pack_into(content, HEAD.size, step + 1, step, PHASES.index(phase), int(now * 1e9))
        STEP.pack_into(content, HEAD.size + BEAT.size, step, 10**8)
        pulse_path(folder, rank).write_bytes(content)

    for rank in range(ranks):
        beat(rank, PHASES[0], 0)
        now += 0.25
        found += map(json.dumps, node.news((), now))
    for step in range(1, 4):
        for rank in range(ranks):
            beat(rank, "forward", step)
        now += 0.25
        found += map(json.dumps, node.news((), now))
    return found


def test_ranks_that_come_are_told_of_once_all_of_a_node_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "programs_per_core", lambda: 1.0)
    of_nodes = {ranks: told_of_ranks_that_come(tmp_path / str(ranks), ranks) for ranks in (1, EACH, 32)}
    for ranks, told in of_nodes.items():
        shown = [Overview.heard(json.loads(line)["overview"]) for line in told]
        assert shown == [Overview(ranks), Overview(ranks, have_met=True)], told
        assert sum(map(len, told)) <= HEARD_BYTES, "nothing for each rank"


def links_of(fleet: Fleet, nodes: int) -> dict[int, list[str]]:
    """Have so many nodes join a fleet, by links that keep what is sent to them, and return what each is sent."""
    sent: dict[int, list[str]] = {number: [] for number in range(nodes)}
    for number in range(nodes):
        link: Any = SimpleNamespace(is_lost=False)
        member = Member(number, EACH, f"10.0.{number // 256}.{number % 256}", "forked", link, lambda: None)

        def send(message: Any, member: Member = member) -> None:
            sent[member.number].append(json.dumps(message))
            if "port" in message:
                member.hear({"port": 29500})

        link.send = send
        fleet.members[number] = member
    return sent


def begun(folder: Path, ranks: int) -> tuple[list[dict[str, str]], dict[int, list[str]]]:
    """Return the places of a world's ranks, and what the nodes are sent that start them."""
    server: Any = None  # where nobody connects
    lock = SimpleNamespace(token="0123456789abcdef", generation=1, for_far_ranks=lambda: {"PACELINE_LOCK": ":0:1"})
    links = SimpleNamespace(knocking=list, ready=list)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("paceline.supervise.nodes.fleet.NodeLinks", lambda *_: links)
        fleet = Fleet(NodesSpec(), server, "secret", cast(RunLock, lock), lambda line: None)
    fleet.open(folder)
    (folder / "generation-1").mkdir(parents=True)
    sent = links_of(fleet, ranks // EACH)
    fleet.seats((), ranks)
    places = fleet.places(folder / "generation-1", ranks)
    for place in places:
        fleet.start(place)
    return places, sent


def test_what_starts_the_ranks_of_a_node_does_not_grow_with_nodes(tmp_path: Path) -> None:
    most: dict[int, int] = {}
    for ranks in (64, 1024, 16384):
        _, sent = begun(tmp_path / str(ranks), ranks)
        most[ranks] = max(sum(map(len, lines)) for lines in sent.values())
    assert most[16384] - most[64] < 100, "longer numbers, and no list of all nodes"
    assert most[16384] < 1600, "of what the ranks of a node have in common, one text"


def test_ranks_are_started_as_their_places_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node hears of each rank how it differs from the one before."""
    places, sent = begun(tmp_path / "coordinator", 3 * EACH)
    started: list[dict[str, str]] = []
    process = SimpleNamespace(pid=1, poll=lambda: None)
    starter: Any = lambda place: started.append(place) or process  # noqa: E731
    monkeypatch.setattr("paceline.supervise.nodes.agent.interface_of", lambda address: "")
    there, here = tmp_path / "coordinator", tmp_path / "node"
    here.mkdir()
    agent = Agent(here, cast(Starter, starter), 2, EACH, {})
    wire: Any = SimpleNamespace(send=lambda message: None, address="127.0.0.1")
    for line in sent[2]:
        agent._do(json.loads(line), wire)
    for place, given in zip(places[2 * EACH :], started, strict=True):
        expected = {name: value.replace(str(there), str(here)) for name, value in place.items()}
        assert {name: given[name] for name in expected} == expected
    assert of_runs(agent._members) == {0, 1, 2}


def test_numbers_of_nodes_are_told_as_runs() -> None:
    assert in_runs([6, 4, 5, 9]) == [[4, 3], [9, 1]]
    assert in_runs(range(2048)) == [[0, 2048]] and in_runs([]) == []
    for numbers in ({0}, {1, 3, 5}, {7, 8, 20, 21, 22, 40}):
        assert of_runs(in_runs(numbers)) == numbers
