"""Alerts of a run on two nodes: every event is told once, and a node that dies is told by the other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import Nodes
from runs import records_of, wait_for_step, wait_until, write_spec

OPTIONS = [
    word
    for option in ("run.recovery.worth=none", "task.stop=100000 steps", "run.recovery.standby=false")
    for word in ("--set", option)
]
SINKS = """
[run.alerts]
off = ["no_step", "slow", "straggler", "plateau", "spike"] # a machine of many tests at once
group = "0 s"
[[run.alerts.sinks]]
kind = "file"
to = "{to}"
least = "info"
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Nodes, Path, Path]]:
    run_dir, to = tmp_path / "two", tmp_path / "told.jsonl"
    path = write_spec(tmp_path, run_dir, 2, "dp_replicate = 2")
    path.write_text(path.read_text() + SINKS.format(to=to))
    nodes = Nodes(path, 2, *OPTIONS)
    try:
        yield nodes, run_dir, to
    finally:
        nodes.close()


def told(to: Path, *rules: str) -> list[dict[str, Any]]:
    """Return what was sent of these rules, in order."""
    lines = [json.loads(line) for line in to.read_text().splitlines()] if to.exists() else []
    return [each for each in lines if each["rule"] in rules]


def recovered(run_dir: Path, nodes: Nodes, count: int, stays: int) -> None:
    wait_until(lambda: len(records_of(run_dir, "recovery")) == count or nodes.processes[stays].poll() is not None)


def down(to: Path) -> list[tuple[str, str]]:
    return [(each["state"], each["title"]) for each in told(to, "rank_down")]


@pytest.mark.deep
def test_each_event_is_told_once_and_a_lost_node_by_the_other(two: tuple[Nodes, Path, Path]) -> None:
    nodes, run_dir, to = two
    nodes.start()
    wait_for_step(run_dir, 3, nodes.processes[0])
    nodes.lose(1)
    recovered(run_dir, nodes, 1, stays=0)
    wait_until(lambda: len(down(to)) == 2)
    (fired, lost), (over, _) = down(to)
    assert (fired, over) == ("firing", "resolved") and "node 1 (127.0.0.1) is lost" in lost

    nodes.ended(1)
    nodes.start(1)
    recovered(run_dir, nodes, 2, stays=0)
    assert len(down(to)) == 2, "a node that has come back is no trouble"
    nodes.lose(0)  # with the coordinator, and all that watched
    recovered(run_dir, nodes, 3, stays=1)
    wait_until(lambda: len(down(to)) == 4)
    (fired, lost), (over, _) = down(to)[2:]
    assert (fired, over) == ("firing", "resolved") and "the coordinator on node 0" in lost, lost

    nodes.processes[1].send_signal(signal.SIGTERM)
    assert nodes.ended(1)[0] == 75
    wait_until(lambda: bool(told(to, "finished")))
    assert len(told(to, "finished")) == 1 and len(down(to)) == 4, told(to, "rank_down", "finished")


@pytest.mark.deep
def test_a_coordinator_that_is_killed_is_told_once_though_its_watch_lives_on(two: tuple[Nodes, Path, Path]) -> None:
    nodes, run_dir, to = two
    nodes.start()
    wait_for_step(run_dir, 3, nodes.processes[0])
    os.kill(nodes.coordinator(), signal.SIGKILL)
    recovered(run_dir, nodes, 1, stays=0)
    step = records_of(run_dir, "step")[-1]["step"]
    wait_for_step(run_dir, step + 10, nodes.processes[0])
    nodes.processes[0].send_signal(signal.SIGTERM)
    assert [nodes.ended(number)[0] for number in (0, 1)] == [75, 75]
    wait_until(lambda: bool(told(to, "finished")))
    assert [state for state, _ in down(to)] == ["firing", "resolved"], told(to, "rank_down", "finished")
    assert down(to)[0][1] == "the coordinator on node 0 was lost", "a node tells it, and waits for no successor"
    assert len(told(to, "finished")) == 1
