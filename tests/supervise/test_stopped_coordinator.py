"""A coordinator that stands still or is lost: another takes the lock and its place, and waits for few nodes in vain."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from nodes import Nodes
from runs import is_running, records_of, steps_of, wait_for_step, wait_until, write_spec
from test_nodes import OPTIONS

from paceline.session.nodes.coordinate import _gather
from paceline.spec.load import Spec
from paceline.spec.survive.nodes import NodesSpec
from paceline.supervise.nodes.fleet import Fleet
from paceline.supervise.nodes.meeting import Meeting

TICK = 0.05


class ArrivingNodes:
    """A fleet of stand-ins for nodes of a world of three, which come at a second of a clock of their own."""

    def __init__(self, arrivals: dict[int, float]) -> None:
        self.members: dict[int, SimpleNamespace] = {}
        self.clock, self._arrivals = 0.0, arrivals

    def gather(self, expected: Callable[[], int], seconds: float) -> None:
        until = self.clock + seconds
        while True:
            for node, moment in self._arrivals.items():
                if moment <= self.clock:
                    self.members[node] = SimpleNamespace(was={"members": [[0, 3]]})
            if len(self.members) >= expected() or self.clock >= until:
                return
            self.clock += TICK


@pytest.mark.parametrize(
    ("arrivals", "left", "waited"),
    [
        ({0: 0.2, 1: 0.1, 2: 0.3}, "", 0.3),  # the coordinator alone was lost: its node comes with the others
        ({1: 0.1, 2: 0.3}, "", 0.3 + 0.5),  # its node was lost with it, for which two seconds were waited
        ({1: 0.1, 2: 0.3}, "node 0 left at a notice", 0.3),  # and does not come: half a second was waited
        ({0: 0.1, 1: 0.1}, "", 0.1 + 2.0),  # another node is missing, which may be slow
    ],
)
def test_a_new_coordinator_waits_for_the_node_of_the_last_one_shortly(
    arrivals: dict[int, float], left: str, waited: float
) -> None:
    spec, fleet = SimpleNamespace(run=SimpleNamespace(nodes=NodesSpec(count=3))), ArrivingNodes(arrivals)
    _gather(cast(Spec, spec), cast(Fleet, fleet), Meeting("node0", 1, "secret", 0, 1, left))
    assert fleet.members.keys() == arrivals.keys() and fleet.clock == pytest.approx(waited, abs=TICK)


@pytest.mark.deep
def test_a_coordinator_that_stands_still_is_replaced_and_leaves_no_process(tmp_path: Path) -> None:
    """It keeps the lock of the run's directory as long as it is there, whether or not it says anything."""
    run_dir, faults = tmp_path / "run", tmp_path / "faults.toml"
    faults.write_text('[[each]]\nkind = "stop"\nwhom = "coordinator"\nstep = 8\nrank = 0\n')
    nodes = Nodes(write_spec(tmp_path, run_dir, 2, "dp_replicate = 2", precision="fp64"), 2, *OPTIONS,
                  "--set", "run.nodes.lost_after=2 s", "--faults", str(faults))  # fmt: skip
    try:
        nodes.start()
        wait_for_step(run_dir, 4, nodes.processes[0])
        stopped = nodes.coordinator()
        ended = [process.poll for process in nodes.processes.values()]
        wait_until(lambda: bool(records_of(run_dir, "recovery")) or any(poll() is not None for poll in ended))
        assert not is_running(stopped)
        (recovery,) = records_of(run_dir, "recovery")
        assert (recovery["because"], recovery["rung"]) == ("the coordinator was lost", "reform")
        assert (recovery["from_world"], recovery["to_world"], recovery["steps_lost"]) == (2, 2, 0)
        nodes.processes[0].send_signal(signal.SIGTERM)
        told = [nodes.ended(number) for number in (0, 1)]
        assert [code for code, _ in told] == [75, 75], told
        assert sum(f"the coordinator here, process {stopped}, is ended" in said for _, said in told) == 1
        assert not nodes.running()
    finally:
        nodes.close()
    steps = [step["step"] for step in steps_of(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
