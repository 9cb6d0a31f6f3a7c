"""A network that falls into two halves of two nodes each: one of them trains, and it is one experiment throughout."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from networks import networks
from nodes import Nodes
from rounding import assert_curves_close
from runs import paceline, records_of, steps_of, wait_for_step, wait_until, write_spec

STEPS = 12
OPTIONS = [
    word
    for option in ("run.recovery.worth=none", "task.stop=100000 steps", "run.nodes.lost_after=1.5 s",
                   "run.recovery.standby=false")
    for word in ("--set", option)
]  # fmt: skip
CUT = """
[[each]]
kind = "cut"
rank = {rank}
step = 5
towards = {towards}
"""


@pytest.mark.deep
def test_of_two_halves_of_a_network_one_trains_and_the_other_joins_it_again(tmp_path: Path) -> None:
    """Nodes 0 and 1, with the coordinator, hear nothing of nodes 2 and 3, which reach each other and the run's lock."""
    run_dir, faults = tmp_path / "halves", tmp_path / "faults.toml"
    spec = write_spec(tmp_path, run_dir, 4, "dp_replicate = 4", precision="fp64")
    with networks(4) as net:
        towards = list(net.addresses[2:])
        faults.write_text("".join(CUT.format(rank=rank, towards=towards) for rank in (0, 1)))
        nodes = Nodes(spec, 4, *OPTIONS, "--faults", str(faults), within=net.within)
        nodes.host = net.addresses[0]
        try:
            nodes.start()
            holder = nodes.processes[0]
            wait_until(lambda: records_of(run_dir, "recovery") or holder.poll() is not None)
            at = steps_of(run_dir)[-1]["step"]
            wait_for_step(run_dir, at + 3, holder)  # of one half alone
            for name in net.names[:2]:
                for address in towards:
                    words = ["ip", "-n", name, "route", "del", "blackhole", f"{address}/32"]
                    subprocess.run(words, check=True, capture_output=True)
            wait_until(lambda: records_of(run_dir, "recovery")[-1]["to_world"] == 4 or holder.poll() is not None)
            wait_for_step(run_dir, max(STEPS, steps_of(run_dir)[-1]["step"] + 1), holder)
            holder.send_signal(signal.SIGTERM)
            told = [nodes.ended(number) for number in range(4)]
        finally:
            nodes.close()
    assert [code for code, _ in told] == [75, 75, 75, 75], told
    worlds = [(each["from_world"], each["to_world"]) for each in records_of(run_dir, "recovery")]
    assert worlds[0][0] == 4 and worlds[-1][1] == 4 and {size for pair in worlds for size in pair} <= {1, 2, 3, 4}
    assert min(size for pair in worlds for size in pair) <= 2
    assert "this coordinator steps down" not in told[0][1], "half of the nodes are enough for who has the lock"
    found = steps_of(run_dir)
    calm = paceline("train", write_spec(tmp_path, tmp_path / "calm", 1, steps=STEPS, precision="fp64"))
    assert calm.returncode == 0, calm.stderr
    expected = steps_of(tmp_path / "calm")
    assert [step["step"] for step in found] == list(range(1, len(found) + 1))
    assert [step["sample_ids"] for step in found[:STEPS]] == [step["sample_ids"] for step in expected]
    assert_curves_close([step["loss"] for step in found[:STEPS]], [step["loss"] for step in expected])
