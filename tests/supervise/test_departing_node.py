"""A node whose machine is about to end leaves the run, and the others go on: no fault, and no step lost."""

from __future__ import annotations

import signal
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from nodes import Nodes
from runs import records_of, steps_of, wait_for_step, wait_until, write_spec

from paceline.lock import RunLock
from paceline.run.survive.clouds.departing import Departing, Departure, departure_of
from paceline.spec.survive.nodes import NodesSpec
from paceline.spec.survive.recovery import RecoverySpec
from paceline.supervise.nodes.far import FarRank
from paceline.supervise.nodes.fleet import Fleet
from paceline.supervise.nodes.link import NodeLink
from paceline.supervise.nodes.member import Member

HERE = "/proc/self/cwd/ends"  # another file for each process's directory


def test_a_node_leaves_at_its_notice_and_the_others_go_on(tmp_path: Path) -> None:
    """Weights are in shards, so that what the node held is read from the checkpoint of the same step."""
    run_dir = tmp_path / "run"
    folders = [tmp_path / f"node-{number}" for number in range(3)]
    for folder in folders:
        folder.mkdir()
    nodes = Nodes(
        write_spec(tmp_path, run_dir, 3, "dp_shard = 3", precision="fp64"), 3,
        "--set", "task.stop=100000 steps", "--set", "run.recovery.standby=false",
        "--set", f"run.recovery.notice_file={HERE}", within=[("env", "-C", str(folder)) for folder in folders],
    )  # fmt: skip
    try:
        nodes.start()
        wait_for_step(run_dir, 6, nodes.processes[0])
        leaves = next(number for number in (1, 2) if nodes.coordinator() not in nodes.running(number))
        (folders[leaves] / "ends").touch()
        code, said = nodes.ended(leaves)
        assert code == 75, said
        stays = nodes.processes[3 - leaves]
        wait_until(lambda: bool(records_of(run_dir, "recovery")) or stays.poll() is not None)
        wait_for_step(run_dir, len(steps_of(run_dir)) + 3, stays)
        nodes.processes[0].send_signal(signal.SIGTERM)
        assert [nodes.ended(number)[0] for number in (0, 3 - leaves)] == [75, 75]
    finally:
        nodes.close()
    (recovery,) = records_of(run_dir, "recovery")
    assert (recovery["from_world"], recovery["to_world"], recovery["rung"]) == (3, 2, "reform"), recovery
    assert recovery["steps_lost"] == 0 and f"node {leaves} left at a notice" in recovery["because"]
    assert not records_of(run_dir, "fault") and len(records_of(run_dir, "run_started")) == 1
    decided = {each["what"]: each for each in records_of(run_dir, "decision")}
    assert decided["nodes"]["to"] == f"without node {leaves}" and "has appeared" in decided["nodes"]["because"]
    assert decided["replan"]["because"], "the smaller world's plan, with its forecast"
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


@pytest.mark.parametrize(
    ("ranks", "policy"),
    [
        (told(0), RecoverySpec()),  # of the first rank, which has the records
        ([replace(told(1)[0], coordinator=1), *told(1)[1:]], RecoverySpec()),
        ([replace(told(1)[0], coordinator=None), *told(1)[1:]], RecoverySpec()),
        (told(), RecoverySpec()),  # a signal, or a limit
        (told(1, other=True), RecoverySpec()),
        (told(1, stands_by=False), RecoverySpec()),
        (told(1), RecoverySpec(min_devices=5)),
        (told(1), RecoverySpec(on_notice="stop")),
        (told(1), RecoverySpec(reform=False)),
        ([replace(each, node=None) for each in told(1)], RecoverySpec()),  # of one machine
    ],
)
def test_the_whole_run_stops_where_the_others_could_not_go_on(ranks: list[Departing], policy: RecoverySpec) -> None:
    assert departure_of(ranks, policy) is None
