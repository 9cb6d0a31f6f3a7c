"""A coordinator that a signal has stopped: its own node ends it, so that another takes the lock and its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from nodes import Nodes
from runs import is_running, records_of, steps_of, wait_for_step, wait_until, write_spec
from test_nodes import OPTIONS


@pytest.mark.deep
def test_a_coordinator_that_stands_still_is_replaced_and_leaves_no_process(tmp_path: Path) -> None:
    """It keeps the lock of the run's directory as long as it is there, whether or not it says anything."""
    run_dir = tmp_path / "run"
    nodes = Nodes(write_spec(tmp_path, run_dir, 2, "dp_replicate = 2", precision="fp64"), 2, *OPTIONS,
                  "--set", "run.nodes.lost_after=2 s")  # fmt: skip
    try:
        nodes.start()
        wait_for_step(run_dir, 8, nodes.processes[0])
        stopped = nodes.coordinator()
        os.kill(stopped, signal.SIGSTOP)
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
