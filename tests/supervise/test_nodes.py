"""Runs on several nodes: what is lost of them, what comes back, and that it is one experiment throughout."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from networks import networks
from nodes import Nodes
from rounding import assert_curves_close
from runs import paceline, records_of, steps_of, wait_for_step, wait_until, write_spec

STEPS = 16
OPTIONS = [
    word
    for option in ("run.recovery.worth=0 s", "task.stop=100000 steps", "run.recovery.standby=false")
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
        staying = [nodes.processes[number] for number in (0, 1)]
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
    wait_for_step(run_dir, STEPS, nodes.processes[1])
    nodes.processes[1].send_signal(signal.SIGTERM)
    told = [nodes.ended(number) for number in range(3)]
    assert [code for code, _ in told] == [75, 75, 75], told
    assert not nodes.running()

    smaller, larger, taken = records_of(run_dir, "recovery")
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
            nodes.processes[1].send_signal(signal.SIGTERM)
            told = [nodes.ended(number) for number in range(3)]
        finally:
            nodes.close()
    assert [code for code, _ in told] == [75, 75, 75], told
    assert "this coordinator steps down" in told[0][1]
    smaller, larger = records_of(run_dir, "recovery")
    assert (smaller["from_world"], smaller["to_world"], smaller["because"]) == (3, 2, "the coordinator was lost")
    assert (larger["from_world"], larger["to_world"]) == (2, 3)
    found, expected = steps_of(run_dir), steps_of(one_device)
    assert [step["step"] for step in found] == list(range(1, len(found) + 1))
    compared = min(len(found), STEPS)
    assert [step["sample_ids"] for step in found[:compared]] == [step["sample_ids"] for step in expected[:compared]]
    assert_curves_close([step["loss"] for step in found[:compared]], [step["loss"] for step in expected[:compared]])


def test_a_node_that_is_lost_with_its_memory_is_restored_from_its_peers(folder: Path, one_device: Path) -> None:
    """Shards on two nodes, and no checkpoint on disk: what the lost node held is in the memory of the other."""
    run_dir = folder / "pieces"
    spec = write_spec(folder, run_dir, 2, "dp_shard = 2", precision="fp64")
    nodes = Nodes(spec, 2, *OPTIONS, "--set", "run.checkpoint_every=none", "--set",
                  "run.checkpoints.memory_every=2 steps")  # fmt: skip
    try:
        nodes.start()
        wait_for_step(run_dir, 7, nodes.processes[0])
        nodes.lose(1)
        wait_until(lambda: bool(records_of(run_dir, "recovery")) or nodes.processes[0].poll() is not None)
        wait_for_step(run_dir, STEPS, nodes.processes[0])
        assert not list((run_dir / "checkpoints").glob("step-*")), "no disk was needed"
        nodes.processes[0].send_signal(signal.SIGTERM)
        code, told = nodes.ended(0)
    finally:
        nodes.close()
    assert code == 75, told
    (recovery,) = records_of(run_dir, "recovery")
    assert (recovery["from_world"], recovery["to_world"]) == (2, 1)
    assert recovery["step"] >= 4 and recovery["step"] % 2 == 0 and recovery["steps_lost"] <= 4
    assert [record["to"] for record in records_of(run_dir, "decision") if record["what"] == "restore"]
    found, expected = steps_of(run_dir), steps_of(one_device)
    assert [step["step"] for step in found] == list(range(1, len(found) + 1))
    assert [step["sample_ids"] for step in found[:STEPS]] == [step["sample_ids"] for step in expected]
    assert_curves_close([step["loss"] for step in found[:STEPS]], [step["loss"] for step in expected])
